"""NVML: the driver's facts on a machine's GPUs. Only this file imports `pynvml` (nvidia-ml-py).

In: nothing, or a GPU's UUID. Out: plain values. Not yet run on a GPU; written against nvidia-ml-py 13.
Left out: rates, and which profile a GPU has (host/detect.py).
"""

import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DetectedGpu:
    """A GPU of this machine."""

    index: int
    name: str
    memory_bytes: int
    """The driver's total minus its reserved memory; CUDA reports the same number to a process."""

    compute_capability: str
    """Compute capability such as `9.0`; empty if the driver is too old to report it."""

    driver: str
    source: str
    """Source of the facts: `NVML` or `nvidia-smi`."""

    profile: str | None = None
    """Name of the matching hardware profile."""

    num_nvlinks: int | None = None
    """Active NVLinks; None if they could not be read."""


def ask_nvml(host_bytes: int) -> tuple[list[DetectedGpu], str]:
    """Return (the GPUs, why none could be read). host_bytes: the host's memory, which some GPUs share."""
    try:
        import pynvml
    except ImportError:
        return [], "NVML was not asked: the package nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except Exception as error:  # NVMLError: no driver, no library
        return [], f"NVML does not start: {error}"
    try:
        return read_nvml(pynvml, host_bytes), ""
    except Exception as error:
        return [], f"NVML does not answer: {error}"
    finally:
        pynvml.nvmlShutdown()


def read_nvml(nvml: Any, host_bytes: int) -> list[DetectedGpu]:
    """Read the GPUs that a started NVML shows. nvml: the module `pynvml`, or one like it."""
    driver, gpus = _text(nvml.nvmlSystemGetDriverVersion()), []
    for index in range(nvml.nvmlDeviceGetCount()):
        device = nvml.nvmlDeviceGetHandleByIndex(index)
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(device)
        name, memory = _text(nvml.nvmlDeviceGetName(device)), _memory(nvml, device, host_bytes)
        links = _links(nvml, device)
        gpus.append(DetectedGpu(index, name, memory, f"{major}.{minor}", driver, "NVML", num_nvlinks=links))
    return gpus


def bytes_of_this_process(uuid: str) -> int:
    """Bytes that the driver counts for this process on a GPU; 0 if it reports no processes, as in containers."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
            processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            return sum(int(process.usedGpuMemory or 0) for process in processes if process.pid == os.getpid())
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # nvidia-ml-py creates its exception classes at run time
        return 0


def _links(nvml: Any, device: Any) -> int | None:
    """Count active NVLinks: 0 for a GPU that has none; None if this NVML cannot tell."""
    count = 0
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 0)):
        try:
            count += bool(nvml.nvmlDeviceGetNvLinkState(device, link))
        except nvml.NVMLError:  # the GPU has no link with this number
            break
    return count if hasattr(nvml, "NVML_NVLINK_MAX_LINKS") else None


def _memory(nvml: Any, device: Any, host_bytes: int) -> int:
    """Total minus reserved bytes; the host's memory for a GPU without memory of its own (such as GB10)."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2)
        return int(memory.total) - int(memory.reserved)
    except (AttributeError, TypeError):  # an old pynvml without version 2: its total includes reserved memory
        return int(nvml.nvmlDeviceGetMemoryInfo(device).total)
    except nvml.NVMLError:
        return host_bytes


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
