"""Checkpoints: seconds to write one, and to read it back.

In: bytes of all hosts together, a Cluster. Out: a Cost. Left out: writing while training goes on, a shared file system
that is slower than the sum of its clients.
"""

from rlplan.timing.cost import Cost, Resource
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.transfer.wires import host_link_bytes_per_s


def checkpoint_cost(num_bytes: float, num_hosts: int, cluster: Cluster) -> Cost:
    """Seconds until a checkpoint is on disk: to host memory first, then written, each host its own part.

    Counts: B over all GPUs' host links, then B / hosts over a host's disk. Source: DeepSpeed `save_checkpoint`: each
    rank its optimizer states. Assumes: the two do not overlap (torch.save), parts are equal.
    Differs: a checkpoint of weights alone that rank 0 writes passes one host: num_hosts is 1 then.

    >>> from rlplan.spec.hardware.catalogue import get_gpu, get_node
    >>> eight = Cluster(get_gpu("h100", where=""), 8, 8, get_node("dgx-h100", where=""))
    >>> rate = eight.node_efficiencies.disk_bytes_per_s.value
    >>> checkpoint_cost(10 * rate, 1, eight).parts[Resource.DISK]
    10.0
    """
    disk = num_bytes / num_hosts / cluster.node_efficiencies.disk_bytes_per_s.value
    copying = min(cluster.num_gpus, num_hosts * cluster.gpus_per_host)
    return Cost({Resource.HOST_LINK: num_bytes / copying / host_link_bytes_per_s(cluster), Resource.DISK: disk})
