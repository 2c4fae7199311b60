"""Wires of a weight sync: rates at which training ranks gather weights, and at which one rank sends to all engines.

The rate depends on how many network adapters of a node work at once: all of them in a ring of neighbouring ranks, each
GPU's own in a group with one rank per host, and a few when one rank sends to all.

In: clusters. Out: Links. Left out: collectives of a training step (collectives.py), jobs that share a wire.
"""

from rlplan.timing.cost import Resource
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.network.collectives import Link

SENDER_BYTES_PER_S = 50e9
"""Upper bound of one sender's bandwidth before its efficiency: one adapter of 400 Gbit/s. Assumed for nodes with few
adapters per GPU: NCCL then opens several channels, and a ring through a host uses all adapters."""


def find_inner_wire(cluster: Cluster) -> Link:
    """Find the wire between GPUs of one host: the device link, or the host link where there is none.

    >>> from rlplan.spec.hardware.catalogue import get_gpu
    >>> find_inner_wire(Cluster(get_gpu("l40s", where=""), 8, 8)).resource.value
    'host_link'
    """
    gpu, shares = cluster.gpu, cluster.efficiencies
    if gpu.device_link and shares.device_link and gpu.supports_peer_access:
        return Link(gpu.device_link.bytes_per_s.value * shares.device_link.value, 0.0, Resource.DEVICE_LINK)
    return Link(host_link_bytes_per_s(cluster), 0.0, Resource.HOST_LINK)


def find_gather_wire(cluster: Cluster, num_ranks: int, *, is_strided: bool) -> Link:
    """Find the wire of an all-gather over `num_ranks` ranks. bytes_per_s: of the gathered bytes, not of a shard.

    Counts: rate x N / (N-1) inside a host; a node's adapters x h / (h-1) between h hosts; strided: one GPU's share.
    Source: ring all-gather, in which each byte enters every host (strided: every GPU) once.

    >>> from rlplan.spec.hardware.catalogue import get_gpu, get_node
    >>> two = Cluster(get_gpu("h100", where=""), 16, 8, get_node("dgx-h100", where=""))
    >>> wires = [find_gather_wire(two, 16, is_strided=strided) for strided in (False, True)]
    >>> round(wires[0].bytes_per_s / wires[1].bytes_per_s)
    8
    """
    domain = _count_joined(cluster)
    if num_ranks <= domain:
        inside = find_inner_wire(cluster)
        return Link(inside.bytes_per_s * num_ranks / max(1, num_ranks - 1), inside.latency_s, inside.resource)
    hosts = -(-num_ranks // domain)
    total = _network(cluster) * domain / cluster.gpus_per_host
    rate = total / (domain if is_strided else 1)
    return Link(rate * hosts / (hosts - 1), cluster.node_efficiencies.network_latency.value, Resource.NETWORK)


def find_sender_wire(training: Cluster, generation: Cluster) -> Link:
    """Find the wire from one training GPU to all engines; data enters each host once, through one GPU's adapters.

    Counts: the larger of a GPU's share of its node's network and SENDER_BYTES_PER_S, at most the whole network. The
    slower side counts.

    >>> from rlplan.spec.hardware.catalogue import get_gpu, get_node
    >>> eight = Cluster(get_gpu("h100", where=""), 8, 8, get_node("dgx-h100", where=""))
    >>> 40e9 <= find_sender_wire(eight, eight).bytes_per_s <= 50e9
    True
    """
    is_one_host = training.num_gpus + generation.num_gpus <= _count_joined(training)
    if is_one_host and training.gpu == generation.gpu:
        return find_inner_wire(training)
    rates = [
        max(
            _network(side) / side.gpus_per_host,
            min(_network(side), SENDER_BYTES_PER_S * side.node_efficiencies.network.value),
        )
        for side in (training, generation)
    ]
    latency = max(side.node_efficiencies.network_latency.value for side in (training, generation))
    return Link(min(rates), latency, Resource.NETWORK)


def host_link_bytes_per_s(cluster: Cluster) -> float:
    """Rate between one GPU and pinned host memory while all GPUs of the host copy and share the host memory bandwidth.

    Assumes: each copy crosses host memory once.
    """
    link = cluster.gpu.host_link
    known = link.bytes_per_s.value if link else cluster.memory_bytes_per_s / 2
    rate = float(known) * cluster.efficiencies.host_link.value
    if cluster.node is None or cluster.node.efficiencies is None:
        return rate
    busy = min(cluster.num_gpus, cluster.gpus_per_host)
    return min(rate, cluster.node_efficiencies.host_memory_bytes_per_s.value / busy)


def _count_joined(cluster: Cluster) -> int:
    """GPUs that reach each other without the network, including GPUs of the host that are not in this cluster."""
    linked = cluster.node.num_gpus_in_link_domain if cluster.node else 1
    return max(cluster.gpus_per_host, cluster.host_gpus, linked)


def _network(cluster: Cluster) -> float:
    """Network bytes per second of a node, all adapters, as collectives reach them."""
    return cluster.network_bytes_per_s * cluster.node_efficiencies.network.value
