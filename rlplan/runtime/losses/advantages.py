"""Advantages: from rewards, values and log-probs of a step to one advantage a token.

In: scored rollouts. Out: advantages, and returns for a value model, in the same order. Pure Python: the driver has no
torch. Left out: penalties that belong to the reward (rewards/total.py).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rlplan.runtime.rollout.experience import Rollout
from rlplan.spec.parts.algorithm import AlgorithmSpec
from rlplan.vocabulary import Role

GROUP_STD_EPSILON = 1e-6
"""Keeps a group without variance at advantage 0. Source: verl, `compute_grpo_outcome_advantage`. Differs: TRL 1e-4."""
WHITENING_EPSILON = 1e-8
"""Added to the variance. Source: TRL 1.16, `masked_whiten`."""


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """Advantages of one rollout with C tokens that the policy chose."""

    advantages: tuple[float, ...]
    """[C]."""

    returns: tuple[float, ...] = ()
    """[C]; empty without a value model."""

    whole: float = 0.0
    """Of the answer as one action. An empty answer has one too, though it has no token."""


Advantage = Callable[[Sequence[Rollout], AlgorithmSpec], list[TokenAdvantages]]


def group_normalized(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """(reward - group mean) / (group standard deviation + 1e-6), one a rollout.

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2 (outcome supervision). Differs: the standard deviation is the
    sample's (n - 1), as in TRL and verl; a group of one has deviation 0.

    >>> group_normalized([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1])
    [0.7071057811873782, -0.7071057811873782, 0.0, 0.0]
    """
    spread = {group: _mean_and_std(values)[1] for group, values in _collect_groups(rewards, groups).items()}
    centred = group_centred(rewards, groups)
    return [value / (spread[group] + GROUP_STD_EPSILON) for value, group in zip(centred, groups, strict=True)]


def group_centred(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """reward - group mean. Source: Dr.GRPO, Liu et al. 2025, arXiv:2503.20783, section 3.2.

    >>> group_centred([1.0, 0.0, 5.0], [0, 0, 1])
    [0.5, -0.5, 0.0]
    """
    means = {group: _mean_and_std(values)[0] for group, values in _collect_groups(rewards, groups).items()}
    return [reward - means[group] for reward, group in zip(rewards, groups, strict=True)]


def leave_one_out(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """reward - mean reward of the group's others; 0 for a group of one.

    Source: Ahmadian et al. 2024, arXiv:2402.14740, equation 8. It is n / (n - 1) times the centred reward.

    >>> leave_one_out([1.0, 0.0, 0.0], [0, 0, 0])
    [1.0, -0.5, -0.5]
    """
    sizes = {group: len(values) for group, values in _collect_groups(rewards, groups).items()}
    centred = group_centred(rewards, groups)
    factors = {group: size / (size - 1) if size > 1 else 0.0 for group, size in sizes.items()}
    return [value * factors[group] for value, group in zip(centred, groups, strict=True)]


def reward_itself(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """The reward as it is: of a given answer what the data say of it."""
    return list(rewards)


def best_against_worst(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """1 for a group's best rollout, -1 for its worst, 0 for the others and where all are alike; the first of equals.

    >>> best_against_worst([0.0, 1.0, 1.0, 2.0, 2.0], [0, 0, 0, 1, 1])
    [-1.0, 1.0, 0.0, 0.0, 0.0]
    """
    signs = [0.0] * len(rewards)
    for group in dict.fromkeys(groups):
        mine = [index for index, other in enumerate(groups) if other == group]
        best, worst = max(mine, key=lambda i: rewards[i]), min(mine, key=lambda i: rewards[i])
        if rewards[best] > rewards[worst]:
            signs[best], signs[worst] = 1.0, -1.0
    return signs


def estimate_gae(
    rewards: Sequence[float], values: Sequence[float], gamma: float, gae_lambda: float
) -> tuple[list[float], list[float]]:
    """(advantages, returns) of one rollout from a reward and a value for each of its tokens.

    A_t = d_t + gamma * lambda * A_(t+1), d_t = r_t + gamma * V_(t+1) - V_t, return_t = A_t + V_t; nothing comes after
    the last token. Source: Schulman et al. 2016, arXiv:1506.02438, equations 11 and 16.

    >>> estimate_gae([0.0, 1.0], [0.5, 0.25], gamma=1.0, gae_lambda=0.5)  # d = -0.25, 0.75
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


