"""Staleness: how far generation may be ahead of training, and how old the trained tokens are.

In: weight versions, and groups with the version of each token. Out: how many prompts may start; histograms.
Left out: the effect of staleness on learning.

A version is a weight sync to the engines: version v was trained on v batches. Optimizer steps inside a batch do not
count, so tokens of a synchronous step have staleness 0, however many mini-batches it has.
"""

import math
from collections import Counter
from collections.abc import Iterable

from rlplan.simulate.engine import Group


def num_allowed(version: int, max_staleness: float, num_prompts: int) -> int:
    """Most prompts that may have been started in total under a version.

    Counts: floor((version + 1 + max_staleness) x prompts of a batch).
    Source: AReaL's rule (Fu et al. 2025, equation 3) with the bound in batches. verl's fully asynchronous trainer
        (`staleness_threshold`) has the same rule: at a weight sync it counts queued and unfinished prompts, which are
        those started less version x batch, and starts at most (1 + threshold) x batch.
    Assumes: no prompt is dropped.

    >>> num_allowed(0, 0.0, 512), num_allowed(0, 0.5, 512), num_allowed(3, 0.5, 512)
    (512, 768, 2304)
    """
    # the tolerance absorbs rounding of fractional bounds
    return math.floor((version + 1 + max_staleness) * num_prompts + 1e-9)


def must_wait(begun_under: Iterable[int], version: int, max_staleness: float, num_prompts: int) -> bool:
    """Whether a step must wait for older groups, because the groups that it leaves out would become too old.

    Counts: of the groups left out, finished or not, the k-th oldest (from 0) is trained under version + 1 + k //
    num_prompts at the earliest. It is too old when that is over max_staleness versions after its start. Within
    `num_allowed`, training the oldest first never makes a group too old: earliest deadline first.
    begun_under: start versions of the groups left out. Source: own; published systems bound only the start of groups.
    Differs: a rule for the next step alone lets newer groups go first until older ones no longer fit.

    >>> must_wait([1, 2], 2, 1, 1), must_wait([2], 2, 1, 1), must_wait([2, 2], 2, 1, 1)
    (True, False, True)
    """
    return any(
        version + 1 + place // num_prompts - begun > max_staleness for place, begun in enumerate(sorted(begun_under))
    )


class StalenessCounts:
    """Staleness in versions at the moment of training."""

    def __init__(self) -> None:
        self.tokens: Counter[int] = Counter()
        self.rollouts: Counter[int] = Counter()

    def add(self, groups: Iterable[Group], version: int) -> int:
        """Count the staleness of all trained tokens, and for each rollout that of its oldest token.

        Returns: number of tokens.
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
