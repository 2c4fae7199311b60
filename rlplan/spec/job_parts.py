"""The parts of a job, each a Spec: the top-level keys of a job file.

In: the keys of a job file. Out: frozen fields. Left out: whether the parts agree (job.py), roles (job_roles.py).
"""

from typing import Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from rlplan.frameworks.profile import UnknownFrameworkError, find_release
from rlplan.spec.base import Spec
from rlplan.spec.models.reading import MAX_POSITIONS
from rlplan.spec.parts.algorithm import AlgorithmSpec
from rlplan.spec.parts.conduct import (
    CheckpointsSpec,
    ControlsSpec,
    EarlyStoppingSpec,
    LimitsSpec,
    MetricsSpec,
    PreflightSpec,
)
from rlplan.spec.parts.data import DataSpec
from rlplan.spec.parts.placement import HardwareSpec, PlacementSpec
from rlplan.spec.parts.rewards import RewardSpec
from rlplan.spec.parts.roles import RolesSpec
from rlplan.spec.parts.rollout import RolloutSpec
from rlplan.spec.parts.scoring import ScoringSpec
from rlplan.spec.parts.training import TrainingSpec
from rlplan.spec.parts.workload import WorkloadSpec

Objective = Literal["step_time", "tokens_per_s", "cost", "gpus"]
JOB_SCHEMA_VERSION: Literal[2] = 2


class PolicySpec(Spec):
    """The model to train."""

    path: str = Field(min_length=1)
    """Hugging Face folder, config.json, or id of a bundled model."""
    config: dict[str, Any] | None = None
    """Contents of config.json, for a model that is in no file or for a model with fewer layers. `path` is then only a
    name, and the job can be planned but not run."""
    init: Literal["checkpoint", "random"] = "checkpoint"
    """Start weights: `checkpoint` reads safetensors; `random` needs only the config and draws weights from the seed."""
    max_position_embeddings: int | None = Field(default=None, ge=1, le=MAX_POSITIONS)
    """Maximum sequence length in tokens, if it overrides that of config.json."""


class JobParts(Spec):
    """The keys of a job. Data and rewards are needed to run it, not to plan it."""

    schema_version: Literal[2] = JOB_SCHEMA_VERSION
    """Version of the job format."""
    name: str = Field(default="job", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    """Name of the job and of its run folder."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Random seed."""
    policy: PolicySpec
    """The model to train."""
    hardware: HardwareSpec
    """GPUs or CPU host of the job."""
    algorithm: AlgorithmSpec = AlgorithmSpec.create_default()
    """Training algorithm and its hyperparameters."""
    framework: str = Field(default="auto", min_length=1, max_length=40)
    """Framework that runs the job, optionally with its release: `rlplan`, `verl@0.9` (rlplan/frameworks). It determines
    the passes of a step and their memory. `auto`: rlplan's own runtime if it can run the models with training.backend,
    else verl, or the first of the others that knows the algorithm."""
    objective: Objective = "step_time"
    """Quantity that the planner minimizes on GPUs; tokens_per_s is maximized."""
    workload: WorkloadSpec = WorkloadSpec.create_default()
    """Batch sizes and lengths."""
    training: TrainingSpec = TrainingSpec.create_default()
    """Trainer settings."""
    rollout: RolloutSpec = RolloutSpec.create_default()
    """Rollout engine settings."""
    scoring: ScoringSpec = ScoringSpec.create_default()
    """Micro-batch sizes of scoring passes."""
    placement: PlacementSpec = PlacementSpec.create_default()
    """Device sharing and weight synchronization."""
    roles: RolesSpec = RolesSpec.create_default()
    """Reference, reward, value and teacher models."""
    data: DataSpec | None = None
    """Data sets to train and evaluate on."""
    rewards: tuple[RewardSpec, ...] = ()
    """Rule-based rewards."""
    limits: LimitsSpec = LimitsSpec.create_default()
    """Timeouts and tolerated failures."""
    preflight: PreflightSpec = PreflightSpec.create_default()
    """Checks before step 1."""
    checkpoints: CheckpointsSpec = CheckpointsSpec.create_default()
    """Checkpoints and exports."""
    early_stopping: EarlyStoppingSpec | None = None
    """Early stopping; None: the run makes all its steps."""
    metrics: MetricsSpec = MetricsSpec.create_default()
    """Destinations of metrics."""
    controls: ControlsSpec = ControlsSpec.create_default()
    """Control experiments."""

    @field_validator("framework")
    @classmethod
    def _framework_is_known(cls, label: str) -> str:
        if label != "auto":
            try:
                find_release(label)
            except UnknownFrameworkError as error:
                way_out = f"framework={error.instead}, or framework=auto"
                raise PydanticCustomError("value_error", "{why}", {"why": str(error), "way_out": way_out}) from None
        return label
