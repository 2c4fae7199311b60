"""Spreads: how far below and above its expected bytes a row of the ledger may lie, by kind.

In: a kind and bytes. Out: (low, high) bytes. Left out: lengths, which widen activations and logits by themselves.
"""

from collections.abc import Mapping

from rlplan.units import ceil_div
from rlplan.vocabulary import MemoryKind

PERCENT = {
    MemoryKind.ACTIVATIONS: (94, 107),
    MemoryKind.LOGITS: (94, 107),
    MemoryKind.CONTEXT: (50, 100),
    MemoryKind.COMM_BUFFERS: (50, 110),
    MemoryKind.CUDA_GRAPHS: (50, 150),
    MemoryKind.FRAGMENTATION: (0, 360),
}
"""Percent of the expected bytes. Activations and logits: the largest error against traces of 12 families is 6.2 %
(tests/memory/test_activations_traced.py). Context: profiles state the upper end of what public logs show, 0.3 to
0.6 GiB. Communication: buckets are exact, NCCL's own buffers are assumed. Graphs: logs show 0.1 to 1.3 GiB for models
whose formula gives 0.65. Fragmentation: see FRAGMENTATION_PERCENT. Every other kind is exact."""
FRAGMENTATION_PERCENT = 10
"""Percent of what a process allocates and frees within an action that its allocator holds beside it. Assumed: with
expandable segments hardly more than none; without them a public log has 1.06 GiB reserved beyond 9.16 GiB allocated,
of which 2.9 GiB came and went (fsdp_qlora, Llama-2-7B with LoRA at 2,048 tokens): 36 %, which is the high end."""
TRANSIENT_KINDS = (MemoryKind.ACTIVATIONS, MemoryKind.LOGITS)


def fragmentation_bytes(held: Mapping[MemoryKind, int]) -> int:
    """Bytes that an allocator holds beside the tensors of a peak: 10 % of what comes and goes.

    >>> fragmentation_bytes({MemoryKind.WEIGHTS: 5000, MemoryKind.LOGITS: 1000})
    100
    """
    return ceil_div(FRAGMENTATION_PERCENT * sum(held.get(kind, 0) for kind in TRANSIENT_KINDS), 100)


def spread(kind: MemoryKind, num_bytes: int) -> tuple[int, int]:
    """Low and high bytes of a row.

    >>> spread(MemoryKind.ACTIVATIONS, 1000), spread(MemoryKind.WEIGHTS, 1000)
    ((940, 1070), (1000, 1000))
    """
    low, high = PERCENT.get(kind, (100, 100))
    return num_bytes * low // 100, ceil_div(num_bytes * high, 100)
