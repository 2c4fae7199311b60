"""The parts of a job, each a Spec of its own: what a job file has at its top level.

In: the keys of a job file. Out: frozen fields. Left out: whether they go together (job.py), roles (job_roles.py).
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
    """A Hugging Face folder, its config.json, or the id of a bundled model."""
    config: dict[str, Any] | None = None
    """The keys of its config.json where no file has them: of a model that nobody has on disk, or of its first layers.
    `path` is then a name. Such a job is planned, not run."""
    init: Literal["checkpoint", "random"] = "checkpoint"
    """`checkpoint` reads its safetensors; `random` needs only its config and draws the start weights from the seed."""
    max_position_embeddings: int | None = Field(default=None, ge=1, le=MAX_POSITIONS)
    """Tokens of its longest sequence where the trainer overrides what its config.json says; None for that."""


class JobParts(Spec):
    """The keys of a job. What is absent of data and rewards is needed to run it, not to plan it."""

    schema_version: Literal[2] = JOB_SCHEMA_VERSION
    name: str = Field(default="job", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    seed: int = Field(default=0, ge=0, lt=2**31)
    policy: PolicySpec
    hardware: HardwareSpec
    algorithm: AlgorithmSpec = AlgorithmSpec.by_default()
    framework: str = Field(default="auto", min_length=1, max_length=40)
    """Who runs the job: `rlplan`, or another framework with its release, such as `verl@0.9` (rlplan/frameworks). Its
    profile says which passes a step has and what they hold. `auto`: rlplan's own runtime where that runs the models,
    else verl; verl too where training.backend is none of rlplan's."""
    objective: Objective = "step_time"
    """What is made small on GPUs, or large (tokens per second)."""
    workload: WorkloadSpec = WorkloadSpec.by_default()
    training: TrainingSpec = TrainingSpec.by_default()
    rollout: RolloutSpec = RolloutSpec.by_default()
    scoring: ScoringSpec = ScoringSpec.by_default()
    placement: PlacementSpec = PlacementSpec.by_default()
    roles: RolesSpec = RolesSpec.by_default()
    data: DataSpec | None = None
    rewards: tuple[RewardSpec, ...] = ()
    limits: LimitsSpec = LimitsSpec.by_default()
    preflight: PreflightSpec = PreflightSpec.by_default()
    checkpoints: CheckpointsSpec = CheckpointsSpec.by_default()
    early_stopping: EarlyStoppingSpec | None = None
    metrics: MetricsSpec = MetricsSpec.by_default()
    controls: ControlsSpec = ControlsSpec.by_default()

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
