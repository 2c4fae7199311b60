"""Peaks of a process: where the kernel's may not be reset, and of several calls that are one action."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlplan.runtime.device.layer import DeviceBytes
from rlplan.runtime.measure import memory_meter
from rlplan.runtime.measure.memory_meter import (
    Measurement,
    merge_measurements,
    peak_bytes,
    peak_inside,
    read_pages,
    resident_bytes,
)


def test_where_the_peak_cannot_be_reset_it_is_that_since_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def refuse(self: Path, *arguments: str, **options: str) -> int:
        if self == Path("/proc/self/clear_refs"):
            raise PermissionError(13, "Permission denied", str(self))
        return write(self, *arguments, **options)

    monkeypatch.setattr(memory_meter.Path, "write_text", refuse)
    earlier = len(b"x" * (256 << 20))
    with peak_inside() as peak:
        pass
    assert earlier < peak.num_bytes <= peak_bytes()


def test_the_peak_of_several_calls_is_the_largest_of_them_on_the_gpu_too() -> None:
    """Each call resets the peak of its process."""

    def call(end_s: float, peak: int, peak_allocated: int | None) -> Measurement:
        device = None if peak_allocated is None else DeviceBytes(10, peak_allocated, 20, 0, 30)
        return Measurement("policy_trainer/0", end_s - 1, end_s, peak, 5, {}, {}, device)

    (whole,) = merge_measurements([call(1.0, 7, None), call(2.0, 9, 90), call(3.0, 8, 40)])
    assert (whole.start_s, whole.end_s, whole.peak_bytes) == (0.0, 3.0, 9)
    assert whole.device == DeviceBytes(10, 90, 20, 0, 30)


def test_weights_that_are_mapped_from_a_file_are_resident_once_their_pages_are_read(tmp_path: Path) -> None:
    """safetensors maps a file, and the kernel counts a page at its first read: a scorer frees what it has read."""
    num_bytes = 64 << 20
    save_file({"weight": torch.ones(num_bytes // 4)}, tmp_path / "model.safetensors")
    weight = load_file(tmp_path / "model.safetensors")["weight"]
    before = resident_bytes()
    read_pages([weight.untyped_storage()])
    assert resident_bytes() - before > 0.9 * num_bytes
