"""NVML: what the driver says of a machine's GPUs. The only file that imports `pynvml` (nvidia-ml-py).

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
    """The driver's total less what it reserves, which is what CUDA reports to a process."""

    compute_capability: str
    """Such as `9.0`; empty where the driver is too old to say."""

    driver: str
    source: str
    """Who was asked: `NVML` or `nvidia-smi`."""

    profile: str | None = None
    """The name of the hardware profile that matches."""

    num_nvlinks: int | None = None
    """That are active; None where it could not be read."""


def ask_nvml(host_bytes: int) -> tuple[list[DetectedGpu], str]:
    """(the GPUs, why none could be read). host_bytes: memory of the host, which some GPUs share."""
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
    """The GPUs that a started NVML (the module `pynvml`, or one like it) shows."""
    driver, found = _text(nvml.nvmlSystemGetDriverVersion()), []
    for index in range(nvml.nvmlDeviceGetCount()):
        device = nvml.nvmlDeviceGetHandleByIndex(index)
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(device)
        name, memory = _text(nvml.nvmlDeviceGetName(device)), _memory(nvml, device, host_bytes)
        links = _links(nvml, device)
        found.append(DetectedGpu(index, name, memory, f"{major}.{minor}", driver, "NVML", num_nvlinks=links))
    return found


def bytes_of_this_process(uuid: str) -> int:
    """What the driver counts for this process on a GPU; 0 where it does not say, as in containers."""
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


def _links(nvml: Any, device: Any) -> int | None:
    """Active NVLinks: 0 for a GPU that has none."""
    count = 0
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 0)):
        try:
            count += bool(nvml.nvmlDeviceGetNvLinkState(device, link))
        except nvml.NVMLError:  # it has no link of this number
            break
    return count if hasattr(nvml, "NVML_NVLINK_MAX_LINKS") else None


def _memory(nvml: Any, device: Any, host_bytes: int) -> int:
    """Total less reserved; the whole host's memory for a GPU without its own (a GB10 has no memory to report)."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2)
        return int(memory.total) - int(memory.reserved)
    except (AttributeError, TypeError):  # an old pynvml, without the second version: its total counts what is reserved
        return int(nvml.nvmlDeviceGetMemoryInfo(device).total)
    except nvml.NVMLError:
        return host_bytes


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
