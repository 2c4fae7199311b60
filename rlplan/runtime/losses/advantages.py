"""Advantages: from rewards, values and log-probs of a step to one advantage a token.

In: scored rollouts. Out: advantages, and returns for a value model, in the same order.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlplan.runtime.experience import Rollout
from rlplan.spec.algorithm import AlgorithmSpec
from rlplan.vocabulary import Role

GROUP_STD_EPSILON = 1e-6
"""Keeps a group without variance at advantage 0."""
WHITENING_EPSILON = 1e-8
"""Added to the variance. Source: TRL 1.16, `masked_whiten`."""


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """Of one rollout, one a response token. returns: empty without a value model."""

    advantages: tuple[float, ...]
    returns: tuple[float, ...] = ()


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


def generalized(
    rewards: Sequence[float], values: Sequence[float], gamma: float, gae_lambda: float
) -> tuple[list[float], list[float]]:
    """(advantages, returns) of one rollout from a reward and a value for each of its tokens.

    A_t = d_t + gamma * lambda * A_(t+1), d_t = r_t + gamma * V_(t+1) - V_t, return_t = A_t + V_t; nothing comes after
    the last token. Source: Schulman et al. 2016, arXiv:1506.02438, equations 11 and 16.

    >>> generalized([0.0, 1.0], [0.5, 0.25], gamma=1.0, gae_lambda=0.5)  # d = -0.25, 0.75
    ([0.125, 0.75], [0.625, 1.0])
    """
    advantages: list[float] = []
    later, next_value = 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        later = reward + gamma * next_value - value + gamma * gae_lambda * later
        next_value = value
        advantages.append(later)
    advantages.reverse()
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


def whitened(rollouts: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
    """Every token's advantage less the mean over all tokens, over the standard deviation (n - 1).

    Source: Ouyang et al. 2022, arXiv:2203.02155, as TRL and verl do it.

    >>> whitened([[1.0], [2.0, 3.0]])
    [(-0.999999995,), (0.0, 0.999999995)]
    """
    mean, std = _mean_and_std([value for values in rollouts for value in values] or [0.0])
    scale = 1 / math.sqrt(std**2 + WHITENING_EPSILON)
    return [tuple((value - mean) * scale for value in values) for values in rollouts]


def _by_group(rollouts: Sequence[Rollout], spec: AlgorithmSpec) -> list[TokenAdvantages]:
    """One advantage for all tokens of a rollout. One without a reward is no part of its group, and has 0."""
    there = [rollout for rollout in rollouts if not rollout.has_failed]
    each = iter(group_normalized([rollout.reward for rollout in there], [rollout.group for rollout in there]))
    return [
        TokenAdvantages((0.0 if rollout.has_failed else next(each),) * len(rollout.completion.logprobs))
        for rollout in rollouts
    ]


def _by_value(rollouts: Sequence[Rollout], spec: AlgorithmSpec) -> list[TokenAdvantages]:
    """Generalized advantages, whitened. The reward comes with the last token; a KL estimate is taken off every one."""
    pairs = [
        generalized(_token_rewards(rollout, spec), rollout.scores[Role.VALUE], spec.gamma, spec.gae_lambda)
        for rollout in rollouts
    ]
    advantages = whitened([advantages for advantages, _ in pairs])
    return [TokenAdvantages(white, tuple(returns)) for white, (_, returns) in zip(advantages, pairs, strict=True)]


def _token_rewards(rollout: Rollout, spec: AlgorithmSpec) -> list[float]:
    """-kl_coef * (log-prob - reference log-prob) of every token, and the reward on the last one.

    Source: Ouyang et al. 2022, arXiv:2203.02155, equation 2; Ziegler et al. 2019, arXiv:1909.08593.
    """
    logprobs = rollout.completion.logprobs
    reference = rollout.scores.get(Role.REFERENCE, logprobs)
    rewards = [-spec.kl_coef * (mine - other) for mine, other in zip(logprobs, reference, strict=True)]
    if rewards:
        rewards[-1] += rollout.reward
    return rewards


def _mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


ADVANTAGES: dict[str, Callable[[Sequence[Rollout], AlgorithmSpec], list[TokenAdvantages]]] = {
    "group_normalized": _by_group,
    "generalized": _by_value,
}
"""How rollouts become advantages, by the name that an algorithm's declaration gives."""
