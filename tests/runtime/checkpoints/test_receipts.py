"""A rank's receipt: where the disk refuses it the driver learns so at once, and does not wait for it."""

import errno
import os
from array import array
from pathlib import Path
from typing import Any

import pytest

from rlplan.runtime.checkpoints.checkpointer import _read, _UnwrittenError
from rlplan.runtime.checkpoints.tensor_file import Piece
from rlplan.runtime.workers.trainer.state_saver import _write_with_receipt

PIECES = [Piece("master/a@0", "F32", memoryview(array("f", [1.0])))]


def test_a_receipt_says_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    _write_with_receipt(path, PIECES, {"num_steps": 3, "scaler": {}})
    message = _read(path.with_suffix(".receipt"))
    assert (message["num_steps"], message["file"]["num_bytes"]) == (3, path.stat().st_size)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_receipt_that_the_disk_refuses_is_there_and_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refused(path: Path, *_: Any, **__: Any) -> int:
        path.touch()
        raise OSError(number, os.strerror(number))

    path = tmp_path / "policy.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", refused)
        _write_with_receipt(path, PIECES, {"num_steps": 3, "scaler": {}})
    assert not path.with_suffix(".partial").exists()
    with pytest.raises(_UnwrittenError, match=r"the disk does not take policy\.receipt"):
        _read(path.with_suffix(".receipt"))
