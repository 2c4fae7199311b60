"""Advantages: computes one advantage per token from a step's rewards, values and log-probs.

In: scored rollouts. Out: advantages, and returns for a value model, in the same order. Pure Python, because the driver
does not import torch. Left out: penalties that are part of the reward (rewards/total.py).
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
"""Added to a group's standard deviation. Source: verl, `compute_grpo_outcome_advantage`. Differs: TRL uses 1e-4."""
WHITENING_EPSILON = 1e-8
"""Added to the variance before whitening. Source: TRL 1.16, `masked_whiten`."""


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """Advantages of one rollout with C tokens that the policy chose."""

    advantages: tuple[float, ...]
    """Advantages of the tokens, [C]."""

    returns: tuple[float, ...] = ()
    """Targets of the value model, [C]; empty without one."""

    whole: float = 0.0
    """Advantage of the answer as one action; defined for an empty answer too."""


Advantage = Callable[[Sequence[Rollout], AlgorithmSpec], list[TokenAdvantages]]


def group_normalized(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """(reward - group mean) / (group standard deviation + 1e-6), one per rollout.

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2 (outcome supervision). Differs: the standard deviation is the
    sample's (n - 1), as in TRL and verl; a group of one has deviation 0.

    >>> group_normalized([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1])
    [0.7071057811879616, -0.7071057811879616, 0.0, 0.0]
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
    """The unchanged rewards, for offline data with labels."""
    return list(rewards)


def best_against_worst(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """1 for a group's best rollout, -1 for its worst, 0 for all others; the first one of equal rewards counts.

    A group with equal rewards gets only zeros.

    >>> best_against_worst([0.0, 1.0, 1.0, 2.0, 2.0], [0, 0, 0, 1, 1])
    [-1.0, 1.0, 0.0, 0.0, 0.0]
    """
    signs = [0.0] * len(rewards)
    for group in dict.fromkeys(groups):
        members = [index for index, other in enumerate(groups) if other == group]
        best, worst = max(members, key=lambda i: rewards[i]), min(members, key=lambda i: rewards[i])
        if rewards[best] > rewards[worst]:
            signs[best], signs[worst] = 1.0, -1.0
    return signs


def estimate_gae(
    rewards: Sequence[float], values: Sequence[float], gamma: float, gae_lambda: float
) -> tuple[list[float], list[float]]:
    """Generalized advantage estimation: (advantages, returns) of one rollout from each token's reward and value.

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
    """Discounted sum of rewards from each token on.

    >>> rewards_to_come([1.0, 0.0, 2.0], gamma=0.5)
    [1.5, 1.0, 2.0]
    """
    return list(accumulate(reversed(rewards), lambda later, reward: reward + gamma * later))[::-1]


def whiten_advantages(
    rollouts: Sequence[Sequence[float]], num_learned: Sequence[int] | None = None
) -> list[tuple[float, ...]]:
    """Subtract the mean over all tokens from every token's advantage, and divide by the standard deviation (n - 1).

    num_learned: number of leading tokens of each rollout that count for mean and deviation; None for all tokens.

    Source: Ouyang et al. 2022, arXiv:2203.02155, as TRL and verl do it.

    >>> whiten_advantages([[1.0], [2.0, 3.0]])
    [(-0.999999995,), (0.0, 0.999999995)]
    """
    counts = [len(values) for values in rollouts] if num_learned is None else num_learned
    counted = [value for values, count in zip(rollouts, counts, strict=True) for value in values[:count]]
    mean, std = _mean_and_std(counted or [0.0])
    scale = 1 / math.sqrt(std**2 + WHITENING_EPSILON)
    return [tuple((value - mean) * scale for value in values) for values in rollouts]


def token_rewards(rollout: Rollout, spec: AlgorithmSpec) -> list[float]:
    """Reward of each token: the rollout's reward on the last learned token, and 0 on the others.

    With `kl_in: reward`, kl_coef * KL is subtracted at each learned token. An environment's reward for an earlier turn
    is placed on that turn's last token.

    Source: Ouyang et al. 2022, arXiv:2203.02155, equation 2; Ziegler et al. 2019, arXiv:1909.08593.
    """
    rewards = [0.0] * len(rollout.completion.logprobs)
    if spec.has_kl_in_reward:
        policy = rollout.scores[Role.POLICY]  # the trainer's log-probs: the engine's differ, above all if it is stale
        reference = rollout.scores[Role.REFERENCE]
        rewards = [
            -spec.kl_coef * kl_estimate(own - other, spec.kl_estimator) if index < rollout.num_learned else 0.0
            for index, (own, other) in enumerate(zip(policy, reference, strict=True))
        ]
    if rewards:
        for num_chosen, value in rollout.turn_rewards:
            rewards[num_chosen - 1] += value
        last_reward = rollout.reward - math.fsum(value for _, value in rollout.turn_rewards)
        rewards[rollout.num_learned - 1] += last_reward  # index -1, the last token, if no token is learned from
    return rewards


def answer_reward(rollout: Rollout, spec: AlgorithmSpec) -> float:
    """Sum of all tokens' rewards. An empty answer has no tokens, so the rollout's reward is returned."""
    rewards = token_rewards(rollout, spec)
    return math.fsum(rewards) if rewards else rollout.reward


def kl_estimate(difference: Any, estimator: str, exp: Callable[[Any], Any] = math.exp) -> Any:
    """Estimate KL(policy || other) from tokens of the policy; works on numbers, or on tensors with torch's `exp`.

    With d = log p/q: k1: d; k2: d^2 / 2; k3: exp(-d) - 1 + d. k1 and k3 are unbiased. In expectation k2's gradient is
    that of the KL, k1's is 0, and k3's is that of KL(other || policy).
    Source: Schulman, "Approximating KL divergence", 2020.
    """
    if estimator == "k1":
        return difference
    return difference**2 / 2 if estimator == "k2" else exp(-difference) - 1 + difference


def _judge_whole_responses(judge: Callable[[Sequence[float], Sequence[int]], list[float]]) -> Advantage:
    """Build an advantage function that gives all tokens of a rollout one advantage, from its reward and group.

    Rollouts without a reward (`has_failed`) do not count in their group, and get advantage 0.
    """

    def compute(rollouts: Sequence[Rollout], spec: AlgorithmSpec) -> list[TokenAdvantages]:
        rewarded = [index for index, rollout in enumerate(rollouts) if not rollout.has_failed]
        rewards = [answer_reward(rollouts[index], spec) for index in rewarded]
        values = judge(rewards, [rollouts[index].group for index in rewarded])
        advantages = dict.fromkeys(range(len(rollouts)), 0.0) | dict(zip(rewarded, values, strict=True))
        return [
            TokenAdvantages((advantages[index],) * len(rollout.completion.logprobs), whole=advantages[index])
            for index, rollout in enumerate(rollouts)
        ]

    return compute


def _estimate_from_values(rollouts: Sequence[Rollout], spec: AlgorithmSpec) -> list[TokenAdvantages]:
    """Whitened generalized advantages (PPO), from `token_rewards` and the value model's predictions.

    A response ends with its last learned token, whose next value is 0.
    """
    pairs = []
    for rollout in rollouts:
        count, ignored = rollout.num_learned, (0.0,) * (len(rollout.completion.logprobs) - rollout.num_learned)
        rewards, values = token_rewards(rollout, spec)[:count], rollout.scores[Role.VALUE][:count]
        advantages, returns = estimate_gae(rewards, values, spec.gamma, spec.gae_lambda)
        pairs.append(((*advantages, *ignored), (*returns, *ignored)))
    white = whiten_advantages([advantages for advantages, _ in pairs], [r.num_learned for r in rollouts])
    return [TokenAdvantages(advantages, returns) for advantages, (_, returns) in zip(white, pairs, strict=True)]


def _batch_normalized(rollouts: Sequence[Rollout], spec: AlgorithmSpec) -> list[TokenAdvantages]:
    """Rewards-to-go of every token, whitened over all tokens of the batch.

    Source: Hu 2025, arXiv:2501.03262, equations 5 to 7.
    """
    returns = [rewards_to_come(token_rewards(rollout, spec), spec.gamma) for rollout in rollouts]
    return [TokenAdvantages(advantages) for advantages in whiten_advantages(returns, [r.num_learned for r in rollouts])]


def _group_centred_batch_normalized(rollouts: Sequence[Rollout], spec: AlgorithmSpec) -> list[TokenAdvantages]:
    """Group-centred rewards, assigned to every token of an answer and whitened over all tokens of the batch.

    Source: Hu 2025, arXiv:2501.03262, section 3.3.
    """
    centred = [judged.advantages for judged in _judge_whole_responses(group_centred)(rollouts, spec)]
    return [TokenAdvantages(advantages) for advantages in whiten_advantages(centred, [r.num_learned for r in rollouts])]


def _greedy_baseline(rollouts: Sequence[Rollout], spec: AlgorithmSpec) -> list[TokenAdvantages]:
    """Rewards-to-go of every token minus the reward of the prompt's greedy answer (ReMax).

    Source: Li et al. 2023, arXiv:2310.10505, equation 5. A KL penalty counts for its own and all earlier tokens, as in
    verl.
    """
    returns = [rewards_to_come(token_rewards(rollout, spec), 1.0) for rollout in rollouts]
    return [
        TokenAdvantages(tuple(value - rollout.baseline for value in values))
        for values, rollout in zip(returns, rollouts, strict=True)
    ]


def _collect_groups(rewards: Sequence[float], groups: Sequence[int]) -> dict[int, list[float]]:
    members: dict[int, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        members.setdefault(group, []).append(reward)
    return members


def _mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)  # exact sums do not depend on the order of rollouts
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
"""Advantage functions by their names in algorithm declarations."""
