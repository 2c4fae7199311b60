"""Advantages: from rewards of a group to one number a rollout.

In: rewards by group. Out: advantages in the same order.
"""

import math
from collections.abc import Sequence

GROUP_STD_EPSILON = 1e-6
"""Keeps a group without variance at advantage 0."""


def group_normalized(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """(reward - group mean) / (group standard deviation + 1e-6), one a rollout.

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2 (outcome supervision). Differs: the standard deviation is the
    sample's (n - 1), as in TRL and verl; a group of one has deviation 0.

    >>> group_normalized([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1])
    [0.7071057811873782, -0.7071057811873782, 0.0, 0.0]
    """
    members: dict[int, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        members.setdefault(group, []).append(reward)
    statistics = {group: _mean_and_std(values) for group, values in members.items()}
    return [
        (reward - statistics[group][0]) / (statistics[group][1] + GROUP_STD_EPSILON)
        for reward, group in zip(rewards, groups, strict=True)
    ]


def _mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


ADVANTAGES = {"group_normalized": group_normalized}
