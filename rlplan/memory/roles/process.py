"""Memory of every GPU process: CUDA context, communicators, the weight sync bucket.

In: a GPU's overheads, sizes. Out: bytes by kind. Left out: tensors of a role (trainer.py, scorer.py, engine.py).
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from rlplan.memory.machine.host import pinned_bytes
from rlplan.memory.weight_sync.packets import bridge_bucket_bytes, plan_buckets, staging_bytes
from rlplan.spec.hardware.profile import GpuOverheads
from rlplan.spec.model import ModelSpec
from rlplan.vocabulary import Backend, MemoryKind

Bytes = dict[MemoryKind, int]


def add(sizes: Mapping[MemoryKind, int], more: Mapping[MemoryKind, int]) -> Bytes:
    """Add bytes kind by kind."""
    total = dict(sizes)
    for kind, size in more.items():
        total[kind] = total.get(kind, 0) + size
    return total


def pin_sizes(sizes: Mapping[MemoryKind, int]) -> Bytes:
    """Bytes of pinned memory that holds one flat tensor per kind."""
    return {kind: pinned_bytes(size) for kind, size in sizes.items()}


def process_overheads(
    overheads: GpuOverheads, num_ranks: int, *, in_transfer_group: bool = False, axes: Sequence[int] = ()
) -> Bytes:
    """Bytes of a process's CUDA context and communicators.

    in_transfer_group: one more communicator, between the trainer's first rank and all engines, for weight sync.
    axes: sizes of further groups (tensor, pipeline, context, expert parallel); a group of one needs no communicator.
    Differs: slime reports 15 to 18 GB that stay after Megatron has offloaded everything, 12 of them communicators.
    Megatron makes some thirty groups; this counts only those that the passes use.
    """
    sizes = {MemoryKind.CONTEXT: overheads.context.value}
    pair, many = overheads.communicator_of_two.value, overheads.communicator_of_many.value
    groups = sum(pair if size == 2 else many for size in (num_ranks, *axes) if size > 1) + many * in_transfer_group
    return sizes | ({MemoryKind.COMM_BUFFERS: groups} if groups else {})


@lru_cache(maxsize=64)
def sync_staging(model: ModelSpec, element_bytes: int, bucket_bytes: int, backend: Backend) -> int:
    """Bytes of the bucket in which weights travel from the trainer to the engine; 0 without one."""
    if not bucket_bytes:
        return 0
    if backend != "deepspeed":
        return bridge_bucket_bytes(model, backend, element_bytes, bucket_bytes)
    return staging_bytes(plan_buckets(model.parameters, element_bytes, bucket_bytes))
