"""How a run is conducted: deadlines, rehearsal, checkpoints, loggers, and control experiments.

In: the keys `limits`, `preflight`, `checkpoints`, `early_stopping`, `metrics` and `controls` of a job. Out: frozen
Specs.
"""

from typing import Annotated, Literal

from pydantic import Field

from rlplan.spec.base import Auto, ByteCount, Spec
from rlplan.spec.parts.workload import MAX_COUNT
from rlplan.units import GIB

MAX_TIMEOUT_S = 7 * 24 * 3600.0
"""Longest timeout: a week. A longer wait for one action is a mistake."""


Mode = Literal["max", "min"]
"""Whether higher or lower values of a metric are better."""
Seconds = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)]


class LimitsSpec(Spec):
    """Timeouts, and how many failures a run tolerates. `auto` follows predicted times (planner/search.py,
    `add_deadlines`).
    """

    start_timeout_s: Seconds | Auto = "auto"
    """Seconds until a process must have started."""
    action_timeout_s: Seconds | Auto = "auto"
    """Seconds until any other action must have ended."""
    stall_timeout_s: Seconds = 120.0
    """Seconds without progress after which an engine counts as hung."""
    max_restarts: int = Field(default=2, ge=0, le=1000)
    """Limit on restarts of lost engines and scorers in a run."""
    num_reward_workers: int = Field(default=2, ge=1, le=256)
    """Processes that compute rewards in parallel."""
    max_failed_rewards: float = Field(default=0.1, ge=0, le=1)
    """Fraction of a step's rollouts whose reward may fail before the run fails."""
    accepts_oom_risk: bool = False
    """Whether to run a plan that fits only on average: at the high end of its memory interval it may run out of
    memory."""


class PreflightSpec(Spec):
    """Checks before step 1."""

    rehearses: bool = True
    """Whether to rehearse one micro-batch of the longest sequences, measure it, and restart from the same weights."""


class CheckpointsSpec(Spec):
    """Checkpoints from which a run can be resumed."""

    every: int = Field(default=0, ge=0, le=MAX_COUNT)
    """Interval of checkpoints in steps; 0: none."""
    keep_last: int = Field(default=2, ge=1, le=1000)
    """Number of most recent checkpoints that are kept."""
    exports_policy: bool = False
    """Whether each checkpoint also exports the policy in Hugging Face layout with a model card; all exports are
    kept."""
    best_metric: str | None = None
    """Metric whose best checkpoint is kept as well: an `evaluate/…` metric of the job, or reward/mean;
    of a job that learns from given answers policy/loss."""
    best_mode: Mode = "max"
    """Whether higher or lower values of best_metric are better."""
    writes: Literal["auto", "beside", "waiting"] = "auto"
    """When checkpoints are written. `beside`: from a copy of the trained states, while training continues. `waiting`:
    the trainer waits for the disk. `auto`: `beside`, except where phases time-share memory."""


class EarlyStoppingSpec(Spec):
    """Ends a run before `workload.num_steps` if a metric stops improving."""

    metric: str
    """Metric to watch: an `evaluate/…` metric of the job, or reward/mean; of a job that learns from given answers
    policy/loss."""
    mode: Mode = "max"
    """Whether higher or lower values of the metric are better."""
    patience: int = Field(default=3, ge=1, le=MAX_COUNT)
    """Consecutive values without improvement after which the run ends."""
    min_delta: float = Field(default=0.0, ge=0)
    """Smallest change that counts as an improvement."""


class MetricsSpec(Spec):
    """Destinations of metrics, and how many rollouts are kept."""

    sinks: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...] = ()
    """Loggers that receive metrics in addition to the run folder's files. A logger that fails never stops a run."""
    is_online: bool = False
    """Whether wandb sends metrics to its server during the run; otherwise it only writes into the run folder. mlflow
    always sends them."""
    project: Annotated[str, Field(pattern=r"^[\w .-]+$", max_length=128)] = "rlplan"
    """Project of wandb and trackio, and experiment of mlflow."""
    entity: Annotated[str, Field(pattern=r"^[\w.-]+$", max_length=64)] | None = None
    """Team or user of wandb that owns the run; null: the default of the account."""
    run_name: Annotated[str, Field(pattern=r"^[\w .:-]+$", max_length=128)] | None = None
    """Name of the run in loggers; null: the job's name."""
    sink_timeout_s: Seconds = 60.0
    """Seconds that a logger's server gets to answer, and to take the last metrics after the run."""
    max_rollout_bytes: ByteCount = 10 * GIB
    """Bytes of `rollouts/` in the run folder, above which the oldest steps are deleted; 0 keeps no rollouts."""
    max_rollouts_per_step: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Rollouts that are kept of each step, the first ones; null keeps all."""


class ControlsSpec(Spec):
    """Control experiments that must not learn, or must show an error, to prove that the real run's result is no
    accident.
    """

    shuffle_rewards: bool = False
    """Whether each rollout gets the reward of another one."""
    skip_sync_after_step: int | None = Field(default=None, ge=1)
    """Step whose weight sync is skipped."""
    forces_lengths: bool = False
    """Whether every rollout has a length drawn from workload.response_lengths. Tokens after the policy's own end of
    sequence are computed but not trained on."""
