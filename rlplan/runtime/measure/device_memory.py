"""Device memory: what a process and its GPU hold, from torch's allocator and from the driver.

In: nothing. Out: bytes, or None where there is no CUDA device. Written against torch 2.11 to 2.13 and nvidia-ml-py 13;
not yet run on a GPU.
"""

import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    allocated: int
    """In tensors now, by torch's allocator."""

    peak_allocated: int
    """The most in tensors since the peak was reset, by torch's allocator."""

    reserved: int
    """That torch's allocator keeps, in tensors or not."""

    process: int
    """Of this process by the driver, context and libraries included; 0 where it does not tell processes apart."""

    total: int
    """In use on the whole GPU, by the driver."""

    @property
    def peak(self) -> int:
        """The most that tensors took, with the process's context and libraries where the driver tells them apart."""
        return self.peak_allocated + max(0, self.process - self.reserved)

    @property
    def held(self) -> int:
        """What the process keeps from others; of the whole GPU where the driver does not tell processes apart.

        Torch's own count does not know what vLLM's sleeping allocator gives back. A difference between two moments at
        which the others held the same is right either way.
        """
        return self.process or self.total


def reset_device_peak() -> None:
    torch = _torch_with_cuda()
    if torch is not None:
        torch.cuda.reset_peak_memory_stats()


def device_bytes() -> DeviceBytes | None:
    """What is held now. Torch is not imported for it: a process that has not loaded it holds nothing."""
    torch = _torch_with_cuda()
    if torch is None:
        return None
    free, total = torch.cuda.mem_get_info()
    return DeviceBytes(
        allocated=torch.cuda.memory_allocated(),
        peak_allocated=torch.cuda.max_memory_allocated(),
        reserved=torch.cuda.memory_reserved(),
        process=_bytes_of_this_process(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)),
        total=total - free,
    )


def _torch_with_cuda() -> Any:
    torch = sys.modules.get("torch")
    has_context = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch if has_context else None


def _bytes_of_this_process(uuid: str) -> int:
    """What the driver counts for this process; 0 where it does not say, as in containers."""
    import os

    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
            processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            return sum(int(one.usedGpuMemory or 0) for one in processes if one.pid == os.getpid())
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # nvidia-ml-py raises classes of its own, made as it runs
        return 0
