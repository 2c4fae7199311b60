"""Peaks of a process where the kernel's may not be reset."""

from pathlib import Path

import pytest

from rlplan.runtime.measure import memory_meter
from rlplan.runtime.measure.memory_meter import peak_bytes, peak_inside


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
