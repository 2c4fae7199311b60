"""Wires of a weight sync: how fast weights gather on training ranks, and how fast one rank's bytes reach all engines.

In: clusters. Out: Wire values. Left out: collectives of a training step (collectives.py), jobs that share a wire.

What matters is how many of a node's network adapters work at once: all of them when the ranks of a ring lie side by
side, each GPU's own when a group has one rank on each host, and a few when one rank sends to everybody.
"""

from dataclasses import dataclass

from rlplan.timing.cost import Resource
from rlplan.timing.network.cluster import Cluster

LONE_BYTES_PER_S = 50e9
"""What one sender's adapters carry at most before its share: one of 400 Gbit/s. Assumed where a node has few adapters:
NCCL then opens several channels, and a ring through a host uses what there is."""


@dataclass(frozen=True, slots=True)
class Wire:
    """What carries messages."""

    bytes_per_s: float
    """Of large messages."""
    latency_s: float
    """Of one small message."""
    resource: Resource

    def seconds(self, num_bytes: float) -> float:
        """Of one message; nothing takes no time.

        >>> Wire(50e9, 0.0, Resource.NETWORK).seconds(100e9)
        2.0
        """
        return self.latency_s + num_bytes / self.bytes_per_s if num_bytes else 0.0


def inner_wire(cluster: Cluster) -> Wire:
    """Between GPUs of one host: the device link, or the host link where there is none.

    >>> from rlplan.spec.hardware.catalogue import get_gpu
    >>> inner_wire(Cluster(get_gpu("l40s", where=""), 8, 8)).resource.value
    'host_link'
    """
    gpu, shares = cluster.gpu, cluster.efficiencies
    if gpu.device_link and shares.device_link and gpu.supports_peer_access:
        return Wire(gpu.device_link.bytes_per_s.value * shares.device_link.value, 0.0, Resource.DEVICE_LINK)
    return Wire(host_link_bytes_per_s(cluster), 0.0, Resource.HOST_LINK)


def gather_wire(cluster: Cluster, num_ranks: int, *, is_strided: bool) -> Wire:
    """For an all-gather of everything on `num_ranks` ranks. bytes_per_s: of the gathered bytes, not of the shard.

    Counts: rate x N / (N-1) inside a host; a node's adapters x h / (h-1) between h hosts; strided: one GPU's share.
    Source: ring all-gather, each byte enters every host (strided: every GPU) once.

    >>> from rlplan.spec.hardware.catalogue import get_gpu, get_node
    >>> two = Cluster(get_gpu("h100", where=""), 16, 8, get_node("dgx-h100", where=""))
    >>> wires = [gather_wire(two, 16, is_strided=strided) for strided in (False, True)]
    >>> round(wires[0].bytes_per_s / wires[1].bytes_per_s)
    8
    """
    domain = _joined(cluster)
    if num_ranks <= domain:
        inside = inner_wire(cluster)
        return Wire(inside.bytes_per_s * num_ranks / max(1, num_ranks - 1), inside.latency_s, inside.resource)
    hosts = -(-num_ranks // domain)
    total = _network(cluster) * domain / cluster.gpus_per_host
    rate = total / (domain if is_strided else 1)
    return Wire(rate * hosts / (hosts - 1), cluster.node_efficiencies.network_latency.value, Resource.NETWORK)


def lone_wire(training: Cluster, generation: Cluster) -> Wire:
    """From one training GPU to all generating ones: each host's bytes enter it once, through one GPU's adapters.

    Counts: the larger of a GPU's share of its node's network and LONE_BYTES_PER_S (or all there is); the slower side.

    >>> from rlplan.spec.hardware.catalogue import get_gpu, get_node
    >>> eight = Cluster(get_gpu("h100", where=""), 8, 8, get_node("dgx-h100", where=""))
    >>> 40e9 <= lone_wire(eight, eight).bytes_per_s <= 50e9
    True
    """
    is_one_host = training.node is None or training.num_gpus + generation.num_gpus <= _joined(training)
    if is_one_host and training.gpu == generation.gpu:
        return inner_wire(training)
    rates = [
        max(
            _network(side) / side.gpus_per_host,
            min(_network(side), LONE_BYTES_PER_S * side.node_efficiencies.network.value),
        )
        for side in (training, generation)
    ]
    latency = max(side.node_efficiencies.network_latency.value for side in (training, generation))
    return Wire(min(rates), latency, Resource.NETWORK)


def host_link_bytes_per_s(cluster: Cluster) -> float:
    """Between one GPU and pinned host memory, while all GPUs of the host copy: their shares of that memory may be less.

    Assumes: each copy crosses host memory once.
    """
    link = cluster.gpu.host_link
    known = link.bytes_per_s.value if link else cluster.memory_bytes_per_s / 2
    rate = float(known) * cluster.efficiencies.host_link.value
    if cluster.node is None or cluster.node.efficiencies is None:
        return rate
    busy = min(cluster.num_gpus, cluster.gpus_per_host)
    return min(rate, cluster.node_efficiencies.host_memory_bytes_per_s.value / busy)


def _joined(cluster: Cluster) -> int:
    """GPUs that reach each other without the network; of a part of a host's GPUs, all of that host's."""
    linked = cluster.node.num_gpus_in_link_domain if cluster.node else 1
    return max(cluster.gpus_per_host, cluster.host_gpus, linked)


def _network(cluster: Cluster) -> float:
    """Bytes per second of a node, all adapters, as collectives see them. Raises: SpecError where there is no node."""
    share = cluster.node_efficiencies.network.value
    return cluster.node.network_bytes_per_s.value * share if cluster.node else 0.0
