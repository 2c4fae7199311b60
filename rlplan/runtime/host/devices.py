"""Devices: whether the GPUs that a job was planned for are there, before anything starts.

In: a job, and the address of a cluster or none. Out: nothing, or a HostError. Left out: how much they have free, and
hosts of a cluster, which Ray counts (cluster/ray_cluster.py).
"""

from rlplan.errors import HostError
from rlplan.runtime.device.nvml import DetectedGpu
from rlplan.runtime.host.detect import detect
from rlplan.spec.resolved import ResolvedJob


def check_devices(job: ResolvedJob, address: str | None) -> None:
    """Raises: HostError where this host lacks the GPUs; a cluster is asked when it is joined."""
    if job.device_kind == "cpu" or address is not None:
        return
    found = detect()
    wanted, count = job.load_gpu(), job.hardware.num_devices
    mine = [gpu for gpu in found.gpus if gpu.name in wanted.driver_names]
    if job.hardware.num_hosts == 1 and len(mine) >= count:
        return
    where = f" on {job.hardware.num_hosts} hosts" if job.hardware.num_hosts > 1 else ""
    raise HostError(
        f"the plan is for {count} x {wanted.name}{where}, this machine has {_words(found.gpus, mine)}",
        where="hardware.profile, hardware.num_devices",
        rule="a plan runs on the GPUs that it was made for",
        way_out="run it there, or plan for what is here: `rlplan profiles detect` names it"
        if job.hardware.num_hosts == 1
        else "start Ray on the hosts and run it there with --address HOST:PORT",
    )


def _words(found: tuple[DetectedGpu, ...], mine: list[DetectedGpu]) -> str:
    if not found:
        return "no GPU"
    if mine:
        return f"{len(mine)} of them"
    return ", ".join(f"{gpu.name}" for gpu in found)
