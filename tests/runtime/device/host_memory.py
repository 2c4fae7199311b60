"""The memory of a stand-in for a GPU: bytes of tensors on the CPU, counted operation by operation, up to a capacity.

In: tensors as torch makes them. Out: bytes that live now and their peak; torch's own OutOfMemoryError where a device is
full. Several processes share a device through a file with a slot for each.
Counting holds in the threads that have entered the mode.
"""

import fcntl
import mmap
import os
import struct
import weakref
from pathlib import Path

import torch

from benchmarks.gpu.meters import CountedTensors
from rlplan.units import format_bytes


class CountedMemory(CountedTensors):
    """The same up to a capacity. capacity: None for no end. shared: where other processes hold some of it, too."""

    def __init__(self, capacity: int | None = None, shared: "SharedBytes | None" = None) -> None:
        super().__init__()
        self.capacity, self.shared = capacity, shared
        self._elsewhere: set[int] = set()

    @property
    def of_others(self) -> int:
        """Bytes that other processes hold of the same device."""
        return self.shared.of_others() if self.shared else 0

    def count(self, tensor: torch.Tensor) -> None:
        """Count like the base class. Raises: OutOfMemoryError when the device has less memory."""
        if tensor.untyped_storage()._cdata not in self._elsewhere:
            super().count(tensor)

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Stop counting a tensor whose memory another process counts."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._forget(key)
        self._elsewhere.add(key)
        weakref.finalize(storage, self._elsewhere.discard, key)

    def _note_growth(self, key: int, num_bytes: int, *, is_new: bool) -> None:
        others = self.of_others
        if self._total <= self.peak and (self.capacity is None or self._total + others <= self.capacity):
            return
        now = self.now
        if self.capacity is not None and now + others > self.capacity:
            if is_new:
                self._forget(key)
            taken = now + others - num_bytes
            raise torch.OutOfMemoryError(
                f"out of memory: {format_bytes(num_bytes)} asked for, {format_bytes(taken)} of "
                f"{format_bytes(self.capacity)} are taken"
            )
        self.peak = max(self.peak, now)

    def _add(self, num_bytes: int) -> None:
        super()._add(num_bytes)
        if self.shared is not None and num_bytes:
            self.shared.write(self._total)


class SharedBytes:
    """Bytes of one device by process, in a file that all of them map."""

    NUM_SLOTS = 32
    _SLOTS = struct.Struct(f"{2 * NUM_SLOTS}q")
    """A process id and its bytes, so many times."""

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.truncate(file.fileno(), self._SLOTS.size)
            self._memory = mmap.mmap(file.fileno(), self._SLOTS.size)
            processes = self._SLOTS.unpack_from(self._memory)[::2]
            self.slot = next(slot for slot, process in enumerate(processes) if not _is_alive(process))
            self.write(0)
            fcntl.flock(file, fcntl.LOCK_UN)  # the mapping keeps the file open, and with it the lock

    def write(self, num_bytes: int) -> None:
        """Write the bytes that this process holds."""
        struct.pack_into("qq", self._memory, 16 * self.slot, os.getpid(), num_bytes)

    def of_others(self) -> int:
        """Bytes that the other living processes hold."""
        numbers = self._SLOTS.unpack_from(self._memory)
        held_bytes = zip(numbers[::2], numbers[1::2], strict=True)
        return sum(size for process, size in held_bytes if size and process != os.getpid() and _is_alive(process))


def _is_alive(process: int) -> bool:
    return bool(process) and Path(f"/proc/{process}").exists()
