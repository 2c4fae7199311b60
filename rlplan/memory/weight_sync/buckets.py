"""Weight sync buckets: how the policy's parameters are cut into buckets, and what staging that takes.

In: the model's parameters and the bucket size. Out: buckets with byte offsets. The runtime sends exactly these buckets.
Left out: how buckets travel (packets.py).

A decoder layer is never cut: vLLM's layerwise reload keeps references to the tensors of an unfinished layer, and the
staging memory is reused for the next bucket.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rlplan.spec.model import Parameter
from rlplan.units import round_up

ALIGNMENT = 64
"""Bytes: a tensor in the arena starts on a cache line."""


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """One parameter in a bucket: its shape and where it starts, in bytes."""

    name: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that travel together. num_bytes: of the arena that they take."""

    entries: tuple[BucketEntry, ...]
    num_bytes: int


def plan_buckets(parameters: Sequence[Parameter], dtype_bytes: int, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Layer-ordered buckets of at most `bucket_bytes`, except that a single layer is never cut.

    >>> parts = [Parameter("model.embed_tokens.weight", (4, 8)), Parameter("model.layers.0.a.weight", (8, 8)),
    ...          Parameter("model.layers.1.a.weight", (8, 8))]
    >>> [bucket.num_bytes for bucket in plan_buckets(parts, 4, 400)]
    [384, 256]
    """
    buckets: list[Bucket] = []
    entries: list[BucketEntry] = []
    used = 0
    for group in _layers(parameters):
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
    """Bytes of the shared arena through which the buckets pass, one after the other.

    Counts: the largest bucket. Source: `rlplan.runtime.weight_sync.transports.shared_memory`.
    """
    return max(bucket.num_bytes for bucket in buckets)


def _layers(parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    """Parameters that must travel together: those of one decoder layer; others alone."""
    groups: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(layer_of(parameter.name), []).append(parameter)
    return list(groups.values())


def layer_of(name: str) -> str:
    """The decoder layer that a parameter belongs to; its own name when it stands outside of them.

    >>> layer_of("model.layers.3.mlp.up_proj.weight"), layer_of("model.norm.weight")
    ('model.layers.3', 'model.norm.weight')
    """
    parts = name.split(".")
    index = next((position for position, part in enumerate(parts) if part.isdigit()), None)
    return name if index is None else ".".join(parts[: index + 1])
