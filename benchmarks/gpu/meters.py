"""Meters: bytes on a device, by each statistic that there is.

In: a device, and on a CPU the tensors that exist already. Out: bytes by statistic.
On CUDA they are the caching allocator's and the driver's. A CPU has no such allocator: there every operation's results
are counted, so that a dry run compares real numbers.
"""

import gc
import subprocess
import threading
import weakref
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SMI = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
SMI_TIMEOUT_S = 20.0


class CudaMeter:
    """`allocated`, `active` and `reserved` at their peak, `process` what the driver counts more than before."""

    def __init__(self, used_before: int | None) -> None:
        self.used_before = used_before

    def __enter__(self) -> "CudaMeter":
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()

    def peaks(self) -> dict[str, float]:
        """Since it was entered."""
        stats = torch.cuda.memory_stats()
        peak_bytes: dict[str, float] = {
            "allocated_bytes": stats["allocated_bytes.all.peak"],
            "active_bytes": stats["active_bytes.all.peak"],
            "reserved_bytes": stats["reserved_bytes.all.peak"],
        }
        used = used_by_driver()
        if used is not None and self.used_before is not None:
            peak_bytes["process_bytes"] = used - self.used_before
        return peak_bytes

    def resident(self) -> int:
        """Bytes of tensors now."""
        torch.cuda.synchronize()
        gc.collect()
        return int(torch.cuda.memory_allocated())


class CountedTensors(TorchDispatchMode):
    """Bytes of the storages behind the results of every operation inside the block, in the threads that entered it.

    torch's own MemTracker does not take frozen parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._living: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}
        self._total = 0
        self._lock = threading.RLock()

    @property
    def now(self) -> int:
        """Bytes of live tensors. A storage that was resized without an operation is seen here."""
        with self._lock:
            for key, reference in list(self._living.items()):
                if (storage := reference()) is not None:
                    self._note(key, storage.nbytes())
            return self._total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self.count(leaf)
        return result

    def count(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage until it is gone."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        with self._lock:
            is_new = key not in self._living
            if is_new:
                self._living[key] = weakref.ref(storage, lambda _: self._forget(key))
            if self._note(key, storage.nbytes()):
                self._note_growth(key, storage.nbytes(), is_new=is_new)

    def _note_growth(self, key: int, num_bytes: int, *, is_new: bool) -> None:
        """Note the peak from the exact sum: what was counted last may have shrunk since without an operation."""
        if self._total > self.peak:
            self.peak = max(self.peak, self.now)

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


class TracedMeter(CountedTensors):
    """`allocated` alone: the storages behind the results of every operation, and those that live when it is entered."""

    def __enter__(self) -> Self:
        gc.collect()
        for thing in gc.get_objects():
            if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
                self.count(thing)
        self.peak = self.resident()
        return super().__enter__()

    def peaks(self) -> dict[str, float]:
        """Since it was entered."""
        return {"allocated_bytes": self.peak}

    def resident(self) -> int:
        """Bytes of tensors now."""
        gc.collect()
        return self.now


Meter = CudaMeter | TracedMeter


def make_meter(device: torch.device, used_before: int | None) -> Meter:
    """The meter of a device. used_before: what the driver showed before this process came to the device."""
    return CudaMeter(used_before) if device.type == "cuda" else TracedMeter()


def used_by_driver(index: int = 0) -> int | None:
    """Bytes in use on a GPU by all processes: NVML, else nvidia-smi, else None."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index)).used)
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no package, no driver, no such device: ask the program
        return _used_by_smi(index)


def _used_by_smi(index: int) -> int | None:
    try:
        done = subprocess.run(
            [*SMI, f"--id={index}"], capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True
        )
        return int(done.stdout.strip()) << 20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
