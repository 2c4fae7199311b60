"""Staleness: how far generation may be ahead of training, and how old the trained tokens are.

In: versions of the weights, groups with the version of each token. Out: how many prompts may begin; histograms.
Left out: what staleness does to learning.

A version is a weight sync to the engines: version v was trained on v batches. Optimizer steps inside a batch
do not count: the tokens of a synchronous step are 0 versions old, whatever its mini-batches.
"""

import math
from collections import Counter
from collections.abc import Iterable

from rlplan.simulate.engine import Group


def num_allowed(version: int, max_staleness: float, num_prompts: int) -> int:
    """Prompts that may have been begun, in all, under a version.

    Counts: floor((version + 1 + max_staleness) x prompts of a batch).
    Source: AReaL's rule (Fu et al. 2025, equation 3) with the bound in batches; verl's fully asynchronous trainer
        (`staleness_threshold`) says the same: at a weight sync it counts what is queued and unfinished, which is what
        was begun less version x batch, and begins no more than (1 + threshold) x batch.
    Assumes: no prompt is dropped.

    >>> num_allowed(0, 0.0, 512), num_allowed(0, 0.5, 512), num_allowed(3, 0.5, 512)
    (512, 768, 2304)
    """
    return math.floor((version + 1 + max_staleness) * num_prompts + 1e-9)


def must_be_waited_for(begun_under: Iterable[int], version: int, max_staleness: float, num_prompts: int) -> bool:
    """Whether a step has to wait for older groups, because what it would leave out could not all be trained in time.

    Counts: of the groups left out, finished or not, the k-th oldest (from 0) is trained under version + 1 + k //
    num_prompts at the earliest; it is too old when that is more than max_staleness after it was begun. With
    `num_allowed` and the oldest taken first there always is an order in which none is: earliest deadline first.
    begun_under: of the groups that would be left out. Source: own; the published systems bound only what is begun.
    Differs: from a rule for the next step alone, which lets newer groups go first until older ones no longer fit.

    >>> must_be_waited_for([1, 2], 2, 1, 1), must_be_waited_for([2], 2, 1, 1), must_be_waited_for([2, 2], 2, 1, 1)
    (True, False, True)
    """
    return any(
        version + 1 + place // num_prompts - begun > max_staleness for place, begun in enumerate(sorted(begun_under))
    )


class StalenessCounts:
    """Ages at the moment of training, in versions."""

    def __init__(self) -> None:
        self.tokens: Counter[int] = Counter()
        self.rollouts: Counter[int] = Counter()

    def add(self, groups: Iterable[Group], version: int) -> int:
        """Count what is trained under a version: each token's age, and of each rollout the oldest token's.

        Returns: tokens.
        """
        tokens, rollouts = self.tokens, self.rollouts
        total = 0
        for group in groups:
            for rollout in group.rollouts:
                total += rollout.length
                age = version - rollout.version
                rollouts[age] += 1
                if rollout.newer_spans:
                    for made_under, num_tokens in rollout.spans:
                        tokens[version - made_under] += num_tokens
                else:
                    tokens[age] += rollout.length
        return total
