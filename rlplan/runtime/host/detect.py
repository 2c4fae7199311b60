"""Detection of this machine's GPUs, their hardware profiles, and its CPU host.

NVML (the module `pynvml` of nvidia-ml-py) is asked first, then `nvidia-smi`.
In: nothing. Out: plain values; for a GPU without a profile, the text of a new one.
Left out: AMD GPUs (name their profile in the job), and rates, because nothing is run.
"""

import csv
import datetime as dt
import os
import shutil
import subprocess
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlplan.errors import HostError
from rlplan.runtime.device.nvml import DetectedGpu, ask_nvml
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.spec.hardware.catalogue import find_profile, profile_paths
from rlplan.spec.hardware.profile import GpuProfile
from rlplan.spec.resolved import ResolvedJob
from rlplan.units import MIB

CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Files with (limit, use) of this process's memory control group, versions 2 and 1."""

SMI_FIELDS = ("index", "name", "memory.total", "memory.reserved", "compute_cap", "driver_version")
SMI_TIMEOUT_S = 20.0
MEMORY_TOLERANCE = 0.04
"""Relative difference of one GPU's total memory between drivers: 1 to 3 % in public logs."""


@dataclass(frozen=True, slots=True)
class Host:
    num_cores: int
    """CPU cores that this process may use."""

    memory_bytes: int
    """Memory that this process may use: `total_bytes`, or the control group's lower limit."""

    total_bytes: int

    @property
    def is_limited(self) -> bool:
        """Whether a control group allows less memory than the machine has."""
        return self.memory_bytes < self.total_bytes


@dataclass(frozen=True, slots=True)
class Detected:
    """The machine's hardware. remarks: why no GPU was found, for people."""

    gpus: tuple[DetectedGpu, ...]
    host: Host
    remarks: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {"schema_version": 1} | asdict(self)


def detect() -> Detected:
    """Detect GPUs through NVML, then nvidia-smi; and the host."""
    host = read_host()
    gpus, remark = ask_nvml(host.total_bytes)
    remarks = ["no NVIDIA GPU was found; for an AMD GPU, name its profile (`rlplan profiles show mi300x`)", remark]
    if not gpus:
        gpus, remark = _ask_smi()
        remarks.append(remark)
    known = tuple(replace(gpu, profile=match_profile(gpu.name, gpu.memory_bytes)) for gpu in gpus)
    return Detected(known, host, () if gpus else tuple(text for text in remarks if text))


def check_devices(job: ResolvedJob, address: str | None) -> None:
    """Check that this host has the GPUs that a job was planned for. Raises: HostError.

    address: a cluster's, whose GPUs Ray counts when it is joined (cluster/ray_cluster.py); None for this host.
    """
    if job.device_kind == "cpu" or address is not None:
        return
    gpus = detect().gpus
    wanted, count = job.load_gpu(), job.hardware.num_devices
    matching = [gpu for gpu in gpus if gpu.name in wanted.driver_names]
    if job.hardware.num_hosts == 1 and len(matching) >= count:
        return
    where = f" on {job.hardware.num_hosts} hosts" if job.hardware.num_hosts > 1 else ""
    present = f"{len(matching)} of them" if matching else ", ".join(gpu.name for gpu in gpus) or "no GPU"
    raise HostError(
        f"the plan is for {count} x {wanted.name}{where}, this machine has {present}",
        where="hardware.profile, hardware.num_devices",
        rule="a plan runs on the GPUs that it was made for",
        way_out="run it there, or plan for this machine: `rlplan profiles detect` names its GPUs"
        if job.hardware.num_hosts == 1
        else "start Ray on the hosts and run there with --address HOST:PORT",
    )


def _ask_smi() -> tuple[list[DetectedGpu], str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], "nvidia-smi was not asked: it is not on the PATH"
    command = [program, f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=scale_seconds(SMI_TIMEOUT_S), check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi does not answer: {error}"
    if done.returncode != 0:
        output = (done.stdout + done.stderr).strip().splitlines()
        return [], f"nvidia-smi fails: {output[0] if output else f'exit {done.returncode}'}"
    return parse_smi(done.stdout), ""


def parse_smi(text: str) -> list[DetectedGpu]:
    """Parse nvidia-smi's answer: one line of comma-separated SMI_FIELDS per GPU, memory in MiB.

    >>> parse_smi("0, NVIDIA L4, 23034, 471, 8.9, 580.1")[0].memory_bytes >> 20
    22563
    """
    gpus = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) != len(SMI_FIELDS) or not row[0].isdigit():
            continue
        index, name, total, reserved, capability, driver = row
        # GPUs that share the host's memory report `[N/A]`
        memory = (int(total) - _number(reserved)) * MIB if total.isdigit() else read_host().total_bytes
        shown = capability if capability[:1].isdigit() else ""
        gpus.append(DetectedGpu(int(index), name, memory, shown, driver, "nvidia-smi"))
    return gpus


def _number(text: str) -> int:
    """Parse a number; `[N/A]`, which older drivers report for reserved memory, is 0."""
    return int(text) if text.isdigit() else 0


def match_profile(name: str, memory_bytes: int) -> str | None:
    """Find the profile with this driver name and the nearest memory; None if its memory differs too much."""
    matches: list[GpuProfile] = []
    for known, path in profile_paths().items():
        if name in path.read_text(encoding="utf-8"):  # parsing every profile would take seconds
            profile = find_profile(known, where="detect")
            if isinstance(profile, GpuProfile) and name in profile.driver_names:
                matches.append(profile)
    best = min(matches, key=lambda profile: abs(profile.memory.value - memory_bytes), default=None)
    if best is None or abs(best.memory.value - memory_bytes) > MEMORY_TOLERANCE * best.memory.value:
        return None
    return best.name


def new_profile_yaml(gpu: DetectedGpu) -> str:
    """Write a profile for an unknown GPU: the driver's facts as measured values; comments name what to add."""
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
    """Read the cores and the memory that this process may use, with the limits of its control group."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [total]
    for path, _ in CGROUP_FILES:
        try:
            limits.append(int(Path(path).read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue  # a missing file, or `max`: no limit
    return Host(_usable_cores(), min(limits), total)


def _usable_cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores  # a missing file, or `max`: no limit