def rewards_to_come(rewards: Sequence[float], gamma: float) -> list[float]:
    """Of each token its own reward and gamma times what comes after it.

    >>> rewards_to_come([1.0, 0.0, 2.0], gamma=0.5)
    [1.5, 1.0, 2.0]
    """
    return list(accumulate(reversed(rewards), lambda later, reward: reward + gamma * later))[::-1]


def whiten(rollouts: Sequence[Sequence[float]], num_learned: Sequence[int] | None = None) -> list[tuple[float, ...]]:
    """Every token's advantage less the mean over all tokens, over the standard deviation (n - 1).

    num_learned: so many first tokens of each rollout count for mean and deviation; all where it is not given.

    Source: Ouyang et al. 2022, arXiv:2203.02155, as TRL and verl do it.

    >>> whiten([[1.0], [2.0, 3.0]])
    [(-0.999999995,), (0.0, 0.999999995)]
    """
    counts = [len(values) for values in rollouts] if num_learned is None else num_learned
    counted = [value for values, count in zip(rollouts, counts, strict=True) for value in values[:count]]
    mean, std = _mean_and_std(counted or [0.0])
    scale = 1 / math.sqrt(std**2 + WHITENING_EPSILON)
    return [tuple((value - mean) * scale for value in values) for values in rollouts]


def token_rewards(rollout: Rollout, spec: AlgorithmSpec) -> list[float]:
    """The reward on the last token that is learned from, less kl_coef * KL of each one where that is in the rewards.
    What an environment gave for an earlier turn stands on that turn's last token.

    Source: Ouyang et al. 2022, arXiv:2203.02155, equation 2; Ziegler et al. 2019, arXiv:1909.08593.
    """
    rewards = [0.0] * len(rollout.completion.logprobs)
    if spec.has_kl_in_reward:
        policy = rollout.scores[Role.POLICY]  # the trainer's own: the engine's differ, most of all where it is stale
        reference = rollout.scores[Role.REFERENCE]
        rewards = [
            -spec.kl_coef * kl_estimate(own - other, spec.kl_estimator) if index < rollout.num_learned else 0.0
            for index, (own, other) in enumerate(zip(policy, reference, strict=True))
        ]
    if rewards:
        for num_chosen, value in rollout.turn_rewards:
            rewards[num_chosen - 1] += value
        rest = rollout.reward - math.fsum(value for _, value in rollout.turn_rewards)
        rewards[rollout.num_learned - 1] += rest  # the last one where none is
    return rewards


def answer_reward(rollout: Rollout, spec: AlgorithmSpec) -> float:
    """The rewards of all tokens together: of an empty answer its reward alone."""
    rewards = token_rewards(rollout, spec)
    return math.fsum(rewards) if rewards else rollout.reward


def kl_estimate(difference: Any, estimator: str, exp: Callable[[Any], Any] = math.exp) -> Any:
    """Of KL(policy || other), from the policy's tokens: numbers, or tensors with their `exp`. d = log p/q.

    k1: d; k2: d^2 / 2; k3: exp(-d) - 1 + d. k1 and k3 are unbiased; k2's gradient is the KL's own in expectation, k1's
    is 0, k3's that of KL(other || policy). Source: Schulman, "Approximating KL divergence", 2020.
    """
    if estimator == "k1":
        return difference
    return difference**2 / 2 if estimator == "k2" else exp(-difference) - 1 + difference


