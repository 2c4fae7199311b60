"""Links: how fast and how late bytes pass between the ranks of a group.

In: a cluster, ranks and how far apart they lie. Out: the rate of the group's narrowest place, what one hop takes.
Left out: several groups that use a link at different times, congestion, topology beyond a host.

Ranks are numbered host after host. A group of n ranks with stride 1 are neighbours; of stride t every t-th rank, so
that t groups lie between each other and share the network.
"""

from dataclasses import dataclass
from functools import lru_cache

from rlplan.timing.cost import Resource
from rlplan.timing.network.cluster import Cluster

HOP_IN_HOST = 2e-6
"""Seconds of one hop between neighbours. Assumed: a copy kernel's flag over NVLink; NCCL's own model says 0.6 to 1.9 us
for its protocols (NCCL 2.21, src/graph/tuning.cc, hwLat)."""


@dataclass(frozen=True)
class Link:
    """What a collective's messages reach."""

    bytes_per_s: float
    """Of a ring through the whole group, one direction."""
    latency_s: float
    """Of a mean hop."""
    resource: Resource


@lru_cache(maxsize=4096)
def link(cluster: Cluster, num_ranks: int, stride: int = 1) -> Link:
    """The link of a group of `num_ranks`, `stride` ranks apart.

    Counts: inside a host the device link, or the host link where there is none; between hosts the node's network times
    the share of its GPUs that belong to the group, but no more than inside.
    Source: NCCL's rings enter and leave a host once for every adapter, so that a group with all GPUs of a host has all
    of its adapters (nccl-tests, PERFORMANCE.md: bus bandwidth). Raises: SpecError where a rate is not known.

    >>> from rlplan.spec.hardware.catalogue import get_gpu, get_node
    >>> two = Cluster(get_gpu("h100", where=""), 16, 8, get_node("dgx-h100", where=""))
    >>> link(two, 8).resource.value, link(two, 16).resource.value, link(two, 2, 8).resource.value
    ('device_link', 'network', 'network')
    """
    inside = _inside(cluster, min(num_ranks, max(1, link_domain(cluster) // stride)))
    if num_ranks * stride <= link_domain(cluster):
        return inside
    outside = link_out(cluster, num_ranks, stride)
    if min(num_ranks, cluster.gpus_per_host // stride) > 1 and inside.bytes_per_s < outside.bytes_per_s:
        return Link(inside.bytes_per_s, outside.latency_s, inside.resource)
    return outside


def link_domain(cluster: Cluster) -> int:
    """GPUs that the device link joins."""
    return cluster.gpus_in_link_domain


def link_out(cluster: Cluster, num_ranks: int, stride: int = 1) -> Link:
    """What the ranks of a group on one host have of its network, all of them together.

    Counts: the node's network times the share of its GPUs that belong to the group; a mean hop of a ring. Source: as
    `link`. Raises: SpecError where the node is not known.

    >>> from rlplan.spec.hardware.catalogue import get_gpu, get_node
    >>> two = Cluster(get_gpu("h100", where=""), 16, 8, get_node("dgx-h100", where=""))
    >>> link_out(two, 16).bytes_per_s == 8 * link_out(two, 2, 8).bytes_per_s
    True
    """
    network = cluster.node_efficiencies.network.value * _network(cluster)
    of_host = min(num_ranks, max(1, cluster.gpus_per_host // stride))
    hop = (HOP_IN_HOST * (of_host - 1) + cluster.node_efficiencies.network_latency.value) / of_host
    return Link(network * of_host / cluster.gpus_per_host, hop, Resource.NETWORK)


def _network(cluster: Cluster) -> float:
    assert cluster.node is not None  # node_efficiencies has refused it
    return float(cluster.node.network_bytes_per_s.value) * cluster.gpus_per_host / max(1, cluster.node.num_gpus)


def _inside(cluster: Cluster, num_ranks: int) -> Link:
    """Between ranks of one host. A mesh gives a small group only the links between its members."""
    gpu, efficiencies, node = cluster.gpu, cluster.efficiencies, cluster.node
    topology = node.topology if node else None
    bridged = gpu.device_link is not None and gpu.device_link.technology == "nvlink_bridge"
    has_links = gpu.device_link is not None and topology not in ("pcie", "single")
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
