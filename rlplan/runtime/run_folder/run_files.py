"""Run files: atomic writes of a run folder's JSON files, and of the status on a full disk.

In: values. Out: files. Left out: files of lines (recorder.py), checkpoints (checkpoints/).
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rlplan.runtime.run_folder.disk_errors import writing_file


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write a JSON file atomically. Raises: RunError for a disk error."""
    replace_atomically(path, _as_text(value))


def replace_atomically(path: Path, data: bytes) -> None:
    """Write a file atomically: on failure the previous file stays. Raises: RunError for a disk error."""
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
    """Overwrite a file within its allocated blocks, which works on a full disk; `message` is shortened to fit.

    Raises: OSError.
    """
    existing = path.stat()
    room = max(existing.st_size, existing.st_blocks * 512)
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
