"""How a run is conducted: deadlines, the rehearsal, checkpoints, loggers, and experiments that must not learn.

In: the keys `limits`, `preflight`, `checkpoints`, `metrics` and `controls` of a job file. Out: frozen Specs.
"""

from typing import Annotated, Literal

from pydantic import Field

from rlplan.spec.base import Auto, Spec
from rlplan.spec.parts.workload import MAX_COUNT

MAX_TIMEOUT_S = 7 * 24 * 3600.0
"""A week: a longer wait for one action is a mistake."""


Mode = Literal["max", "min"]
"""Which values of a metric are better."""
Seconds = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)]


class LimitsSpec(Spec):
    """Deadlines, and how much may fail. `auto` follows the plan's seconds (planner/search.py, `with_deadlines`)."""

    start_timeout_s: Seconds | Auto = "auto"
    """For a process to come up."""
    action_timeout_s: Seconds | Auto = "auto"
    """For any other action."""
    stall_timeout_s: Seconds = 120.0
    """An engine that makes no progress for so long counts as hung."""
    max_restarts: int = Field(default=2, ge=0, le=1000)
    """How often a lost engine or scorer is restarted in a run."""
    num_reward_workers: int = Field(default=2, ge=1, le=256)
    """Responses judged at the same time."""
    max_failed_rewards: float = Field(default=0.1, ge=0, le=1)
    """Share of a step's rollouts that may stay without a reward before the run fails."""
    accepts_oom_risk: bool = False
    """A plan that fits in expectation only is accepted: it may run out of memory at the high end of its interval."""


class PreflightSpec(Spec):
    """Before step 1."""

    rehearses: bool = True
    """Train on one micro-batch of the longest sequences, measure it, and start over from the same weights."""


class CheckpointsSpec(Spec):
    """What a run can be resumed from."""

    every: int = Field(default=0, ge=0, le=MAX_COUNT)
    """In steps; 0 keeps none."""
    keep_last: int = Field(default=2, ge=1, le=1000)
    """Checkpoints that stay."""
    exports_policy: bool = False
    """Each time the policy is also written in Hugging Face layout, with a model card; all of these stay."""
    best_metric: str | None = None
    """One of the job's `evaluate/…`, or reward/mean: the checkpoint with its best value stays beside them."""
    best_mode: Mode = "max"
    writes: Literal["auto", "beside", "waiting"] = "auto"
    """`beside` copies the trained states and writes the copy while training goes on; with `waiting` the trainer waits
    for the disk. `auto` is `beside` unless phases time-share memory."""


class EarlyStoppingSpec(Spec):
    """A run that ends before `workload.num_steps`, where a metric gets no better."""

    metric: str
    """One of the job's `evaluate/…`, or reward/mean."""
    mode: Mode = "max"
    patience: int = Field(default=3, ge=1, le=MAX_COUNT)
    """Values in a row that are no better than the best before them."""
    min_delta: float = Field(default=0.0, ge=0)
    """What is not better by more than this is no better."""


class MetricsSpec(Spec):
    """Where metrics go."""

    sinks: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Loggers that get them beside the run folder's own files; a dead one never stops a run."""


class ControlsSpec(Spec):
    """Experiments that must not learn, or must show an error: they prove that the real run does neither by chance."""

    shuffle_rewards: bool = False
    """Each rollout gets another one's reward."""
    skip_sync_after_step: int | None = Field(default=None, ge=1)
    """That step's weight sync is left out."""
    forces_lengths: bool = False
    """Every rollout gets a length drawn from workload.response_lengths, whatever the policy says; what it says after
    its end of sequence is computed but not trained on."""
