"""A rollout's reward once everybody has judged it: rules, and a reward model beside them.

In: rollouts with their scores. Out: their `reward`, in place.
"""

import random
from collections.abc import Sequence

from rlplan.runtime.experience import Rollout
from rlplan.spec.job import JobSpec
from rlplan.vocabulary import Role

ENVIRONMENT = "environment"
"""The name of what the environment gives a rollout, among its rewards."""

REWARD_MODEL = "reward_model"
"""The name of a learned reward among a rollout's rewards."""


def add_environment(rollouts: Sequence[Rollout], job: JobSpec) -> None:
    """What the environment gave each rollout. One of which it has said nothing has failed, and its rules count not."""
    for rollout in rollouts if job.has_turns else ():
        rollout.rewards[ENVIRONMENT] = rollout.completion.reward or 0.0
        rollout.reward += job.rollout.environment.weight * rollout.rewards[ENVIRONMENT]
        if rollout.completion.failure:
            rollout.has_failed, rollout.num_ignored = True, len(rollout.completion.logprobs)


def finish_rewards(rollouts: Sequence[Rollout], job: JobSpec, step: int) -> None:
    """Add what environment and reward model said; deal the rewards out anew where the job's controls say so."""
    add_environment(rollouts, job)
    if Role.REWARD in job.scored_roles:
        for rollout in rollouts:
            rollout.rewards[REWARD_MODEL] = rollout.scores[Role.REWARD][0]
            rollout.reward += job.roles.reward.weight * rollout.rewards[REWARD_MODEL]
    if job.controls.shuffle_rewards:
        rewards = [rollout.reward for rollout in rollouts]
        random.Random(f"{job.seed}/shuffle/{step}").shuffle(rewards)
        for rollout, reward in zip(rollouts, rewards, strict=True):
            rollout.reward = reward
