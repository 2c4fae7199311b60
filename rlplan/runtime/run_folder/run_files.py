"""Run files: the JSON files of a run folder, each whole or as it was before; the status on a full disk, too.

In: values. Out: files. Left out: lines that are added while the run goes on (recorder.py), checkpoints (checkpoints/).
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rlplan.runtime.run_folder.disk_errors import writing_file


def write_json(path: Path, value: Mapping[str, object]) -> None:
    replace_atomically(path, _as_text(value))


def replace_atomically(path: Path, data: bytes) -> None:
    """Write a file whole, or leave the one before. Raises: RunError where the disk does not take it."""
    partial = path.with_name(f"{path.name}.partial")
    with writing_file(path, len(data)):
        try:
            partial.write_bytes(data)
            partial.replace(path)
        except OSError:
            with suppress(OSError):
                partial.unlink()
            raise


def overwrite_status(path: Path, status: Mapping[str, object]) -> None:
    """Write into the blocks that a file has already, which a full disk still takes. Its `message` is cut to fit in.

    Raises: OSError.
    """
    found = path.stat()
    room = max(found.st_size, found.st_blocks * 512)
    message, text = str(status["message"]), _as_text(status)
    while len(text) > room and message:
        message = message[: -max(1, len(message) // 8)]
        text = _as_text({**status, "message": message})
    with path.open("r+b", buffering=0) as file:
        file.write(text)
        file.truncate()
        os.fsync(file.fileno())


def _as_text(value: Mapping[str, object]) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()
