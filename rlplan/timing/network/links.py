"""Links: bandwidth and latency between the ranks of a group.

In: a cluster, the number of ranks and the stride between them. Out: the bandwidth of the slowest link on the ring,
and the seconds of one hop. Left out: groups that use a link at different times, congestion, topology beyond a host.

Ranks are numbered host after host. A group with stride 1 holds neighbouring ranks; with stride t it holds every t-th
rank, and the t interleaved groups share the network.
"""

from dataclasses import dataclass
from functools import lru_cache

from rlplan.timing.cost import Resource
from rlplan.timing.network.cluster import Cluster

HOP_IN_HOST = 2e-6
"""Seconds of one hop between neighbours. Assumed: a copy kernel's flag over NVLink. NCCL's own model says 0.6 to 1.9 us
for its protocols (NCCL 2.21, src/graph/tuning.cc, hwLat)."""


@dataclass(frozen=True)
class Link:
    """Bandwidth and latency of a path, such as the ring of a group."""

    bytes_per_s: float
    """Bandwidth for large messages, one direction."""
    latency_s: float
    """Seconds of a small message; for a ring, of a mean hop."""
    resource: Resource

    def seconds(self, num_bytes: float) -> float:
        """Seconds of one message; an empty one takes no time.

        >>> Link(50e9, 0.0, Resource.NETWORK).seconds(100e9)
        2.0
        """
        return self.latency_s + num_bytes / self.bytes_per_s if num_bytes else 0.0


@lru_cache(maxsize=4096)
def find_link(cluster: Cluster, num_ranks: int, stride: int = 1) -> Link:
    """Find the link of a group of `num_ranks` with the given stride.

    Counts: inside a host the device link, or the host link where there is none. Between hosts the node's network
    times the share of its GPUs in the group, but at most the rate inside the host.
    Source: NCCL's rings enter and leave a host once per adapter, so a group with all GPUs of a host has all of its
    adapters (nccl-tests, PERFORMANCE.md: bus bandwidth). Raises: SpecError where a rate is not known.

    >>> from rlplan.spec.hardware.catalogue import get_gpu, get_node
    >>> two = Cluster(get_gpu("h100", where=""), 16, 8, get_node("dgx-h100", where=""))
    >>> find_link(two, 8).resource.value, find_link(two, 16).resource.value, find_link(two, 2, 8).resource.value
    ('device_link', 'network', 'network')
    """
    inside = _find_inner_link(cluster, min(num_ranks, max(1, cluster.gpus_in_link_domain // stride)))
    if num_ranks * stride <= cluster.gpus_in_link_domain:
        return inside
    outside = find_outer_link(cluster, num_ranks, stride)
    # a ring through several GPUs of a host is limited by its slowest hop, which may be inside
    if min(num_ranks, cluster.gpus_per_host // stride) > 1 and inside.bytes_per_s < outside.bytes_per_s:
        return Link(inside.bytes_per_s, outside.latency_s, inside.resource)
    return outside


def find_outer_link(cluster: Cluster, num_ranks: int, stride: int = 1) -> Link:
    """Network bandwidth that the ranks of a group on one host have together.

    Counts: the node's network times the share of its GPUs in the group; a mean hop of the ring.
    Source: as `find_link`.

    >>> from rlplan.spec.hardware.catalogue import get_gpu, get_node
    >>> two = Cluster(get_gpu("h100", where=""), 16, 8, get_node("dgx-h100", where=""))
    >>> find_outer_link(two, 16).bytes_per_s == 8 * find_outer_link(two, 2, 8).bytes_per_s
    True
    """
    network = cluster.node_efficiencies.network.value * _network(cluster)
    ranks_per_host = min(num_ranks, max(1, cluster.gpus_per_host // stride))
    # one hop of the ring leaves the host, all others stay inside
    hop = (HOP_IN_HOST * (ranks_per_host - 1) + cluster.node_efficiencies.network_latency.value) / ranks_per_host
    return Link(network * ranks_per_host / cluster.gpus_per_host, hop, Resource.NETWORK)


def _network(cluster: Cluster) -> float:
    full_host = cluster.node.num_gpus if cluster.node else cluster.gpus_per_host
    return cluster.network_bytes_per_s * cluster.gpus_per_host / max(1, full_host)


def _find_inner_link(cluster: Cluster, num_ranks: int) -> Link:
    """Link between ranks of one host. In a mesh, a small group has only the links between its members."""
    gpu, efficiencies, node = cluster.gpu, cluster.efficiencies, cluster.node
    topology = node.topology if node else None
    bridged = gpu.device_link is not None and gpu.device_link.technology == "nvlink_bridge"
    has_links = gpu.device_link is not None and topology not in ("pcie", "single")
    # a bridge joins two GPUs, so a larger group crosses PCIe
    if has_links and (bridged or topology == "nvlink_pairs") and num_ranks > 2:
        has_links = False
    if has_links and gpu.device_link is not None:
        rate = float(gpu.device_link.bytes_per_s.value)
        if topology in ("nvlink_mesh", "xgmi_mesh") and node and node.peer_bytes_per_s:
            rate = min(rate, node.peer_bytes_per_s.value * max(1.0, num_ranks - 1.0))
        share = (efficiencies.device_link or efficiencies.host_link).value
        return Link(rate * share, HOP_IN_HOST, Resource.DEVICE_LINK)
    if gpu.host_link is None:
        return Link(_network(cluster) * cluster.node_efficiencies.network.value, HOP_IN_HOST, Resource.NETWORK)
    return Link(gpu.host_link.bytes_per_s.value * efficiencies.host_link.value, HOP_IN_HOST, Resource.HOST_LINK)
