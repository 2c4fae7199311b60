"""Weight sync packets: the pieces in which the policy's weights are sent, and the staging memory on both sides.

Parameters that are sent together form a bucket. A decoder layer is never split over buckets: vLLM's layerwise reload
keeps references to the tensors of an unfinished layer, and the next bucket reuses the staging memory. The runtime sends
exactly these packets through exactly this memory. Frameworks on FSDP2 and Megatron gather and send weights tensor by
tensor instead. Source: verl's `per_tensor_generator` (utils/megatron_utils.py; "per tensor weight resharding",
docs/perf/dpsk.md), slime's update_weight (a buffer of `update_weight_buffer_size`), Megatron-Bridge's
`export_hf_weights`.

In: the model's parameters or its adapters, the transport, the bound `placement.sync_bucket`. Out: buckets with byte
offsets, packets, bytes of staging. Left out: adapters in engines (adapters.py), the control page of a shared arena
(4 KiB for 56 packets), the kernel's page cache.

Symbols: A bytes of the arena, P bytes of the policy in the engine's element type.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from rlplan.spec.model import Component, ModelSpec, Parameter
from rlplan.spec.resolved import ResolvedJob
from rlplan.units import round_up
from rlplan.vocabulary import Backend, SyncContent, Transport

ALIGNMENT = 64
"""Alignment in bytes: a tensor in the arena starts on a cache line."""


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """One parameter in a bucket: its shape and its offset in bytes."""

    name: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that are sent together."""

    entries: tuple[BucketEntry, ...]
    num_bytes: int
    """Bytes of the arena that the bucket takes."""


