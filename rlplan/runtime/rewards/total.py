"""A rollout's reward once everybody has judged it: rules, and a reward model beside them.

In: rollouts with their scores. Out: their `reward`, in place.
"""

import random
from collections.abc import Sequence

from rlplan.runtime.experience import Rollout
from rlplan.spec.job import JobSpec
from rlplan.vocabulary import Role

REWARD_MODEL = "reward_model"
"""The name of a learned reward among a rollout's rewards."""


def finish_rewards(rollouts: Sequence[Rollout], job: JobSpec, step: int) -> None:
    """Add what the reward model said; deal the rewards out anew where the job's controls say so."""
    if Role.REWARD in job.scored_roles:
        for rollout in rollouts:
            if rollout.failure:
                continue
            rollout.rewards[REWARD_MODEL] = rollout.scores[Role.REWARD][0]
            rollout.reward += job.roles.reward.weight * rollout.rewards[REWARD_MODEL]
    if job.controls.shuffle_rewards:
        rollouts = [rollout for rollout in rollouts if not rollout.failure]
        rewards = [rollout.reward for rollout in rollouts]
        random.Random(f"{job.seed}/shuffle/{step}").shuffle(rewards)
        for rollout, reward in zip(rollouts, rewards, strict=True):
            rollout.reward = reward
