"""GPU doctor: checks what a run on NVIDIA GPUs needs, and names the command that fixes each problem.

CUDA itself comes with torch's wheels; the machine only needs the driver. Not yet run on a GPU.
In: the detected hardware. Out: findings. Left out: packages, the rest of the host (doctor.py), AMD GPUs.
"""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlplan.runtime.device.nvml import DetectedGpu
from rlplan.runtime.host.detect import Detected
from rlplan.runtime.host.finding import Finding, installed_version, judge
from rlplan.units import GIB, format_bytes

LEAST_DRIVER = 580
"""The oldest driver for CUDA 13.0. Source: NVIDIA, CUDA 13.0 release notes: 580.65.06 or newer."""
LEAST_CAPABILITY = 8.0
"""The lowest compute capability with bf16 and flash attention over packed sequences."""
LEAST_DISK = 50 * GIB
"""The packages (9 GB), a 7B model (15 GB), a trained model and the run folder; checkpoints need more."""

INSTALL = "make setup-gpu"
INSTALL_DRIVER = f"sudo apt-get install -y nvidia-driver-{LEAST_DRIVER}-server && sudo reboot"
START_NVSWITCH = "sudo systemctl restart nvidia-fabricmanager (with NVSwitch; PCIe-only GPUs have no NVLink)"


def gpu_findings(detected: Detected) -> Iterator[Finding]:
    """Check driver, CUDA, GPUs, NVLink, memory and disk."""
    if not detected.gpus:
        yield Finding("NVIDIA driver", "missing", "; ".join(detected.remarks), INSTALL_DRIVER)
    else:
        driver = detected.gpus[0].driver
        yield judge("NVIDIA driver", _major(driver) >= LEAST_DRIVER, driver, INSTALL_DRIVER)
    cuda = installed_version("nvidia-cuda-runtime")
    yield judge("CUDA", bool(cuda), f"{cuda}, in torch's wheels" if cuda else "none", INSTALL)
    for kind in {(gpu.name, gpu.memory_bytes): gpu for gpu in detected.gpus}.values():
        yield _gpu(kind, sum(gpu.name == kind.name for gpu in detected.gpus))
    if len(detected.gpus) > 1:
        yield _nvlink(detected.gpus)
    yield _memory(detected)
    free = shutil.disk_usage(Path.cwd()).free
    fix = f"cd to a disk with {format_bytes(LEAST_DISK)} free: models, runs and checkpoints go there"
    yield judge("disk", free >= LEAST_DISK, f"{format_bytes(free)} free here", fix, "warning")


def _gpu(gpu: DetectedGpu, count: int) -> Finding:
    capability = gpu.compute_capability or "unknown"
    words = f"{count} x {gpu.name}, {format_bytes(gpu.memory_bytes)}, compute capability {capability}"
    if gpu.compute_capability and float(gpu.compute_capability) < LEAST_CAPABILITY:
        return Finding("GPU", "warning", words, "training.dtype=float16 rollout.dtype=float16: it has no bfloat16")
    fix = "no profile matches it: rlplan profiles detect > my-gpu.yaml, then hardware.profile=my-gpu.yaml"
    return judge("GPU", gpu.profile is not None, words, fix, "warning")


def _nvlink(gpus: Sequence[DetectedGpu]) -> Finding:
    links = [gpu.num_nvlinks for gpu in gpus]
    known = [count for count in links if count is not None]
    words = f"{min(known)} active links per GPU" if known else "unknown: NVML was not asked"
    return judge("NVLink", not known or min(known) > 0, words, START_NVSWITCH, "warning")


def _memory(detected: Detected) -> Finding:
    """Check the host's memory: weights pass through it, and offloaded states stay in it."""
    host, wanted = detected.host.memory_bytes, max((gpu.memory_bytes for gpu in detected.gpus), default=0)
    fix = f"plan with hardware.host_memory={host // GIB}GiB: offloaded states must fit into it"
    return judge("host memory", host >= wanted, format_bytes(host), fix, "warning")


def _major(driver: str) -> int:
    """
    >>> _major("580.105.08"), _major("[N/A]")
    (580, 0)
    """
    first = driver.partition(".")[0]
    return int(first) if first.isdigit() else 0
