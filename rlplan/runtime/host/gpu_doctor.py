"""GPU doctor: what a run on NVIDIA GPUs needs of this machine, and the command that mends what is missing.

In: what was detected. Out: findings. Left out: packages, the rest of the host (doctor.py), AMD GPUs. CUDA itself is in
torch's wheels; of the machine only its driver is needed. Not yet run on a GPU.
"""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlplan.runtime.device.nvml import DetectedGpu
from rlplan.runtime.host.detect import Detected
from rlplan.runtime.host.finding import Finding, installed_version, judged
from rlplan.units import GIB, format_bytes

LEAST_DRIVER = 580
"""The first driver for CUDA 13.0. Source: NVIDIA, CUDA 13.0 release notes: 580.65.06 or newer."""
LEAST_CAPABILITY = 8.0
"""bf16, and flash attention over packed sequences, begin there."""
LEAST_DISK = 50 * GIB
"""The packages (9 GB), a 7B model (15 GB), and room for a trained one and the run folder; with checkpoints more."""

INSTALL = "make setup-gpu"
INSTALL_DRIVER = f"sudo apt-get install -y nvidia-driver-{LEAST_DRIVER}-server && sudo reboot"
START_NVSWITCH = "sudo systemctl restart nvidia-fabricmanager (with NVSwitch; GPUs on PCIe alone have no NVLink)"


def gpu_findings(found: Detected) -> Iterator[Finding]:
    """Driver, CUDA, GPUs, NVLink, memory and disk, one by one."""
    if not found.gpus:
        yield Finding("NVIDIA driver", "missing", "; ".join(found.remarks), INSTALL_DRIVER)
    else:
        driver = found.gpus[0].driver
        yield judged("NVIDIA driver", _major(driver) >= LEAST_DRIVER, driver, INSTALL_DRIVER)
    cuda = installed_version("nvidia-cuda-runtime")
    yield judged("CUDA", bool(cuda), f"{cuda}, in torch's wheels" if cuda else "none", INSTALL)
    for one in {(gpu.name, gpu.memory_bytes): gpu for gpu in found.gpus}.values():
        yield _gpu(one, sum(gpu.name == one.name for gpu in found.gpus))
    if len(found.gpus) > 1:
        yield _nvlink(found.gpus)
    yield _memory(found)
    free = shutil.disk_usage(Path.cwd()).free
    mend = f"cd to a disk with {format_bytes(LEAST_DISK)} free: models, runs and checkpoints go there"
    yield judged("disk", free >= LEAST_DISK, f"{format_bytes(free)} free here", mend, "warning")


def _gpu(gpu: DetectedGpu, count: int) -> Finding:
    capability = gpu.compute_capability or "unknown"
    words = f"{count} x {gpu.name}, {format_bytes(gpu.memory_bytes)}, compute capability {capability}"
    if gpu.compute_capability and float(gpu.compute_capability) < LEAST_CAPABILITY:
        return Finding("GPU", "warning", words, "training.dtype=float16 rollout.dtype=float16: it has no bfloat16")
    fix = "rlplan profiles detect > my-gpu.yaml, then hardware.profile=my-gpu.yaml: no profile names it"
    return judged("GPU", gpu.profile is not None, words, fix, "warning")


def _nvlink(gpus: Sequence[DetectedGpu]) -> Finding:
    links = [gpu.num_nvlinks for gpu in gpus]
    known = [count for count in links if count is not None]
    words = f"{min(known)} active links a GPU" if known else "unknown: NVML was not asked"
    return judged("NVLink", not known or min(known) > 0, words, START_NVSWITCH, "warning")


def _memory(found: Detected) -> Finding:
    """Weights pass through the host's memory, and offloaded states stay in it."""
    host, wanted = found.host.memory_bytes, max((gpu.memory_bytes for gpu in found.gpus), default=0)
    fix = f"plan with hardware.host_memory={host // GIB}GiB: what is offloaded must fit into it"
    return judged("host memory", host >= wanted, format_bytes(host), fix, "warning")


def _major(driver: str) -> int:
    """
    >>> _major("580.105.08"), _major("[N/A]")
    (580, 0)
    """
    first = driver.partition(".")[0]
    return int(first) if first.isdigit() else 0
