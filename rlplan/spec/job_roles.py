"""The parts of a job, each a Spec (the top-level keys of a job file), and its roles: which are trained, which are
frozen, and which model each of them is.

In: the keys of a job file. Out: frozen fields; roles, parameters, shapes. Left out: whether the parts agree (job.py),
where roles are placed (dataflow/placements.py).
"""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from rlplan.errors import SpecError
from rlplan.frameworks.profile import FrameworkRelease, UnknownFrameworkError, find_release
from rlplan.spec.base import Spec
from rlplan.spec.hardware.catalogue import is_cpu_host
from rlplan.spec.model import (
    ModelSpec,
    Parameter,
    load_model,
    load_scalar_base,
    model_from_config,
    replace_positions,
)
from rlplan.spec.models.adapters import adapted_modules, list_lora_parameters
from rlplan.spec.models.catalogue import resolve_model
from rlplan.spec.models.reading import MAX_POSITIONS
from rlplan.spec.parts.adapter_files import check_same_adapter, list_frozen_adapters, read_adapter
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
from rlplan.spec.parts.rewards import (
    Evaluation,
    RewardSpec,
    list_evaluations,
    list_ranking_evaluations,
    needs_processes,
)
from rlplan.spec.parts.roles import START_ADAPTER, RolesSpec, ScoringSpec, load_role_model, replace_head
from rlplan.spec.parts.rollout import RolloutSpec
from rlplan.spec.parts.training import LoraSpec, TrainingSpec, check_sharing
from rlplan.spec.parts.workload import WorkloadSpec
from rlplan.units import ceil_div
from rlplan.vocabulary import Backend, Role

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


@lru_cache(maxsize=64)
def _parse_model(config: str) -> ModelSpec:
    return model_from_config(json.loads(config), where="policy.config")


