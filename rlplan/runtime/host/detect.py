"""Detect: which GPUs this machine has and which profile each is; without one, what its CPU host offers.

In: nothing. Out: plain values; for a GPU that no profile names, the text of a new profile.
Asked in this order: NVML (the module `pynvml` of nvidia-ml-py, where installed), else `nvidia-smi`, else nothing.
Left out: AMD GPUs (name their profile yourself), and rates: nothing is run, so none is measured.
"""

import csv
import datetime as dt
import os
import shutil
import subprocess
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlplan.runtime.device.nvml import DetectedGpu, ask_nvml
from rlplan.runtime.processes.machine_speed import scaled
from rlplan.spec.hardware.catalogue import find_profile, profile_paths
from rlplan.spec.hardware.profile import GpuProfile
from rlplan.units import MIB

CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""(limit, use) of this process's memory control group, versions 2 and 1."""

SMI_FIELDS = ("index", "name", "memory.total", "memory.reserved", "compute_cap", "driver_version")
SMI_TIMEOUT_S = 20.0
MEMORY_TOLERANCE = 0.04
"""Share by which totals of one GPU differ between drivers: 1 to 3 % in public logs."""


@dataclass(frozen=True, slots=True)
class Host:
    num_cores: int
    """That this process may use."""

    memory_bytes: int
    """`total_bytes`, or the control group's limit below it."""

    total_bytes: int

    @property
    def is_limited(self) -> bool:
        """A control group allows less than the machine has."""
        return self.memory_bytes < self.total_bytes


@dataclass(frozen=True, slots=True)
class Detected:
    """What was found. remarks: what was asked and did not answer, for people."""

    gpus: tuple[DetectedGpu, ...]
    host: Host
    remarks: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {"schema_version": 1} | asdict(self)


def detect() -> Detected:
    """Ask NVML, then nvidia-smi; look at the host in any case."""
    host = read_host()
    gpus, remark = ask_nvml(host.total_bytes)
    remarks = ["no NVIDIA GPU answered; an AMD GPU has to be named, as in `rlplan profiles show mi300x`", remark]
    if not gpus:
        gpus, remark = _ask_smi()
        remarks.append(remark)
    known = tuple(replace(gpu, profile=match_profile(gpu.name, gpu.memory_bytes)) for gpu in gpus)
    return Detected(known, host, () if gpus else tuple(text for text in remarks if text))


def _ask_smi() -> tuple[list[DetectedGpu], str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], "nvidia-smi was not asked: it is not on the PATH"
    command = [program, f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(SMI_TIMEOUT_S), check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi does not answer: {error}"
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines()
        return [], f"nvidia-smi fails: {said[0] if said else f'exit {done.returncode}'}"
    return parse_smi(done.stdout), ""


def parse_smi(text: str) -> list[DetectedGpu]:
    """The GPUs in nvidia-smi's answer: a line of comma-separated SMI_FIELDS each, memory in MiB.

    >>> parse_smi("0, NVIDIA L4, 23034, 471, 8.9, 580.1")[0].memory_bytes >> 20
    22563
    """
    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) != len(SMI_FIELDS) or not row[0].isdigit():
            continue
        index, name, total, reserved, capability, driver = row
        memory = (int(total) - _number(reserved)) * MIB if total.isdigit() else read_host().total_bytes
        shown = capability if capability[:1].isdigit() else ""
        found.append(DetectedGpu(int(index), name, memory, shown, driver, "nvidia-smi"))
    return found


def _number(text: str) -> int:
    """0 for `[N/A]`, which older drivers say of what they reserve."""
    return int(text) if text.isdigit() else 0


def match_profile(name: str, memory_bytes: int) -> str | None:
    """The profile with that driver name and, where several have it, the nearest memory; none where memory disagrees.

    A file without the name in its text is not parsed.
    """
    matches: list[GpuProfile] = []
    for known, path in profile_paths().items():
        if name in path.read_text(encoding="utf-8"):
            profile = find_profile(known, where="detect")
            if isinstance(profile, GpuProfile) and name in profile.driver_names:
                matches.append(profile)
    best = min(matches, key=lambda profile: abs(profile.memory.value - memory_bytes), default=None)
    if best is None or abs(best.memory.value - memory_bytes) > MEMORY_TOLERANCE * best.memory.value:
        return None
    return best.name


def new_profile_yaml(gpu: DetectedGpu) -> str:
    """A profile for a GPU that none names: what the driver said as measured; what is to be added as comments."""
    today = dt.datetime.now(tz=dt.UTC).date().isoformat()
    words = "".join(letter if letter.isalnum() else " " for letter in gpu.name.lower()).split()
    name = "-".join(words).removeprefix("nvidia-").removeprefix("geforce-")[:40].rstrip("-")
    quoted = "'" + gpu.name.replace("'", "''") + "'"
    measured = f"provenance: measured, source: '{gpu.source}, driver {gpu.driver}', date: '{today}'"
    assumed = f"provenance: assumed, source: usual for a GPU, date: '{today}'"
    return f"""\
# Save as {name}.yaml; `rlplan profiles show FILE` checks it. Add from the vendor's datasheet, as other profiles do:
# memory_bytes_per_s, dense_flops_per_s (without sparsity), host_link and device_link (one direction).
schema_version: 1
name: {name}
kind: cuda
description: {quoted}
driver_names: [{quoted}]
architecture: '{gpu.compute_capability}'
memory: {{value: {gpu.memory_bytes // MIB}MiB, {measured}}}
supports_sleep: true
supports_peer_access: false
shares_host_memory: false
overheads:
  context: {{value: 600MiB, {assumed}}}
  allocator_granularity: {{value: 2MiB, {assumed}}}
  communicator_of_two: {{value: 342MiB, {assumed}}}
  communicator_of_many: {{value: 392MiB, {assumed}}}
"""


def read_host() -> Host:
    """Cores that this process may use, and memory: the machine's, or the control group's limit where that is lower."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [total]
    for path, _ in CGROUP_FILES:
        try:
            limits.append(int(Path(path).read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue  # not there, or `max`: no limit
    return Host(_usable_cores(), min(limits), total)


def _usable_cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores  # not there, or `max`: no limit
