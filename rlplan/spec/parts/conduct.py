"""How a run is conducted: deadlines, the rehearsal, checkpoints, loggers, and experiments that must not learn.

In: the keys `limits`, `preflight`, `checkpoints`, `metrics` and `controls` of a job file. Out: frozen Specs.
"""

from typing import Literal

from pydantic import Field

from rlplan.spec.base import Spec
from rlplan.spec.parts.workload import MAX_COUNT

MAX_TIMEOUT_S = 7 * 24 * 3600.0
"""A week: a longer wait for one action is a mistake."""


class LimitsSpec(Spec):
    """Deadlines. start_timeout_s: for a process to come up; action_timeout_s: for any other action.

    stall_timeout_s: an engine that makes no progress for so long hangs. max_restarts: how often a lost engine or scorer
    is restarted in a run. num_reward_workers: responses judged at the same time. max_failed_rewards: share of a
    step's rollouts that may stay without a reward before the run fails.
    """

    start_timeout_s: float = Field(default=300.0, gt=0, le=MAX_TIMEOUT_S)
    action_timeout_s: float = Field(default=600.0, gt=0, le=MAX_TIMEOUT_S)
    stall_timeout_s: float = Field(default=120.0, gt=0, le=MAX_TIMEOUT_S)
    max_restarts: int = Field(default=2, ge=0, le=1000)
    num_reward_workers: int = Field(default=2, ge=1, le=256)
    max_failed_rewards: float = Field(default=0.1, ge=0, le=1)


class PreflightSpec(Spec):
    """Before step 1. rehearses: train on one micro-batch of the longest sequences, measure it, and begin anew."""

    rehearses: bool = True


class CheckpointsSpec(Spec):
    """What a run goes on from after its end. every: so many steps; 0 keeps none. keep_last: checkpoints that stay.

    writes: `beside` copies the trained states and writes the copy beside what comes next, `waiting` writes them as they
    lie, and the trainer waits for the disk. `auto` is `beside` unless phases time-share memory.
    """

    every: int = Field(default=0, ge=0, le=MAX_COUNT)
    keep_last: int = Field(default=2, ge=1, le=1000)
    writes: Literal["auto", "beside", "waiting"] = "auto"


class MetricsSpec(Spec):
    """sinks: loggers that get the metrics beside the run folder's own files; a dead one never stops a run."""

    sinks: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()


class ControlsSpec(Spec):
    """Experiments that must not learn, or must show an error: they prove that the real run does neither by chance.

    shuffle_rewards: hand each rollout another one's reward. skip_sync_after_step: leave out that step's weight sync.
    forces_lengths: every rollout gets a length drawn from workload.response_lengths, whatever the policy says; what it
    says after its end of sequence is computed but not trained on.
    """

    shuffle_rewards: bool = False
    skip_sync_after_step: int | None = Field(default=None, ge=1)
    forces_lengths: bool = False