class JobRoles(JobParts):
    """Properties of a job's roles, rollouts and devices that follow from its parts."""

    @property
    def num_generated_per_prompt(self) -> int:
        """Rollouts per prompt that engines generate, including greedy baselines that are not trained on."""
        return self.workload.num_samples_per_prompt + self.algorithm.declaration.num_baseline_samples

    @property
    def num_generated_per_step(self) -> int:
        """Rollouts per step that engines generate."""
        prompts = self.workload.num_generated_prompts_per_step or self.workload.num_prompts_per_step
        return prompts * self.num_generated_per_prompt

    @property
    def splits_groups(self) -> bool:
        """Whether the framework may send rollouts of one prompt to different engines."""
        return self.release.dispatch == "rollouts"

    def count_most_rollouts(self, num_engines: int, batches: int = 1) -> int:
        """Rollouts of the engine with the most, when `batches` steps' rollouts are spread evenly over the engines."""
        unit = 1 if self.splits_groups else self.num_generated_per_prompt
        return unit * ceil_div(batches * self.num_generated_per_step // unit, num_engines)

    def count_busy_engines(self, num_engines: int, batches: int = 1) -> int:
        """Engines that receive rollouts when `batches` steps' rollouts are in progress."""
        unit = 1 if self.splits_groups else self.num_generated_per_prompt
        return min(num_engines, batches * self.num_generated_per_step // unit)

    @property
    def has_rollouts(self) -> bool:
        """Whether answers are generated rather than read from the data."""
        return self.algorithm.declaration.has_rollouts

    @property
    def has_engine(self) -> bool:
        """Whether there is a rollout engine. On a CPU host, jobs without rollouts have one for evaluations."""
        return self.has_rollouts or (not self.is_on_gpus and not self.algorithm.declaration.trains_scalar)

    def count_trained(self, num_shares: int) -> int:
        """Rollouts of a mini-batch in the largest of `num_shares` shares; the two rollouts of a pair stay in one
        share.
        """
        return self.sequences_per_unit * ceil_div(self.num_units_per_mini_batch, num_shares)

    @property
    def num_units_per_mini_batch(self) -> int:
        """Units of a mini-batch that are distributed over ranks: rollouts, or pairs of rollouts."""
        work = self.workload
        trained = self.algorithm.declaration.num_trained(work.rollouts_per_mini_batch, work.num_samples_per_prompt)
        return trained // self.sequences_per_unit

    @property
    def sequences_per_unit(self) -> int:
        """Rollouts that must be in one micro-batch: 2 for algorithms on pairs, else 1."""
        return 2 if self.algorithm.declaration.trains_pairs else 1

    @property
    def num_baseline_answers_per_mini_batch(self) -> int:
        """Answers to other prompts that are scored before the passes of a mini-batch."""
        work = self.workload
        return (
            work.rollouts_per_mini_batch // work.num_samples_per_prompt
            if self.algorithm.declaration.has_baseline_answers
            else 0
        )

    @property
    def max_refills(self) -> int:
        """How often zero-variance groups are replaced. 0 with a reward model or multiple turns, where rules cannot
        detect them.
        """
        return 0 if Role.REWARD in self.scored_roles or self.has_turns else self.algorithm.max_refills

    @property
    def takes_images(self) -> bool:
        """Whether prompts contain images."""
        return self.data is not None and self.data.image_column is not None

    @property
    def has_turns(self) -> bool:
        """Whether an environment or tools answer the policy, so that a rollout may have several turns."""
        return self.rollout.environment.is_given

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """The metrics on held-out prompts; none where only a reward model judges."""
        work = self.workload
        heldout_sets = ("",) if self.data is None else tuple(self.data.heldout_sets) or ("",)
        if self.algorithm.declaration.trains_scalar:
            return list_ranking_evaluations(heldout_sets)
        return list_evaluations(
            self.rewards,
            has_environment=self.rollout.environment.has_environment,
            heldout_sets=heldout_sets,
            num_samples=work.num_evaluation_samples if work.evaluation_temperature else 0,
        )

    @property
    def num_evaluated_prompts(self) -> int:
        """Limit on held-out prompts per evaluation, over all data sets."""
        return self.workload.num_heldout_prompts * (1 if self.data is None else max(1, len(self.data.heldout_sets)))

    @property
    def num_evaluated_responses(self) -> int:
        """Responses per evaluation; for a reward model, the given answers that it scores."""
        is_given = self.algorithm.declaration.trains_scalar
        return self.num_evaluated_prompts * (2 if is_given else self.workload.num_evaluation_samples)

    @property
    def has_reward_processes(self) -> bool:
        """Whether rewards run in separate processes."""
        return any(needs_processes(reward) for reward in self.rewards)

    @property
    def named_models(self) -> dict[str, str]:
        """Every model that the job names, by its key."""
        base = self.rollout.base_path
        roles = {f"roles.{role}.path": path for role, path in self.roles.paths.items()}
        return {"policy.path": self.policy.path, **roles, **({"rollout.base_path": base} if base is not None else {})}

    def load_model(self) -> ModelSpec:
        """The policy's shape. Raises: SpecError when the folder, its config or the length limit is wrong.

        On GPUs every known family is accepted: whether the runtime supports it is a rule (planner/rules.py).
        """
        path = self.policy.path
        is_scalar = self.algorithm.declaration.trains_scalar
        load = load_scalar_base if is_scalar else load_model
        if self.policy.config is not None:
            model = _parse_model(json.dumps(self.policy.config, sort_keys=True))
        else:
            model = resolve_model(path, where="policy.path") if self.is_on_gpus else load(Path(path))
        model = replace_head(model) if is_scalar else model
        if self.policy.max_position_embeddings is not None:
            model = replace_positions(model, self.policy.max_position_embeddings)
        if self.workload.max_seq_len > model.max_position_embeddings:
            raise self._too_long(model.max_position_embeddings)
        self.adapter_parameters(model)
        self.frozen_adapter_parameters(model)
        if self.is_for_rlplan:
            check_sharing(self.training, model, "policy.path")
        return model

    def _too_long(self, limit: int) -> SpecError:
        prompt, response = limit // 4, limit - limit // 4
        shorter = f"workload.max_prompt_len={prompt} workload.max_response_len={response}"
        if self.algorithm.overlong_buffer > response:
            shorter += f" algorithm.overlong_buffer={response // 4}"
        return SpecError(
            f"prompt and response may reach {self.workload.max_seq_len:,} tokens, the model's limit is {limit:,}",
            where="workload.max_prompt_len + workload.max_response_len",
            rule="at most max_position_embeddings of the model's config.json, or of the policy: vLLM refuses more",
            way_out=f"{shorter}, or another model",
        )

    def trained_parameters(self, role: Role, model: ModelSpec) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...]]:
        """(trained, frozen) parameters of a role's module, in its order. Raises: SpecError."""
        if role is not Role.POLICY:
            return model.parameters, ()
        has_head = Role.VALUE in self.scored_roles and self.find_holder(Role.VALUE) is Role.POLICY
        head = (Parameter("value_head.weight", (1, model.hidden_size)),) if has_head else ()
        adapters = self.adapter_parameters(model)
        frozen = (*model.parameters, *self.frozen_adapter_parameters(model)) if adapters else ()
        return (*(adapters or model.parameters), *head), frozen

    def adapter_parameters(self, model: ModelSpec) -> tuple[Parameter, ...]:
        """The trained adapters of a model's linear layers; empty for full fine-tuning. Raises: SpecError."""
        lora = self.training.lora
        if lora is None:
            return ()
        if lora.path is not None:
            check_same_adapter(model, lora, read_adapter(Path(lora.path), where="training.lora.path"))
        return list_lora_parameters(model, lora.rank, lora.target_modules)

    @property
    def frozen_adapters(self) -> dict[Role, LoraSpec]:
        """Adapters of roles that compute with a frozen adapter on the trained adapter's base. Raises: SpecError."""
        lora, reference = self.training.lora, self.roles.reference
        if lora is None:
            return {}
        folders = self.roles.adapters
        if lora.path is not None and reference.path is None and reference.adapter is None:
            folders[Role.REFERENCE] = lora.path
        roles = [role for role in self.scored_roles if role in folders]
        adapters = {role: read_adapter(Path(folders[role]), where=f"roles.{role}.adapter") for role in roles}
        if reference.adapter == START_ADAPTER and Role.REFERENCE in self.scored_roles:
            adapters[Role.REFERENCE] = lora
        return adapters

    def frozen_adapter_parameters(self, model: ModelSpec) -> tuple[Parameter, ...]:
        """Parameters of these roles' adapters for a model. Raises: SpecError."""
        return list_frozen_adapters(model, {role.value: adapter for role, adapter in self.frozen_adapters.items()})

    def adapted_modules(self, model: ModelSpec) -> list[str]:
        """Names of the linear layers with an adapter, as in PEFT's `target_modules`."""
        return adapted_modules(self.adapter_parameters(model))

    @property
    def scored_roles(self) -> tuple[Role, ...]:
        """Roles that score finished rollouts, in the framework's order."""
        step, algorithm = self.release.step, self.algorithm
        has_kl = algorithm.kl_coef > 0 or (step.reference == "always" and self.has_rollouts)
        wanted = {
            Role.POLICY: self.recomputes_log_probs,
            Role.VALUE: algorithm.declaration.has_value,
            Role.REFERENCE: has_kl and not self.roles.reference.is_precomputed,
            Role.REWARD: Role.REWARD in self.roles.paths,
            Role.TEACHER: Role.TEACHER in self.roles.paths or Role.TEACHER in self.roles.adapters,
        }
        # roles that the framework's profile does not list come last
        order = (*step.order, *(role for role in wanted if role not in step.order))
        return tuple(role for role in order if wanted.get(role))

    @property
    def frozen_roles(self) -> tuple[Role, ...]:
        """Scored roles with a model and processes of their own that are never trained."""
        trained = self.algorithm.declaration.trained_roles
        return tuple(role for role in self.scored_roles if self.find_holder(role) is role and role not in trained)

    @property
    def trained_roles(self) -> tuple[Role, ...]:
        """Roles with an optimizer and processes of their own."""
        return tuple(role for role in self.algorithm.declaration.trained_roles if self.find_holder(role) is role)

    def find_holder(self, role: Role) -> Role:
        """The role whose processes compute this one: itself, or the policy if it uses the policy's weights."""
        if role is Role.VALUE and self.roles.value.shares_backbone:
            return Role.POLICY
        if role is Role.REFERENCE and self.training.trains_adapters and self.roles.reference.path is None:
            return Role.POLICY
        if role is Role.TEACHER and role in self.roles.adapters:
            return Role.POLICY
        return role

    def load_role_models(self) -> dict[Role, ModelSpec]:
        """The shape of every role's model except the policy's. Raises: SpecError."""
        models: dict[Role, ModelSpec] = {}
        for role in self.scored_roles:
            if role is Role.POLICY:
                continue
            path = self.roles.paths.get(role, self.policy.path)
            limit = self.roles.reward.max_seq_len if role is Role.REWARD else None
            needs = limit or self.workload.max_seq_len
            models[role] = load_role_model(role, path, needs_tokens=needs, where=f"roles.{role}.path")
            if role in self.trained_roles and self.is_for_rlplan:
                check_sharing(self.training, models[role], f"roles.{role}.path")
        return models

    @property
    def device_kind(self) -> Literal["cpu", "cuda"]:
        """Kind of the job's devices: slots of a CPU host, or GPUs. Raises: SpecError for an unknown profile."""
        return "cpu" if is_cpu_host(self.hardware.profile, where="hardware.profile") else "cuda"

    @property
    def release(self) -> FrameworkRelease:
        """The framework release that runs the job. For `auto` it is the one that planning chooses if rlplan's own
        runtime can run the models.
        """
        if self.framework != "auto":
            return find_release(self.framework)
        return find_release("verl" if self.training.backend in ("fsdp2", "megatron") else "rlplan")

    @property
    def backend(self) -> Backend:
        """The trainer that the job names, else the framework's default. Raises: SpecError for an unreadable model."""
        asked = self.training.backend
        if asked != "auto":
            return asked
        release = self.release
        has_experts = len(release.backends) > 1 and self.load_model().experts is not None
        return release.choose_backend(has_experts=has_experts)

    @property
    def is_for_rlplan(self) -> bool:
        """Whether rlplan's own runtime runs the job; for jobs on GPUs that leave it open, planning decides."""
        if self.framework == "auto" and self.training.backend == "auto":
            return not self.is_on_gpus
        return self.release.is_rlplan

    @property
    def recomputes_log_probs(self) -> bool:
        """Whether the trainer recomputes the policy's log-probs of finished rollouts before the step's updates.

        rlplan's own runtime needs this pass in two cases. With several updates, ratios of the later ones compare with
        the log-probs before the step; the first update computes those itself. With the KL in the rewards, these must be
        complete before the first update. The engine's log-probs cannot serve: other kernels computed them, and older
        weights if rollouts are stale, so that the KL would depend on the number of updates.
        """
        asked = self.scoring.policy_log_probs
        rule = self.release.step.policy_log_probs if asked == "auto" else asked
        if rule in ("always", "never") or not self.has_rollouts:
            return rule == "always" and self.has_rollouts
        algorithm = self.algorithm
        if algorithm.weighs_rollouts and (self.workload.num_mini_batches > 1 or algorithm.has_kl_in_reward):
            return True
        return rule == "later_updates_or_correction" and algorithm.corrects_importance

    @property
    def takes_entropies(self) -> bool:
        """Whether the pass that recomputes the policy's log-probs also computes entropies."""
        asked = self.scoring.has_entropy
        return self.release.step.has_entropy if asked == "auto" else asked

    @property
    def is_on_gpus(self) -> bool:
        """Whether devices are GPUs; false for an unknown profile, whose error is raised where it is read."""
        return self._known_device_kind == "cuda"

    @property
    def is_on_cpu_host(self) -> bool:
        """Whether devices are slots of a CPU host; false for an unknown profile."""
        return self._known_device_kind == "cpu"

    @property
    def _known_device_kind(self) -> Literal["cpu", "cuda", ""]:
        try:
            return self.device_kind
        except SpecError:
            return ""