def plan_buckets(parameters: Sequence[Parameter], dtype_bytes: int, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Cut parameters into layer-ordered buckets of at most `bucket_bytes`. A single layer is never split.

    >>> parts = [Parameter("model.embed_tokens.weight", (4, 8)), Parameter("model.layers.0.a.weight", (8, 8)),
    ...          Parameter("model.layers.1.a.weight", (8, 8))]
    >>> [bucket.num_bytes for bucket in plan_buckets(parts, 4, 400)]
    [384, 256]
    """
    buckets: list[Bucket] = []
    entries: list[BucketEntry] = []
    used = 0
    for group in _group_layers(parameters):
        size = sum(round_up(parameter.numel * dtype_bytes, ALIGNMENT) for parameter in group)
        if entries and used + size > bucket_bytes:
            buckets.append(Bucket(tuple(entries), used))
            entries, used = [], 0
        for parameter in group:
            entries.append(BucketEntry(parameter.name, parameter.shape, used))
            used += round_up(parameter.numel * dtype_bytes, ALIGNMENT)
    buckets.append(Bucket(tuple(entries), used))
    return tuple(buckets)


def staging_bytes(buckets: Sequence[Bucket]) -> int:
    """Bytes of the shared arena that holds one bucket after the other.

    Counts: the largest bucket. Source: `rlplan.runtime.weight_sync.transports.shared_memory`.
    """
    return max(bucket.num_bytes for bucket in buckets)


def _group_layers(parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    """Parameters that must be sent together: those of one decoder layer. Parameters outside the layers are separate."""
    groups: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(name_layer(parameter.name), []).append(parameter)
    return list(groups.values())


def name_layer(name: str) -> str:
    """The name of a parameter's decoder layer; the parameter's own name outside the layers.

    >>> name_layer("model.layers.3.mlp.up_proj.weight"), name_layer("model.norm.weight")
    ('model.layers.3', 'model.norm.weight')
    """
    parts = name.split(".")
    index = next((position for position, part in enumerate(parts) if part.isdigit()), None)
    return name if index is None else ".".join(parts[: index + 1])


PACKETS_IN_ARENA = 4
"""Packets that share the arena, so that the trainer writes the next ones while the engine loads one."""


@dataclass(frozen=True, slots=True)
class Packet:
    """A bucket and its place in the arena."""

    bucket: Bucket
    start: int
    """Offset in the arena, in bytes."""
    after: int
    """Packets that the engine must have read before this one may be written."""


def plan_packets(parameters: Sequence[Parameter], dtype_bytes: int, bucket_bytes: int) -> tuple[Packet, ...]:
    """Place packets in a ring buffer, the arena, which is as large as the largest bucket.

    Counts: buckets of a quarter of the arena; a larger decoder layer or table takes its own size. A packet that does
    not fit after the previous one starts at the beginning.

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
    """Bytes of the arena, on each side.

    Counts: the farthest end of a packet; at most the largest bucket. Source: `rlplan.runtime.weight_sync`.

    >>> arena_bytes(plan_packets([Parameter(f"model.layers.{i}.a.weight", (4, 8)) for i in range(6)], 4, 512))
    512
    """
    return max(packet.start + packet.bucket.num_bytes for packet in packets)


def plan_policy_packets(job: ResolvedJob, model: ModelSpec) -> tuple[Packet, ...]:
    """A job's packets of adapters or weights, in the engine's element type: the trainer converts while it copies."""
    sends_adapters = job.placement.sync_content is SyncContent.ADAPTER
    parameters = job.adapter_parameters(model) if sends_adapters else model.parameters
    return plan_packets(parameters, job.rollout.dtype.num_bytes, job.placement.sync_bucket)


def sync_staging_bytes(job: ResolvedJob, model: ModelSpec) -> int:
    """Bytes that the sending rank keeps allocated for weight syncs. Every engine process keeps as many.

    Counts: the arena A (with `disk` only the largest packet). `delta` content adds the copy P that was sent last, from
    which deltas are computed and to which they are applied. Source: `rlplan.runtime.weight_sync`.
    Assumes: shared memory counts on both sides, as the operating system counts it for each process.
    """
    packets = plan_policy_packets(job, model)
    largest = max(packet.bucket.num_bytes for packet in packets)
    staging = largest if job.sync_transport is Transport.DISK else arena_bytes(packets)
    if job.placement.sync_content is SyncContent.DELTA:
        staging += shadow_bytes(packets)
    return staging


def shadow_bytes(packets: Sequence[Packet]) -> int:
    """Bytes of a copy of the policy in packets, with each tensor on a cache line.

    >>> shadow_bytes(plan_packets([Parameter("model.norm.weight", (8,))], 4, 512))
    64
    """
    return sum(packet.bucket.num_bytes for packet in packets)


@lru_cache(maxsize=256)
def find_largest_units(model: ModelSpec, backend: Backend, ep: int = 1) -> tuple[int, int]:
    """(elements of the largest tensor that is sent, of the largest that is gathered at a time).

    Counts: Megatron's experts are separate matrices, and each rank of an expert parallel group contributes one; gate
    and up are one tensor. FSDP2's experts are stacked (transformers 5), and `full_tensor()` gathers the whole stack.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> find_largest_units(find_model("deepseek-ai/DeepSeek-V3"), "megatron", 64)  # a table; 64 times 2 x 2048 x 7168
    (926679040, 1879048192)
    """
    stacks, others = list[Parameter](), list[Parameter]()
    for tensor in model.parameters:
        (stacks if tensor.component is Component.EXPERTS and len(tensor.shape) == 3 else others).append(tensor)
    # Bridges send gate and up as one tensor.
    dense = max(*(tensor.numel for tensor in others), 2 * model.intermediate_size * model.hidden_size)
    if backend != "megatron":
        largest = max((dense, *(stack.numel for stack in stacks)))
        return largest, largest
    expert = max((stack.numel // stack.shape[0] for stack in stacks), default=0)
    return max(dense, expert), max(dense, ep * expert)


def bridge_bucket_bytes(model: ModelSpec, backend: Backend, element_bytes: int, bucket_bytes: int) -> int:
    """Bytes of the bucket for whole tensors: the configured bound, or the largest tensor.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> bridge_bucket_bytes(find_model("deepseek-ai/DeepSeek-V3"), "megatron", 2, 512 << 20)  # 129280 x 7168 x 2
    1853358080
    """
    largest, _ = find_largest_units(model, backend)
    return max(element_bytes * largest, min(bucket_bytes, element_bytes * model.num_parameters))


def gathered_part_bytes(model: ModelSpec, backend: Backend, element_bytes: int, ep: int = 1) -> int:
    """Bytes of the parts of one tensor that are gathered from all ranks, in addition to the assembled tensor."""
    return element_bytes * find_largest_units(model, backend, ep)[1]
