"""Offloaded states: storages leave memory and come back bit for bit, into the tensors that view them."""

from pathlib import Path

import pytest
import torch

from rlplan.errors import RunError
from rlplan.runtime.measure.memory_meter import resident_bytes, touched_bytes
from rlplan.runtime.workers.trainer.offloaded_states import OffloadedStates


def test_every_view_of_a_storage_is_whole_again() -> None:
    flat = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    view, other = flat[100:200].view(10, 10), torch.arange(7, dtype=torch.bfloat16)
    before = flat.clone(), view.clone(), other.clone()
    offloaded = OffloadedStates()
    offloaded.offload([flat.untyped_storage(), other.untyped_storage()])
    assert (flat.untyped_storage().nbytes(), other.untyped_storage().nbytes(), offloaded.num_bytes) == (0, 0, 4014)
    offloaded.reload()
    assert all(torch.equal(now, then) for now, then in zip((flat, view, other), before, strict=True))
    offloaded.reload()  # nothing is offloaded


def test_parking_gives_the_memory_back_to_the_system() -> None:
    tensor = torch.ones(16_000_000)
    before, offloaded = resident_bytes(), OffloadedStates()
    offloaded.offload([tensor.untyped_storage()])
    assert before - resident_bytes() >= 0.9 * 64_000_000
    offloaded.reload()
    assert float(tensor.sum()) == 16_000_000


def test_memory_that_was_never_written_to_does_not_come_back_as_memory_that_is_held() -> None:
    """100 MB: glibc maps tensors of more than 32 MiB anew, whatever was freed before."""
    bucket = torch.empty(100_000_000, dtype=torch.uint8)
    bucket[:5000] = 7
    offloaded = OffloadedStates()
    offloaded.offload([bucket.untyped_storage()])
    offloaded.reload()
    assert touched_bytes(bucket.data_ptr(), 100_000_000) < 5_000_000, "a huge page or two"
    assert int(bucket[:5000].sum()) == 35_000


def test_a_disk_that_is_full_is_said_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.ones(1000)
    monkeypatch.setattr("tempfile.mkstemp", lambda prefix: (_full(), str(_create_file(tmp_path))))
    with pytest.raises(RunError, match="the disk is full"):
        OffloadedStates().offload([tensor.untyped_storage()])
    assert float(tensor.sum()) == 1000


def _full() -> int:
    import os

    return os.open("/dev/full", os.O_RDWR)


def _create_file(folder: Path) -> Path:
    path = folder / "offloaded"
    path.touch()
    return path
