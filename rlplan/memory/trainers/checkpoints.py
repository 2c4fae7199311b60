"""Checkpoints to resume from: the states that each rank saves, and the copy that it makes before it writes them.

In: a rank's ZeroStates. Out: elements, bytes in memory, bytes on disk. Left out: headers and manifests (kilobytes), the
generator's state, and the pages of files that the kernel caches.

Symbols: P trainable parameters, N ranks, S elements of a rank's partition, r the rank.
"""

from rlplan.memory.trainers.optimizers import Optimizer, quantized_bytes
from rlplan.memory.trainers.zero import ZeroStates

SAVED_KINDS = ("master", "exp_avg", "exp_avg_sq")
"""States saved of each trained element, in fp32. 16-bit weights are not saved: they are the rounded master weights."""

MASTER_BYTES = 4
SAVED_BYTES = MASTER_BYTES * len(SAVED_KINDS)


def cut_evenly(numel: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """(first, last + 1) of the elements that a rank saves in stage 0, where every rank holds all of them.

    >>> [cut_evenly(10, 4, rank) for rank in range(4)]
    [(0, 3), (3, 6), (6, 9), (9, 10)]
    """
    size = -(-numel // num_ranks)
    return min(rank * size, numel), min((rank + 1) * size, numel)


def saved_numel(states: ZeroStates) -> int:
    """Elements whose master weight and moments this rank saves. All ranks together save each element once.

    Counts: stage 0 an even cut of P; stages 1 and 2 its partition of the flat buffer, stage 3 its share of every
    tensor, padding left out. Source: `rlplan.runtime.checkpoints.fragments`.

    >>> from rlplan.memory.trainers.zero import ZeroSettings
    >>> from rlplan.spec.model import Parameter
    >>> def rank(stage, rank):
    ...     settings = ZeroSettings(stage=stage, num_ranks=2, weight_bytes=4)
    ...     return ZeroStates(settings, (Parameter("a", (7,)), Parameter("b", (2,))), (), rank)
    >>> [saved_numel(rank(stage, 0)) for stage in (0, 2, 3)]  # 9 in two: 5; buffer of 12 in two: 6; 4 and 1
    [5, 6, 5]
    >>> [saved_numel(rank(stage, 1)) for stage in (0, 2, 3)]
    [4, 3, 4]
    """
    settings, rank = states.settings, states.rank
    if settings.stage == 3:
        shares = [cut_evenly(parameter.numel, settings.num_ranks, rank) for parameter in states.trainable]
        return sum(last - first for first, last in shares)
    if settings.stage == 0:
        first, last = cut_evenly(states.num_trainable, settings.num_ranks, rank)
    else:
        first = min(rank * states.partition_numel, states.num_trainable)
        last = min((rank + 1) * states.partition_numel, states.num_trainable)
    return last - first


def saved_bytes(states: ZeroStates) -> int:
    """Bytes that this rank writes. A checkpoint that is written during training first makes a copy of this size.

    Counts: `SAVED_BYTES` an element. With 8-bit moments 4 an element for the master weights, and the quantized moments
    of all elements that the rank steps (`optimizers.quantized_bytes`), in stage 0 on every rank.
    Assumes: Adam. Differs: `host.checkpoint_bytes` counts 16-bit weights too.

    >>> from rlplan.memory.trainers.zero import ZeroSettings
    >>> from rlplan.spec.model import Parameter
    >>> settings = ZeroSettings(stage=2, num_ranks=1, weight_bytes=4, optimizer=Optimizer.ADAMW_8BIT)
    >>> saved_bytes(ZeroStates(settings, (Parameter("a", (8192,)),)))  # 4 * 8192 + 2 * (8192 + 32 scales of 4)
    49408
    """
    if states.settings.optimizer is Optimizer.ADAMW:
        return SAVED_BYTES * saved_numel(states)
    return MASTER_BYTES * saved_numel(states) + sum(map(quantized_bytes, states.stepped_numels()))
