"""Masking: rollouts that have no reward teach nothing, and do not count among those that others are compared with.

In: judged rollouts. Out: those that can be learned from; the rest is set to 0 everywhere.
"""

from collections import Counter
from collections.abc import Sequence

from rlplan.runtime.experience import Rollout
from rlplan.vocabulary import Role


def mask_failures(rollouts: Sequence[Rollout], min_samples: int) -> list[Rollout]:
    """The rollouts with a reward, of groups in which at least `min_samples` have one; the others are masked."""
    counts = Counter(rollout.group for rollout in rollouts if not rollout.failure)
    valid = []
    for rollout in rollouts:
        if not rollout.failure and counts[rollout.group] >= min_samples:
            valid.append(rollout)
            continue
        zeros = (0.0,) * len(rollout.completion.tokens)
        rollout.advantages, rollout.num_ignored = zeros, len(zeros)
        rollout.returns = zeros if Role.VALUE in rollout.scores else ()
    return valid
