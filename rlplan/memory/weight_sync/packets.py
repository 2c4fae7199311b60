"""Weight sync: in which packets the policy's weights travel, and what staging both sides hold for it.

In: the model's parameters or its adapters, the transport, the bound `placement.sync_bucket`. Out: packets, bytes of
staging.
The runtime sends exactly these packets through exactly this memory.
Left out: what engines hold of adapters (adapters.py), the control page of a shared arena (4 KiB for 56 packets), the
pages that the kernel keeps of files.

Symbols: A bytes of the arena, P bytes of the policy in the engine's element type.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rlplan.memory.weight_sync.buckets import Bucket, plan_buckets, staging_bytes
from rlplan.spec.model import ModelSpec, Parameter
from rlplan.spec.resolved import ResolvedJob
from rlplan.vocabulary import SyncContent, Transport

PACKETS_IN_ARENA = 4
"""So many packets share the arena: while the engine loads one, the trainer already writes the next ones."""


@dataclass(frozen=True, slots=True)
class Packet:
    """A bucket and its place in the arena. after: so many packets must have been read before it may be written."""

    bucket: Bucket
    start: int
    after: int


def plan_packets(parameters: Sequence[Parameter], dtype_bytes: int, bucket_bytes: int) -> tuple[Packet, ...]:
    """Packets that follow one another round an arena, none of them larger than the largest bucket.

    Counts: an arena as large as the largest bucket, cut into buckets of a quarter of it; a decoder layer or a table
    that is larger takes what it needs. A packet that does not fit behind the one before it starts at the beginning.

    >>> parts = [Parameter(f"model.layers.{i}.a.weight", (4, 8)) for i in range(6)]  # 128 bytes each
    >>> [(p.start, p.after) for p in plan_packets(parts, 4, 512)]
    [(0, 0), (128, 0), (256, 0), (384, 0), (0, 1), (128, 2)]
    """
    capacity = staging_bytes(plan_buckets(parameters, dtype_bytes, bucket_bytes))
    packets: list[Packet] = []
    head = 0
    for bucket in plan_buckets(parameters, dtype_bytes, capacity // PACKETS_IN_ARENA):
        start = head if head + bucket.num_bytes <= capacity else 0
        head = start + bucket.num_bytes
        overlapped = [
            index + 1
            for index, packet in enumerate(packets)
            if packet.start < head and start < packet.start + packet.bucket.num_bytes
        ]
        packets.append(Packet(bucket, start, max(overlapped, default=0)))
    return tuple(packets)


def arena_bytes(packets: Sequence[Packet]) -> int:
    """Bytes of the memory through which packets pass, on each side.

    Counts: the farthest end of a packet; at most the largest bucket. Source: `rlplan.runtime.weight_sync`.

    >>> arena_bytes(plan_packets([Parameter(f"model.layers.{i}.a.weight", (4, 8)) for i in range(6)], 4, 512))
    512
    """
    return max(packet.start + packet.bucket.num_bytes for packet in packets)


def policy_packets(job: ResolvedJob, model: ModelSpec) -> tuple[Packet, ...]:
    """A job's packets: in the engine's element type, for the trainer converts while it copies. Adapters, or weights."""
    sends_adapters = job.placement.sync_content is SyncContent.ADAPTER
    parameters = job.adapter_parameters(model) if sends_adapters else model.parameters
    return plan_packets(parameters, job.rollout.dtype.num_bytes, job.placement.sync_bucket)


def sync_staging_bytes(job: ResolvedJob, model: ModelSpec) -> int:
    """Bytes that the sending rank holds for weight sync between syncs, and every engine process likewise.

    Counts: the arena A (with `disk` only the largest packet); with `delta` content the last sent copy P as well, for
    differences are taken from it and laid over it. Source: `rlplan.runtime.weight_sync`.
    Assumes: shared memory counts on both sides, as the operating system counts it for each process.
    """
    packets = policy_packets(job, model)
    largest = max(packet.bucket.num_bytes for packet in packets)
    staging = largest if job.sync_transport is Transport.DISK else arena_bytes(packets)
    if job.placement.sync_content is SyncContent.DELTA:
        staging += shadow_bytes(packets)
    return staging


def shadow_bytes(packets: Sequence[Packet]) -> int:
    """Bytes of a copy of the policy, packet by packet, each tensor on a cache line.

    >>> shadow_bytes(plan_packets([Parameter("model.norm.weight", (8,))], 4, 512))
    64
    """
    return sum(packet.bucket.num_bytes for packet in packets)
