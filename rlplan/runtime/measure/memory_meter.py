"""Memory of a process, read from the Linux kernel and from live tensors.

Writing to `/proc/self/clear_refs` resets the kernel's peak, so each action has a peak of its own.
In: nothing, or tensors. Out: bytes.
"""

import ctypes
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlplan.runtime.device.layer import DeviceBytes

if TYPE_CHECKING:
    import torch

_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Measurement:
    process: str
    start_s: float
    """Start of the action, in seconds since 1970."""

    end_s: float
    """End of the action, in seconds since 1970."""

    peak_bytes: int
    """Largest resident size during the action."""

    resident_bytes: int
    components: dict[tuple[str, str], int]
    """Bytes at the end of the action by (role, kind)."""

    loaded_components: dict[tuple[str, str], int]
    """Bytes by (role, kind) of weights as they were loaded, before the engine repacked them during the action."""

    device: DeviceBytes | None = None
    """Memory of its GPU; None if it has none."""


def merge_measurements(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Merge the measurements of several calls of one action into one per process."""
    by_process: dict[str, Measurement] = {}
    for current in measurements:
        before = by_process.get(current.process, current)
        last = max(before, current, key=lambda measurement: measurement.end_s)
        peaks = [part.device.peak_allocated for part in (before, current) if part.device]
        by_process[current.process] = replace(
            last,
            start_s=min(before.start_s, current.start_s),
            peak_bytes=max(before.peak_bytes, current.peak_bytes),
            loaded_components=before.loaded_components | current.loaded_components,
            device=last.device and replace(last.device, peak_allocated=max(peaks)),
        )
    return list(by_process.values())


def reset_peak() -> None:
    """Reset the kernel's peak resident size to the current size.

    Without permission the peak counts from the process's start; a job on a CPU host has been refused before that.
    """
    with suppress(OSError):
        # 5 resets only the peak; the other values clear the marks of referenced pages (man proc_pid_clear_refs)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_bytes() -> int:
    """Largest resident size since `reset_peak`, without pages that another process counts."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 - _elsewhere
    raise OSError("/proc/self/status has no VmHWM line")


@dataclass(eq=False)
class Peak:
    """Largest resident size so far inside a `with peak_inside()` block."""

    num_bytes: int = 0


_peaks_lock = threading.Lock()
_open_peaks: list[Peak] = []
_elsewhere = 0
"""Bytes of pages that are mapped here but counted by another process."""


@contextmanager
def peak_inside() -> Iterator[Peak]:
    """Watch the peak inside the block. Blocks of several threads may overlap; all share the kernel's single peak."""
    peak = Peak()
    with _peaks_lock:
        _note_peak()
        reset_peak()
        _open_peaks.append(peak)
    try:
        yield peak
    finally:
        with _peaks_lock:
            _note_peak()
            _open_peaks.remove(peak)


def _note_peak() -> None:
    seen = peak_bytes() if _open_peaks else 0
    for peak in _open_peaks:
        peak.num_bytes = max(peak.num_bytes, seen)


@contextmanager
def counted_elsewhere(num_bytes: int) -> Iterator[None]:
    """Leave out bytes that the block maps and that another process of the run counts.

    The block must touch all of these pages: the kernel counts a page in each process that has touched it. A negative
    number is for a block that unmaps them.
    """
    global _elsewhere
    with _peaks_lock:
        _note_peak()  # an earlier peak has no such pages to subtract
        yield
        _elsewhere += num_bytes
        reset_peak()


def resident_bytes() -> int:
    """Resident bytes of this process, without pages that another process counts."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE - _elsewhere


def touched_length(address: int, num_bytes: int) -> int:
    """Bytes of a piece of memory up to the end of its last resident page; the pages after it were never written.

    Raises: OSError.
    """
    first = address // _PAGE
    seen = _residency(first, -(-(address + num_bytes) // _PAGE))
    last = max((index for index, page in enumerate(seen) if page & 1), default=-1)
    return max(0, min(num_bytes, (first + last + 1) * _PAGE - address))


def touched_bytes(address: int, num_bytes: int) -> int:
    """Bytes of a piece of memory in resident pages; memory that was never written to has none.

    Pages that lie only partly inside count if any full page does. glibc touches the first page of a mapping to store
    its size, so a partial page alone proves nothing. Raises: OSError.
    """
    first, end = -(-address // _PAGE), (address + num_bytes) // _PAGE
    if end <= first:
        return num_bytes
    count = sum(page & 1 for page in _residency(first, end))
    ends = num_bytes - (end - first) * _PAGE
    return count * _PAGE + (ends if count else 0)


def _residency(first: int, end: int) -> "ctypes.Array[ctypes.c_ubyte]":
    """Ask mincore for one byte per page from `first` up to `end`."""
    seen = (ctypes.c_ubyte * (end - first))()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(first * _PAGE), ctypes.c_size_t((end - first) * _PAGE), seen):
        raise OSError(ctypes.get_errno(), "mincore")
    return seen


def give_memory_back() -> None:
    """Return the free pages of glibc's heap to the system, so that only used memory stays resident."""
    ctypes.CDLL(None).malloc_trim(0)


def storage_bytes(tensors: "Iterable[torch.Tensor | None]") -> int:
    """Bytes of the tensors' distinct storages; views of one storage count once."""
    storages = {}
    for tensor in tensors:
        if tensor is not None and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def read_pages(storages: "Iterable[torch.UntypedStorage]") -> None:
    """Read one byte of every page, so the kernel counts weights that safetensors only mapped from a file."""
    import torch

    for storage in storages:
        torch.tensor([], dtype=torch.uint8).set_(storage)[::_PAGE].sum()
