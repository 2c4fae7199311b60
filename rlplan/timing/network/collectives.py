"""Links between the ranks of a group, and collectives: seconds that the group takes to gather, reduce or exchange
bytes.

Ranks are numbered host after host. A group with stride 1 holds neighbouring ranks; with stride t it holds every t-th
rank.

In: bytes, ranks, a cluster, and the stride between ranks. Out: Costs on the slowest link, with hops as LATENCY.
Left out: overlap with compute (passes.py), start-up of a communicator.

Symbols: S bytes of the complete result, n ranks, B bytes per second of the ring, l seconds of a hop.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import log2, prod

from rlplan.timing.cost import NOTHING, Cost, Resource
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


def _cost(route: Link, transfer_s: float, hops: float) -> Cost:
    return Cost({route.resource: transfer_s, Resource.LATENCY: hops * route.latency_s})


def time_all_gather(num_bytes: float, num_ranks: int, cluster: Cluster, stride: int = 1) -> Cost:
    """Seconds until every rank has all of `num_bytes`, of which each rank held one share.

    Counts: (n-1)/n S/B, and the hops: n-1 in a ring, 2 log2(n) where that is less. Source: Thakur et al. 2005,
    section 4.1 (ring, recursive doubling); NCCL 2.23 (PAT has log2 n). Assumes: S is pipelined through the ring.

    >>> from rlplan.spec.hardware.catalogue import get_gpu
    >>> host = Cluster(get_gpu("h100", where=""), 8, 8)
    >>> rate = find_link(host, 8).bytes_per_s
    >>> round(time_all_gather(8 * rate, 8, host).parts[Resource.DEVICE_LINK], 6)
    7.0
    """
    if num_ranks <= 1 or not num_bytes:
        return NOTHING
    route = find_link(cluster, num_ranks, stride)
    return _cost(route, (num_ranks - 1) / num_ranks * num_bytes / route.bytes_per_s, _hops(num_ranks))


def _hops(num_ranks: int) -> float:
    return min(num_ranks - 1.0, 2 * log2(num_ranks))


def time_reduce_scatter(num_bytes: float, num_ranks: int, cluster: Cluster, stride: int = 1) -> Cost:
    """Seconds until every rank has its share of the sum of `num_bytes`.

    Counts: the same as `time_all_gather`, in the opposite direction. Source: Thakur et al. 2005, section 4.2.
    """
    return time_all_gather(num_bytes, num_ranks, cluster, stride)


def time_all_reduce(num_bytes: float, num_ranks: int, cluster: Cluster, stride: int = 1) -> Cost:
    """Seconds until every rank has the sum of `num_bytes`.

    Counts: the faster of a ring, 2 (n-1)/n S/B + 2 (n-1) l, and a double tree, 2 S/B + 2 log2(n) l.
    Source: Patarasuk and Yuan 2009 (ring); Sanders et al. 2009 (two trees). NCCL 2.4 has both.

    >>> from rlplan.spec.hardware.catalogue import get_gpu
    >>> host = Cluster(get_gpu("h100", where=""), 8, 8)
    >>> round(time_all_reduce(8 * find_link(host, 8).bytes_per_s, 8, host).parts[Resource.DEVICE_LINK], 6)
    14.0
    """
    if num_ranks <= 1 or not num_bytes:
        return NOTHING
    route, n = find_link(cluster, num_ranks, stride), num_ranks
    ring = _cost(route, 2 * (n - 1) / n * num_bytes / route.bytes_per_s, 2 * (n - 1.0))
    tree = _cost(route, 2 * num_bytes / route.bytes_per_s, 2 * log2(n))
    return min(ring, tree, key=lambda cost: cost.seconds)


def time_all_to_all(
    num_bytes: float,
    num_ranks: int,
    cluster: Cluster,
    stride: int = 1,
    copies: float | None = None,
    groups: tuple[int, int] = (1, 1),
) -> Cost:
    """Seconds until every rank has sent each other rank its part of the `num_bytes` that it holds.

    Counts: inside a host (n-1)/n S/b, where b is the rate of a GPU. Between hosts the k ranks of a host share its
    network adapters and send k S (n-k)/n. copies: the ranks that each row is sent to. A row crosses to a host once,
    so `expect_hosts` receive it instead of `copies`. groups: groups of experts, and how many of them a row goes to.
    Source: Thakur et al. 2005, section 4.4 (pairwise exchange); DeepEP 1.1.
    Differs: an all-gather crosses the network of a host once for all of its ranks.

    >>> from rlplan.spec.hardware.catalogue import get_gpu
    >>> host = Cluster(get_gpu("h100", where=""), 8, 8)
    >>> round(time_all_to_all(8 * find_link(host, 8).bytes_per_s, 8, host).parts[Resource.DEVICE_LINK], 6)
    7.0
    """
    if num_ranks <= 1 or not num_bytes:
        return NOTHING
    if num_ranks * stride <= cluster.gpus_in_link_domain:
        route = find_link(cluster, num_ranks, stride)
        return _cost(route, (num_ranks - 1) / num_ranks * num_bytes / route.bytes_per_s, num_ranks - 1.0)
    route = find_outer_link(cluster, num_ranks, stride)
    ranks_per_host = min(num_ranks, max(1, cluster.gpus_per_host // stride))
    outside = ranks_per_host * num_bytes * (num_ranks - ranks_per_host) / num_ranks / route.bytes_per_s
    if copies:
        outside *= expect_hosts(num_ranks / ranks_per_host, copies, groups) / copies
    return _cost(route, outside, num_ranks - 1.0)


def expect_hosts(hosts: float, copies: float, groups: tuple[int, int] = (1, 1)) -> float:
    """Expected number of hosts that the experts of a row fall on.

    Counts: H (1 - (1 - 1/H)^copies) for random experts. Where they come from a of G groups, a host that holds several
    groups is missed if all a are elsewhere, and a group that spans several hosts has copies/a of the experts.
    Source: DeepSeek-V3, arXiv 2412.19437, section 2.1.2 (node-limited routing). Assumes: groups lie on hosts in order.

    >>> expect_hosts(2, 2), round(expect_hosts(4, 8), 2), round(expect_hosts(4, 8, (8, 4)), 2)  # 4 (1 - 15/70)
    (1.5, 3.6, 3.14)
    """
    num_groups, active = groups
    random = float(hosts * (1 - (1 - 1 / hosts) ** copies))
    if active >= num_groups:
        return random
    if hosts <= num_groups:
        others = num_groups - num_groups / hosts
        missed = prod(max(0.0, others - index) / (num_groups - index) for index in range(active))
        return min(random, hosts * (1 - missed))
    spanned = hosts / num_groups
    return min(random, float(active * spanned * (1 - (1 - 1 / spanned) ** (copies / active))))
