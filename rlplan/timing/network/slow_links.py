"""Slow links: seconds of a broadcast from the training site to all generating sites, relayed in a tree.

In: a LinkSpec, bytes. Out: seconds and the shape of the tree. Left out: distribution inside a site, which relays
shards to its hosts as they arrive; sites with different links; overlapping weight syncs; foreign congestion.

Symbols: B bytes, W bandwidth of a site, M payload of a packet, RTT twice the latency, p loss rate, c connections, f
children of a site in the tree, n sites, d levels below the trainers, S a shard. All sites are alike, so the tree is
described by these numbers alone, and its evaluation does not depend on the number of sites.
"""

from dataclasses import dataclass
from math import inf, sqrt

from rlplan.spec.parts.placement import LinkSpec

PACKET_BYTES = 1460
"""M: 1500 bytes of Ethernet less 40 of TCP and IP headers."""
SHARD_BYTES = 50_000_000
"""S: a site relays only complete shards. Source: PrimeIntellect-ai/shardcast, constants.py, SHARD_SIZE."""
MOST_CHILDREN = 64
"""Fan-outs up to this are tried one by one; beyond it only one tree is tried, with all sites as children of the root.
"""


@dataclass(frozen=True, slots=True)
class Broadcast:
    """One transfer to every site."""

    seconds: float
    """Seconds until the last site has received the last byte."""
    fan_out: int
    """f: children of a site."""
    num_levels: int
    """d: levels below the trainers."""


def tcp_bytes_per_s(link: LinkSpec) -> float:
    """TCP throughput between two sites on an otherwise idle link, in bytes per second.

    Counts: min(W, c M / RTT sqrt(3 / (2 p))). Source: Mathis, Semke, Mahdavi and Ott, "The Macroscopic Behavior of the
    TCP Congestion Avoidance Algorithm", ACM CCR 27(3), 1997, for receivers that acknowledge every packet.
    Assumes: rare random loss, and buffers that are large enough for the link. Differs: with delayed acknowledgements
    the formula has 3 / (4 p) under the root, 29 % less. CUBIC and BBR are faster at long RTT.

    >>> lossy = LinkSpec(bandwidth="1Gb/s", latency_s=0.05, loss=0.00015)
    >>> tcp_bytes_per_s(lossy)  # 1460 / 0.1 * sqrt(1.5 / 0.00015)
    1460000.0
    """
    if not link.loss or not link.latency_s:
        return float(link.bandwidth)
    connection_bytes_per_s = PACKET_BYTES / (2 * link.latency_s) * sqrt(1.5 / link.loss)
    return min(float(link.bandwidth), link.num_connections * connection_bytes_per_s)


def count_levels(num_places: int, fan_out: int) -> int:
    """Levels of the smallest tree with `num_places` sites below the trainers.

    >>> count_levels(1, 1), count_levels(14, 2), count_levels(15, 2), count_levels(5, 1)
    (1, 3, 4, 5)
    """
    if fan_out == 1:
        return num_places
    levels, reached, width = 0, 0, 1
    while reached < num_places:
        width *= fan_out
        reached += width
        levels += 1
    return levels


def plan_broadcast(link: LinkSpec, num_bytes: float) -> Broadcast:
    """Plan a transfer to every site, in the fastest tree or with the fan-out of the link's specification.

    Counts: d latency + B / r + (d - 1) min(S, B) / r with r = min(W / f, TCP throughput). Source: a pipeline of
    shards, as SHARDCAST's relays work (INTELLECT-2, arXiv 2505.07291). Assumes: a site sends to all of its children at
    the same time.

    >>> at_590 = LinkSpec(bandwidth="590Mb/s")
    >>> round(plan_broadcast(at_590, 62e9).seconds / 60, 1)  # INTELLECT-2: 62 GB in 14 minutes
    14.0
    """
    if not num_bytes:
        return Broadcast(0.0, 1, 0)
    most = link.num_places
    auto_sizes = (*range(1, min(most, MOST_CHILDREN) + 1), most)
    # more children share the bandwidth, fewer make a deeper tree: no closed form, so all are tried
    sizes = auto_sizes if link.fan_out == "auto" else (min(link.fan_out, most),)
    best, rate = Broadcast(inf, 1, 0), tcp_bytes_per_s(link)
    for fan_out in sizes:
        levels, child_rate = count_levels(most, fan_out), min(link.bandwidth / fan_out, rate)
        seconds = levels * link.latency_s + (num_bytes + (levels - 1) * min(SHARD_BYTES, num_bytes)) / child_rate

        if seconds < best.seconds:
            best = Broadcast(seconds, fan_out, levels)
    return best
