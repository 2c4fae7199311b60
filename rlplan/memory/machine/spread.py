"""Spreads: the interval of a ledger row around its expected bytes, by kind.

In: a kind and bytes. Out: (low, high) bytes. Left out: variation of sequence lengths, which widens activations and
logits further, and where the measured factor comes from (planner/measured_errors.py).
"""

import math
from collections.abc import Mapping

from rlplan.units import ceil_div
from rlplan.vocabulary import MemoryKind

PERCENT = {
    MemoryKind.ACTIVATIONS: (94, 107),
    MemoryKind.LOGITS: (94, 107),
    MemoryKind.CONTEXT: (50, 100),
    MemoryKind.COMM_BUFFERS: (50, 110),
    MemoryKind.CUDA_GRAPHS: (50, 150),
    MemoryKind.FRAGMENTATION: (0, 200),
}
"""(low, high) percent of the expected bytes. Activations and logits: the largest error against traces of 12 families is
6.2 % (tests/memory/model/test_activations_traced.py). Context: profiles state the upper end of the 0.3 to 0.6 GiB in
public logs. Communication: buckets are exact, NCCL's own buffers are assumed. Graphs: logs show 0.1 to 1.3 GiB for
models whose formula gives 0.65. Fragmentation: none with expandable segments; without them up to twice the bytes that
machine.py expects. Every other kind is exact."""


def spread(kind: MemoryKind, num_bytes: int) -> tuple[int, int]:
    """Low and high bytes of a row.

    >>> spread(MemoryKind.ACTIVATIONS, 1000), spread(MemoryKind.WEIGHTS, 1000)
    ((940, 1070), (1000, 1000))
    """
    if kind not in PERCENT:
        return num_bytes, num_bytes
    low, high = PERCENT[kind]
    return num_bytes * low // 100, ceil_div(num_bytes * high, 100)


def find_high_ends(longest: Mapping[MemoryKind, int], usual: int, factor: float) -> dict[MemoryKind, int]:
    """High ends of the rows of one process during a training or scoring pass.

    longest: bytes by kind at the longest sequence lengths. usual: their sum at the usual lengths. factor: measured over
    predicted peaks of such passes, at the high end of their range. Measurements do not separate kinds. So bytes that
    the rows' own high ends do not reach are added to the largest row that has an interval, or else to the largest row.

    >>> find_high_ends({MemoryKind.ACTIVATIONS: 1000, MemoryKind.WEIGHTS: 1000}, 2000, 1.2)[MemoryKind.ACTIVATIONS]
    1400
    """
    ends = {kind: spread(kind, num_bytes)[1] for kind, num_bytes in longest.items()}
    unexplained = math.ceil(usual * factor) - sum(ends.values())
    if unexplained > 0:
        ends[max(ends, key=lambda kind: (kind in PERCENT, ends[kind]))] += unexplained
    return ends


def sum_high_ends(sizes: Mapping[MemoryKind, int]) -> int:
    """Sum of the high ends of all kinds' intervals (`spread`).

    >>> sum_high_ends({MemoryKind.ACTIVATIONS: 1000, MemoryKind.WEIGHTS: 1000})
    2070
    """
    total = 0
    # The rounding of `spread` is inlined: a search sums millions of rows.
    for kind, num_bytes in sizes.items():
        total += -(-num_bytes * PERCENT[kind][1] // 100) if kind in PERCENT else num_bytes
    return total
