"""The memory of a stand-in for a GPU: bytes of tensors on the CPU, counted operation by operation, up to a capacity.

In: tensors as torch makes them. Out: bytes that live now and their peak; torch's own OutOfMemoryError where a device is
full. Several processes share a device through a file with a slot for each.
Counting holds in the threads that have entered the mode.
"""

import fcntl
import mmap
import os
import struct
import threading
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlplan.units import format_bytes


class CountedMemory(TorchDispatchMode):
    """Bytes of the storages behind the results of every operation inside the block.

    capacity: None for no end. shared: where other processes hold some of it, too. torch's own MemTracker does not take
    frozen parameters.
    """

    def __init__(self, capacity: int | None = None, shared: "SharedBytes | None" = None) -> None:
        super().__init__()
        self.capacity, self.shared, self.peak = capacity, shared, 0
        self._living: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}
        self._total = 0
        self._elsewhere: set[int] = set()
        self._lock = threading.RLock()

    @property
    def now(self) -> int:
        """In tensors that live. A storage that was resized without an operation is seen here."""
        with self._lock:
            for key, reference in list(self._living.items()):
                if (storage := reference()) is not None:
                    self._note(key, storage.nbytes())
            return self._total

    @property
    def of_others(self) -> int:
        """What other processes hold of the same device."""
        return self.shared.of_others() if self.shared else 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self.count(leaf)
        return result

    def count(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage until it is gone. Raises: OutOfMemoryError where that is more than there is."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        with self._lock:
            is_new = key not in self._living and key not in self._elsewhere
            if is_new:
                self._living[key] = weakref.ref(storage, lambda _: self._forget(key))
            if key in self._living and self._note(key, storage.nbytes()) and (self._total > self.peak or self.shared):
                self._check(key, storage.nbytes(), is_new=is_new)

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Of a tensor that lies elsewhere nothing is counted."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._forget(key)
        self._elsewhere.add(key)
        weakref.finalize(storage, self._elsewhere.discard, key)

    def _check(self, key: int, num_bytes: int, *, is_new: bool) -> None:
        """Against the exact sum: what was counted last may have shrunk since without an operation."""
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

    def _note(self, key: int, num_bytes: int) -> bool:
        """Whether a storage has grown."""
        change = num_bytes - self._sizes.get(key, 0)
        self._sizes[key] = num_bytes
        self._add(change)
        return change > 0

    def _forget(self, key: int) -> None:
        with self._lock:
            self._living.pop(key, None)
            self._add(-self._sizes.pop(key, 0))

    def _add(self, num_bytes: int) -> None:
        self._total += num_bytes
        if self.shared is not None and num_bytes:
            self.shared.write(self._total)


class SharedBytes:
    """What each process holds of one device, in a file that all of them map."""

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
        """What this process holds now."""
        struct.pack_into("qq", self._memory, 16 * self.slot, os.getpid(), num_bytes)

    def of_others(self) -> int:
        """What the other living processes hold."""
        numbers = self._SLOTS.unpack_from(self._memory)
        held = zip(numbers[::2], numbers[1::2], strict=True)
        return sum(size for process, size in held if size and process != os.getpid() and _is_alive(process))


def _is_alive(process: int) -> bool:
    return bool(process) and Path(f"/proc/{process}").exists()
