"""What processes have in common: sums of bytes by kind; on a GPU a context, communicators, a bucket for weights.

In: a GPU's overheads, sizes. Out: bytes by kind. Left out: tensors of a role (trainer.py, scorer.py, engine.py).
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from rlplan.memory.machine.host import pinned_bytes
from rlplan.memory.weight_sync.buckets import plan_buckets, staging_bytes
from rlplan.memory.weight_sync.resharding import bridge_bucket
from rlplan.spec.hardware.profile import GpuOverheads
from rlplan.spec.model import ModelSpec
from rlplan.vocabulary import Backend, MemoryKind

Bytes = dict[MemoryKind, int]


def add(one: Mapping[MemoryKind, int], other: Mapping[MemoryKind, int]) -> Bytes:
    """The sum of two, kind by kind."""
    total = dict(one)
    for kind, size in other.items():
        total[kind] = total.get(kind, 0) + size
    return total


def pinned(sizes: Mapping[MemoryKind, int]) -> Bytes:
    """What tensors take in pinned memory, one flat tensor a kind."""
    return {kind: pinned_bytes(size) for kind, size in sizes.items()}


def process_overheads(
    overheads: GpuOverheads, num_ranks: int, *, in_transfer_group: bool = False, axes: Sequence[int] = ()
) -> Bytes:
    """A CUDA context, and a communicator where a process has peers.

    in_transfer_group: one more, of the trainer's first rank and all engines, which weights pass through. axes: ranks of
    further groups that the process belongs to (tensor, pipeline, context, expert parallel); those of one have none.
    Differs: Megatron's 15 to 18 GB that stay after everything was offloaded (slime), of which 12 are communicators:
    it makes some thirty groups, of which this counts those that the passes use.
    """
    held = {MemoryKind.CONTEXT: overheads.context.value}
    pair, many = overheads.communicator_of_two.value, overheads.communicator_of_many.value
    groups = sum(pair if size == 2 else many for size in (num_ranks, *axes) if size > 1) + many * in_transfer_group
    return held | ({MemoryKind.COMM_BUFFERS: groups} if groups else {})


@lru_cache(maxsize=64)
def sync_staging(model: ModelSpec, element_bytes: int, bucket_bytes: int, backend: Backend) -> int:
    """Bytes of the bucket through which weights pass from the trainer to the engine; 0 without one."""
    if not bucket_bytes:
        return 0
    if backend != "deepspeed":
        return bridge_bucket(model, backend, element_bytes, bucket_bytes)
    return staging_bytes(plan_buckets(model.parameters, element_bytes, bucket_bytes))
