"""Switches between phases: seconds to put an engine to sleep and wake it, to offload a role, to write a checkpoint.

In: bytes of one GPU (for a checkpoint, of all hosts), a Cluster. Out: a Cost. All GPUs of a host switch at once.
Left out: the first switch, which also pins pages (0.3 s per GiB); waiting for running requests; asynchronous
checkpoints; a shared file system that is slower than the sum of its clients.
"""

from rlplan.timing.cost import NOTHING, Cost, Resource
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.transfer.wires import host_link_bytes_per_s
from rlplan.units import GIB

MAP_S_PER_GIB = 5e-3
"""Seconds per GiB to allocate and map GPU memory (cuMemCreate, cuMemMap, cuMemSetAccess), or to unmap and release it.
Assumed."""
PAGEABLE_BYTES_PER_S = 5e9
"""Copy rate of one process between a GPU and pageable host memory: the driver stages every copy through a pinned
buffer, and new pages are faulted in. Fitted: NeMo-RL's refit of an 8B model on 8 H100 (issue 959), 5 and 8 s with
Megatron-Core and 4 and 6 s with FSDP2. Of these, 21 and 12 GB per GPU over this path take 4.2 and 2.4 s."""
SWITCH_S = 20e-3
"""Seconds of a request to all ranks, garbage collection and `empty_cache` around a switch. Assumed."""


def sleep_cost(num_bytes: float, cluster: Cluster, *, level: int = 1, kv_bytes: float = 0.0) -> Cost:
    """Seconds to put an engine to sleep, or to map its weights again. num_bytes: weights; kv_bytes: KV cache.

    Counts: level 1 copies the weights to pinned host memory, or back; both levels map or unmap weights and KV cache.
    Source: vLLM 0.32 device_allocator/cumem.py `sleep`, `wake_up`. Assumes: level 0 does nothing; a weight sync follows
    level 2.

    >>> from rlplan.spec.hardware.catalogue import get_gpu
    >>> gpu = Cluster(get_gpu("h100", where=""), 1, 1)
    >>> sleep_cost(14 * GIB, gpu, level=0).seconds, round(sleep_cost(14 * GIB, gpu, level=2).seconds, 2)
    (0, 0.09)
    """
    if level == 0:
        return NOTHING
    return _mapping(num_bytes + kv_bytes) + (host_copy_cost(num_bytes, cluster) if level == 1 else NOTHING)


def wake_kv_cost(num_bytes: float) -> Cost:
    """Seconds to map the KV cache. Counts: mapping; nothing is copied or zeroed. Source: vLLM cumem.py.

    >>> round(wake_kv_cost(40 * GIB).seconds, 2)  # 20 ms + 40 * 5 ms
    0.22
    """
    return _mapping(num_bytes)


def offload_cost(num_bytes: float, cluster: Cluster, *, is_pinned: bool = True) -> Cost:
    """Seconds to offload a role's bytes of one GPU to the host, or to reload them.

    Counts: a copy to pinned memory, or a staged copy into new pageable memory.
    Source: DeepSpeed `offload_states`, pinned; NeMo-RL's `.to("cpu")`, pageable. Assumes: nothing overlaps.

    >>> from rlplan.spec.hardware.catalogue import get_gpu
    >>> offload_cost(0, Cluster(get_gpu("h100", where=""), 1, 1)).seconds
    0.02
    """
    pageable = Cost({Resource.HOST: num_bytes / PAGEABLE_BYTES_PER_S})
    return Cost({Resource.LATENCY: SWITCH_S}) + (host_copy_cost(num_bytes, cluster) if is_pinned else pageable)


def host_copy_cost(num_bytes: float, cluster: Cluster) -> Cost:
    """Seconds of a copy between each GPU and pinned host memory. num_bytes: of one GPU; all of a host copy at once.

    Counts: B over the host link, or over a GPU's share of host memory where that is less. Source:
    `host_link_bytes_per_s`.

    >>> from rlplan.spec.hardware.catalogue import get_gpu
    >>> gpu = get_gpu("h100", where="")
    >>> seconds = host_copy_cost(63e9, Cluster(gpu, 1, 1)).seconds  # 63 GB/s, times the share that copies reach
    >>> round(seconds * gpu.efficiencies.host_link.value, 9)
    1.0
    """
    return Cost({Resource.HOST_LINK: num_bytes / host_link_bytes_per_s(cluster)})


def _mapping(num_bytes: float) -> Cost:
    return Cost({Resource.LATENCY: SWITCH_S + num_bytes / GIB * MAP_S_PER_GIB})


def checkpoint_cost(num_bytes: float, num_hosts: int, cluster: Cluster) -> Cost:
    """Seconds until a checkpoint is on disk; each host copies its own part to host memory and then writes it.

    Counts: B over all GPUs' host links, then B / hosts over a host's disk. Source: DeepSpeed `save_checkpoint`: each
    rank writes its optimizer states. Assumes: copy and write do not overlap (torch.save), parts are equal.
    Differs: a checkpoint of weights that only rank 0 writes has num_hosts 1.

    >>> from rlplan.spec.hardware.catalogue import get_gpu, get_node
    >>> eight = Cluster(get_gpu("h100", where=""), 8, 8, get_node("dgx-h100", where=""))
    >>> rate = eight.node_efficiencies.disk_bytes_per_s.value
    >>> checkpoint_cost(10 * rate, 1, eight).parts[Resource.DISK]
    10.0
    """
    disk = num_bytes / num_hosts / cluster.node_efficiencies.disk_bytes_per_s.value
    copying = min(cluster.num_gpus, num_hosts * cluster.gpus_per_host)
    return Cost({Resource.HOST_LINK: num_bytes / copying / host_link_bytes_per_s(cluster), Resource.DISK: disk})
