"""MemoryMeter: what a process holds, read from the kernel and from live tensors.

In: nothing, or tensors. Out: bytes. Linux only: `/proc/self/clear_refs` resets the peak,
so that each action has its own.
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
    """In seconds since 1970."""

    end_s: float
    """In seconds since 1970."""

    peak_bytes: int
    """The most that was resident inside the action."""

    resident_bytes: int
    components: dict[tuple[str, str], int]
    """Bytes at its end by (role, kind)."""

    loaded_components: dict[tuple[str, str], int]
    """Those that the process repacked inside the action, as they were before; bytes by (role, kind)."""

    device: DeviceBytes | None = None
    """What its GPU holds; None where it has none."""


def merged(measurements: Iterable[Measurement]) -> list[Measurement]:
    """One measurement a process: of several calls that are one action, from the first to the last."""
    whole: dict[str, Measurement] = {}
    for one in measurements:
        before = whole.get(one.process, one)
        last = max(before, one, key=lambda each: each.end_s)
        peaks = [each.device.peak_allocated for each in (before, one) if each.device]
        whole[one.process] = replace(
            last,
            start_s=min(before.start_s, one.start_s),
            peak_bytes=max(before.peak_bytes, one.peak_bytes),
            loaded_components=before.loaded_components | one.loaded_components,
            device=last.device and replace(last.device, peak_allocated=max(peaks)),
        )
    return list(whole.values())


def reset_peak() -> None:
    """Make the kernel's peak resident size start again from what is resident now.

    Where that may not be asked it stays that since the process's start; a job on a CPU host is refused there before.
    """
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_bytes() -> int:
    """Largest resident size since `reset_peak`, as the kernel saw it, without what another process counts."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 - _elsewhere
    raise OSError("/proc/self/status has no VmHWM line")


@dataclass(eq=False)
class Peak:
    """The largest resident size seen so far inside a `with peak_inside()` block."""

    num_bytes: int = 0


_peaks_lock = threading.Lock()
_open_peaks: list[Peak] = []
_elsewhere = 0
"""Bytes of pages that are mapped here and counted by another process."""


@contextmanager
def peak_inside() -> Iterator[Peak]:
    """Watch the peak inside the block. Blocks of several threads may overlap: the kernel has one peak for all."""
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
    """For a block that maps so many bytes which another process of the run counts: they are left out from then on.

    All of them are to be mapped when the block ends: the kernel counts a page in each process that has touched it. A
    negative number is for a block that unmaps them.
    """
    global _elsewhere
    with _peaks_lock:
        _note_peak()
        yield
        _elsewhere += num_bytes
        reset_peak()


def resident_bytes() -> int:
    """What this process holds, without what another one counts."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE - _elsewhere


def touched_length(address: int, num_bytes: int) -> int:
    """Bytes of a piece of memory up to the end of its last resident page: what lies behind was never written to.

    Raises: OSError.
    """
    first = address // _PAGE
    seen = _residency(first, -(-(address + num_bytes) // _PAGE))
    last = max((index for index, page in enumerate(seen) if page & 1), default=-1)
    return max(0, min(num_bytes, (first + last + 1) * _PAGE - address))


def touched_bytes(address: int, num_bytes: int) -> int:
    """Bytes of a piece of memory whose pages are resident: memory that was never written to is none.

    Only pages that lie wholly inside count, and the parts of pages at both ends do if one of those does: the page where
    glibc notes the size of a mapping is touched when the mapping is made. Raises: OSError.
    """
    first, end = -(-address // _PAGE), (address + num_bytes) // _PAGE
    if end <= first:
        return num_bytes
    count = sum(page & 1 for page in _residency(first, end))
    ends = num_bytes - (end - first) * _PAGE
    return count * _PAGE + (ends if count else 0)


def _residency(first: int, end: int) -> "ctypes.Array[ctypes.c_ubyte]":
    """mincore's byte for each page from `first` up to `end`."""
    seen = (ctypes.c_ubyte * (end - first))()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(first * _PAGE), ctypes.c_size_t((end - first) * _PAGE), seen):
        raise OSError(ctypes.get_errno(), "mincore")
    return seen


def give_memory_back() -> None:
    """Return the free pages of glibc's heap to the system: what stays resident is what is held."""
    ctypes.CDLL(None).malloc_trim(0)


def storage_bytes(tensors: "Iterable[torch.Tensor | None]") -> int:
    """Bytes of the distinct storages behind the tensors: views of one storage count once."""
    storages = {}
    for tensor in tensors:
        if tensor is not None and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def read_pages(storages: "Iterable[torch.UntypedStorage]") -> None:
    """Read one byte of every page, so that the kernel counts weights that safetensors has only mapped from a file."""
    import torch

    for storage in storages:
        torch.tensor([], dtype=torch.uint8).set_(storage)[::_PAGE].sum()
