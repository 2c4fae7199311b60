"""Slow links: how long bytes take from the place that trains to all places that generate, passed on in a tree.

In: a LinkSpec, bytes. Out: seconds, and the tree. Left out: what a place does inside (it passes shards on to its hosts
as they come), places with different links, transfers of several weight syncs at once, congestion by others.

Symbols: B bytes, W a place's bandwidth, M a packet's payload, RTT twice the latency, p the loss, c connections, f
children of a place in the tree, n places, d levels below the trainers, S a shard. All places are alike, so that a tree
is its numbers: a hundred thousand places take no longer to count than one.
"""

from dataclasses import dataclass
from math import inf, sqrt

from rlplan.spec.parts.placement import LinkSpec

PACKET_BYTES = 1460
"""M: 1500 bytes of Ethernet less 40 of TCP and IP."""
SHARD_BYTES = 50_000_000
"""S: a place passes on what it has whole. Source: PrimeIntellect-ai/shardcast, constants.py, SHARD_SIZE."""
MOST_CHILDREN = 64
"""That are tried one by one; beyond that only all places at once."""


@dataclass(frozen=True, slots=True)
class Broadcast:
    """One transfer to every place."""

    seconds: float
    """Until the last place has the last byte."""
    fan_out: int
    """f"""
    num_levels: int
    """d"""


def tcp_bytes_per_s(link: LinkSpec) -> float:
    """Bytes per second that TCP reaches between two places with nothing else on the link.

    Counts: min(W, c M / RTT sqrt(3 / (2 p))). Source: Mathis, Semke, Mahdavi and Ott, "The Macroscopic Behavior of the
    TCP Congestion Avoidance Algorithm", ACM CCR 27(3), 1997, for receivers that acknowledge every packet.
    Assumes: loss at random, small, buffers as large as the link asks for. Differs: with delayed acknowledgements the
    root is of 3 / (4 p), 29 % less; CUBIC and BBR reach more where RTT is long.

    >>> lossy = LinkSpec(bandwidth="1Gb/s", latency_s=0.05, loss=0.00015)
    >>> tcp_bytes_per_s(lossy)  # 1460 / 0.1 * sqrt(1.5 / 0.00015)
    1460000.0
    """
    if not link.loss or not link.latency_s:
        return float(link.bandwidth)
    one = PACKET_BYTES / (2 * link.latency_s) * sqrt(1.5 / link.loss)
    return min(float(link.bandwidth), link.num_connections * one)


def num_levels(num_places: int, fan_out: int) -> int:
    """Levels of the smallest tree with so many places below the trainers.

    >>> num_levels(1, 1), num_levels(14, 2), num_levels(15, 2), num_levels(5, 1)
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


def broadcast(link: LinkSpec, num_bytes: float) -> Broadcast:
    """A transfer to every place in the fastest tree, or in the one that the link says.

    Counts: d latency + B / r + (d - 1) min(S, B) / r with r = min(W / f, what TCP reaches). Source: a pipeline of
    shards, as SHARDCAST's relays pass them on (INTELLECT-2, arXiv 2505.07291). Assumes: a place sends to all of its
    children at once.

    >>> at_590 = LinkSpec(bandwidth="590Mb/s")
    >>> round(broadcast(at_590, 62e9).seconds / 60, 1)  # INTELLECT-2: 62 GB in 14 minutes
    14.0
    """
    if not num_bytes:
        return Broadcast(0.0, 1, 0)
    given, most = link.fan_out, link.num_places
    sizes = (min(given, most),) if given != "auto" else (*range(1, min(most, MOST_CHILDREN) + 1), most)
    best, rate = Broadcast(inf, 1, 0), tcp_bytes_per_s(link)
    for fan_out in sizes:
        levels, each = num_levels(most, fan_out), min(link.bandwidth / fan_out, rate)
        seconds = levels * link.latency_s + (num_bytes + (levels - 1) * min(SHARD_BYTES, num_bytes)) / each
        if seconds < best.seconds:
            best = Broadcast(seconds, fan_out, levels)
    return best
