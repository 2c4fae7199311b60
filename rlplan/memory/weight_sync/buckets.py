"""Weight sync buckets: groups of the policy's parameters that are sent together, and their staging memory.

A decoder layer is never split over buckets. vLLM's layerwise reload keeps references to the tensors of an unfinished
layer, and the next bucket reuses the staging memory.

In: the model's parameters and the bucket size. Out: buckets with byte offsets, which the runtime sends exactly so.
Left out: the transport of buckets (packets.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rlplan.spec.model import Parameter
from rlplan.units import round_up

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