def _judge_whole_responses(judge: Callable[[Sequence[float], Sequence[int]], list[float]]) -> Advantage:
    """One advantage for all tokens of a rollout, from its whole reward and its group.

    A rollout without a reward (`has_failed`) is no part of its group, and has advantage 0.
    """

    def advantage(rollouts: Sequence[Rollout], spec: AlgorithmSpec) -> list[TokenAdvantages]:
        there = [index for index, rollout in enumerate(rollouts) if not rollout.has_failed]
        rewards = [answer_reward(rollouts[index], spec) for index in there]
        each = dict(zip(there, judge(rewards, [rollouts[index].group for index in there]), strict=True))
        return [
            TokenAdvantages((each.get(index, 0.0),) * len(rollout.completion.logprobs), whole=each.get(index, 0.0))
            for index, rollout in enumerate(rollouts)
        ]

    return advantage


def _estimate_from_values(rollouts: Sequence[Rollout], spec: AlgorithmSpec) -> list[TokenAdvantages]:
    """Generalized advantages, whitened. The reward comes with the last token; a KL estimate is taken off every one.

    A response ends with the last token that is learned from: nothing comes after it.
    """
    pairs = []
    for rollout in rollouts:
        count, ignored = rollout.num_learned, (0.0,) * (len(rollout.completion.logprobs) - rollout.num_learned)
        rewards, values = token_rewards(rollout, spec)[:count], rollout.scores[Role.VALUE][:count]
        advantages, returns = estimate_gae(rewards, values, spec.gamma, spec.gae_lambda)
        pairs.append(((*advantages, *ignored), (*returns, *ignored)))
    white = whiten([advantages for advantages, _ in pairs], [r.num_learned for r in rollouts])
    return [TokenAdvantages(each, returns) for each, (_, returns) in zip(white, pairs, strict=True)]


def _batch_normalized(rollouts: Sequence[Rollout], spec: AlgorithmSpec) -> list[TokenAdvantages]:
    """Rewards to come of every token, normalized over all tokens of the batch.

    Source: Hu 2025, arXiv:2501.03262, equations 5 to 7.
    """
    returns = [rewards_to_come(token_rewards(rollout, spec), spec.gamma) for rollout in rollouts]
    return [TokenAdvantages(advantages) for advantages in whiten(returns, [r.num_learned for r in rollouts])]


def _group_centred_batch_normalized(rollouts: Sequence[Rollout], spec: AlgorithmSpec) -> list[TokenAdvantages]:
    """Rewards less their group's mean, normalized over all tokens of the batch, each of which has its answer's.

    Source: Hu 2025, arXiv:2501.03262, section 3.3.
    """
    centred = [judged.advantages for judged in _judge_whole_responses(group_centred)(rollouts, spec)]
    return [TokenAdvantages(advantages) for advantages in whiten(centred, [r.num_learned for r in rollouts])]


def _greedy_baseline(rollouts: Sequence[Rollout], spec: AlgorithmSpec) -> list[TokenAdvantages]:
    """Rewards to come of every token less the reward of the prompt's greedy answer.

    Source: Li et al. 2023, arXiv:2310.10505, equation 5; a KL estimate counts for the tokens before it, as in verl.
    """
    each = [rewards_to_come(token_rewards(rollout, spec), 1.0) for rollout in rollouts]
    return [
        TokenAdvantages(tuple(value - rollout.baseline for value in values))
        for values, rollout in zip(each, rollouts, strict=True)
    ]


def _collect_groups(rewards: Sequence[float], groups: Sequence[int]) -> dict[int, list[float]]:
    members: dict[int, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        members.setdefault(group, []).append(reward)
    return members


def _mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


ADVANTAGES: dict[str, Advantage] = {
    "group_normalized": _judge_whole_responses(group_normalized),
    "group_centred": _judge_whole_responses(group_centred),
    "leave_one_out": _judge_whole_responses(leave_one_out),
    "reward": _judge_whole_responses(reward_itself),
    "best_against_worst": _judge_whole_responses(best_against_worst),
    "batch_normalized": _batch_normalized,
    "group_centred_batch_normalized": _group_centred_batch_normalized,
    "greedy_baseline": _greedy_baseline,
    "generalized": _estimate_from_values,
}
"""How rollouts become advantages, by the name that an algorithm's declaration gives."""
