"""A rollout's total reward: rule-based rewards, the environment's reward, the reward model and the length penalty.

In: rollouts with their scores. Out: their `reward`, written in place.
"""

import random
from collections.abc import Sequence

from rlplan.runtime.rewards.verdict import RewardFailure, check_number
from rlplan.runtime.rollout.experience import Rollout
from rlplan.spec.parts.rewards import ENVIRONMENT
from rlplan.spec.resolved import ResolvedJob
from rlplan.vocabulary import Role

REWARD_MODEL = "reward_model"
"""Name of the reward model's score among a rollout's rewards."""
NO_REWARD = "the agent reported no reward, and the job has none: return one, or post it to /v1/reward"
OVERLONG = "overlong"
"""Name of the penalty for long responses among a rollout's rewards."""


def compute_overlong_penalty(rollout: Rollout, job: ResolvedJob) -> float:
    """Length penalty: 0 up to max_response_len - overlong_buffer tokens, then linear to -overlong_penalty.

    Source: DAPO, Yu et al. 2025, arXiv:2503.14476, equation 13 (there a penalty of 1).
    """
    buffer, length = job.algorithm.overlong_buffer, len(rollout.completion.tokens)
    begins = job.workload.max_response_len - buffer
    return -job.algorithm.overlong_penalty * min(1.0, max(0.0, (length - begins) / buffer))


def add_environment(rollouts: Sequence[Rollout], job: ResolvedJob) -> None:
    """Add the environment's reward to each rollout. A rollout on which the environment failed is marked as failed."""
    environment = job.rollout.environment
    for rollout in rollouts if job.has_turns else ():
        reports = environment.agent is None or rollout.completion.reward is not None
        if environment.has_environment and reports:
            rollout.rewards[ENVIRONMENT] = rollout.completion.reward or 0.0
            rollout.reward += environment.weight * rollout.rewards[ENVIRONMENT]
            rollout.turn_rewards = tuple(
                (at, environment.weight * value) for at, value in rollout.completion.turn_rewards
            )
        is_judged = reports or job.rewards or Role.REWARD in job.scored_roles
        if failure := rollout.completion.failure or ("" if is_judged else NO_REWARD):
            rollout.has_failed, rollout.num_ignored = True, len(rollout.completion.logprobs)
            rollout.failure = rollout.failure or failure


def _add_score(rollout: Rollout, job: ResolvedJob) -> bool:
    """Add the reward model's score; whether it was a finite number."""
    try:
        rollout.rewards[REWARD_MODEL] = check_number(rollout.scores[Role.REWARD][0])
    except RewardFailure as error:
        rollout.has_failed, rollout.failure, rollout.reward = True, f"{REWARD_MODEL}: {error.reason}", 0.0
        return False
    rollout.reward += job.roles.reward.weight * rollout.rewards[REWARD_MODEL]
    return True


def finish_rewards(
    rollouts: Sequence[Rollout], baselines: Sequence[Rollout], job: ResolvedJob, step: int
) -> list[Rollout]:
    """Add the environment's reward, the reward model's score and the length penalty, then set the baselines.

    The control `shuffle_rewards` permutes the rewards. Returns: rollouts that failed here for another reason than their
    environment.
    """
    add_environment((*rollouts, *baselines), job)
    had_failed = {id(rollout) for rollout in (*rollouts, *baselines) if rollout.has_failed}
    for rollout in (*rollouts, *baselines):
        if rollout.has_failed:
            continue
        if Role.REWARD in job.scored_roles and not _add_score(rollout, job):
            continue
        if job.algorithm.overlong_buffer:
            rollout.rewards[OVERLONG] = compute_overlong_penalty(rollout, job)
            rollout.reward += rollout.rewards[OVERLONG]
    by_group = {rollout.group: rollout for rollout in baselines}
    for rollout in rollouts:
        baseline = by_group.get(rollout.group)
        rollout.baseline = 0.0 if baseline is None else baseline.reward
        if baseline is not None and baseline.has_failed:
            rollout.has_failed, rollout.failure = True, rollout.failure or "its baseline has no reward"
    if job.controls.shuffle_rewards:
        judged = [rollout for rollout in rollouts if not rollout.has_failed]
        rewards = [rollout.reward for rollout in judged]
        random.Random(f"{job.seed}/shuffle/{step}").shuffle(rewards)
        for rollout, reward in zip(judged, rewards, strict=True):
            rollout.reward, rollout.turn_rewards = reward, ()
    return [rollout for rollout in (*rollouts, *baselines) if rollout.has_failed and id(rollout) not in had_failed]
