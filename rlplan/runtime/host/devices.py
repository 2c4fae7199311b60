"""Check, before anything starts, that this machine has the GPUs that a job was planned for.

In: a job, and the address of a cluster or None. Out: nothing, or a HostError. Left out: free memory, and the hosts of
a cluster, which Ray counts (cluster/ray_cluster.py).
"""

from rlplan.errors import HostError
from rlplan.runtime.host.detect import detect
from rlplan.spec.resolved import ResolvedJob


def check_devices(job: ResolvedJob, address: str | None) -> None:
    """Check this host's GPUs; those of a cluster are checked when it is joined. Raises: HostError."""
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
