"""JobSpec: one RL job as its user says it.

In: the keys of a job file, checked alone and together. Out: a frozen JobSpec and what follows from its keys.
In memory, paths are absolute; on disk they stand relative to the file that names them, so that a folder can be moved.
Left out: reading files (job_file.py).
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from rlplan.errors import SpecError
from rlplan.spec.algorithm import ALGORITHMS, AlgorithmSpec
from rlplan.spec.base import Spec
from rlplan.spec.conduct import CheckpointsSpec, ControlsSpec, LimitsSpec, MetricsSpec, PreflightSpec
from rlplan.spec.hardware import GpuProfile, HardwareProfile
from rlplan.spec.model import ModelSpec, Parameter, load_model
from rlplan.spec.models.adapters import lora_parameters
from rlplan.spec.placement import HardwareSpec, PlacementSpec, RolloutSpec
from rlplan.spec.profiles import get_gpu, get_profile, is_cpu_host
from rlplan.spec.rewards import FunctionSpec, RewardSpec, runs_elsewhere
from rlplan.spec.roles import RolesSpec, ValueSpec, load_role_model
from rlplan.spec.training import TrainingSpec, check_sharing
from rlplan.spec.workload import WorkloadSpec
from rlplan.units import ceil_div
from rlplan.vocabulary import Role, Transport


class PolicySpec(Spec):
    """The model to train: a Hugging Face folder.

    init: `checkpoint` reads its safetensors; `random` needs only its config and draws the start weights from the seed.
    """

    path: str
    init: Literal["checkpoint", "random"] = "checkpoint"


class JobSpec(Spec):
    """One RL job. Nested parts are documented on their own classes and in docs/job.md."""

    schema_version: Literal[1] = 1
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    seed: int = Field(default=0, ge=0, lt=2**31)
    policy: PolicySpec
    hardware: HardwareSpec
    algorithm: AlgorithmSpec
    workload: WorkloadSpec
    rewards: tuple[RewardSpec, ...]
    roles: RolesSpec = RolesSpec()
    training: TrainingSpec = TrainingSpec()
    rollout: RolloutSpec = RolloutSpec()
    placement: PlacementSpec = PlacementSpec()
    limits: LimitsSpec = LimitsSpec()
    preflight: PreflightSpec = PreflightSpec()
    checkpoints: CheckpointsSpec = CheckpointsSpec()
    metrics: MetricsSpec = MetricsSpec()
    controls: ControlsSpec = ControlsSpec()

    @model_validator(mode="after")
    def _group_is_large_enough(self) -> "JobSpec":
        least = self.algorithm.declaration.min_samples_per_prompt
        if self.workload.num_samples_per_prompt < least:
            raise ValueError(
                f"{self.algorithm.name} compares rollouts of one prompt: workload.num_samples_per_prompt = "
                f"{self.workload.num_samples_per_prompt} must be at least {least}"
            )
        return self

    @model_validator(mode="after")
    def _pairs_stay_together(self) -> "JobSpec":
        declared, work = self.algorithm.declaration, self.workload
        if self.has_turns and (declared.num_baseline_samples or not declared.has_rollouts):
            raise ValueError(f"rollout.environment: {self.algorithm.name} has rollouts of one turn, or none")
        if not declared.has_rollouts and work.num_samples_per_prompt != 2:
            raise ValueError(
                f"{self.algorithm.name} is given a chosen and a rejected answer of each prompt: "
                f"workload.num_samples_per_prompt = {work.num_samples_per_prompt} must be 2"
            )
        if declared.trains_pairs and work.mini_batch_size % work.num_samples_per_prompt:
            raise ValueError(
                f"{self.algorithm.name} compares answers to one prompt: workload.mini_batch_size = "
                f"{work.mini_batch_size} must be a multiple of workload.num_samples_per_prompt = "
                f"{work.num_samples_per_prompt}"
            )
        return self

    @model_validator(mode="after")
    def _buffer_holds_a_step(self) -> "JobSpec":
        capacity, count = self.placement.max_buffered_groups, self.workload.num_prompts_per_step
        if capacity is not None and capacity < count:
            raise ValueError(
                f"placement.max_buffered_groups = {capacity} must hold one step's prompts, "
                f"workload.num_prompts_per_step = {count}"
            )
        return self

    @model_validator(mode="after")
    def _penalty_begins_within_the_limit(self) -> "JobSpec":
        if self.algorithm.overlong_buffer > self.workload.max_response_len:
            raise ValueError(
                f"algorithm.overlong_buffer = {self.algorithm.overlong_buffer} must be at most "
                f"workload.max_response_len = {self.workload.max_response_len}"
            )
        return self

    @property
    def num_generated_per_prompt(self) -> int:
        """Rollouts of a prompt that engines make, the baselines that nobody trains on among them."""
        return self.workload.num_samples_per_prompt + self.algorithm.declaration.num_baseline_samples

    def num_trained_by(self, num_shares: int) -> int:
        """Rollouts of a mini-batch that one of so many equal shares of it trains on; a pair lies in one share."""
        unit, work = 2 if self.algorithm.declaration.trains_pairs else 1, self.workload
        trained = self.algorithm.declaration.num_trained(work.mini_batch_size, work.num_samples_per_prompt)
        return unit * ceil_div(trained // unit, num_shares)

    @property
    def max_refills(self) -> int:
        """How often groups that teach nothing are replaced: never where rules alone cannot tell which do."""
        return 0 if Role.REWARD in self.scored_roles or self.has_turns else self.algorithm.max_refills

    @property
    def max_tokens_per_micro_batch(self) -> int:
        """Tokens of one pass of a trained or frozen model, at most."""
        whole = self.workload.micro_batch_size_per_gpu * self.workload.max_seq_len
        return self.training.max_tokens_per_micro_batch or whole

    @property
    def has_turns(self) -> bool:
        """Whether an environment answers the policy, so that a rollout may have several turns."""
        return self.rollout.environment.path is not None

    @model_validator(mode="after")
    def _turns_end_by_themselves(self) -> "JobSpec":
        if self.has_turns and (self.controls.forces_lengths or self.workload.ignores_eos):
            raise ValueError(
                "rollout.environment answers when a turn has ended: controls.forces_lengths and workload.ignores_eos "
                "leave the policy no way to end one"
            )
        return self

    @property
    def sync_transport(self) -> Transport:
        """The transport, chosen where it is left open: within one host nothing is faster than shared memory.

        Of several hosts the first one's trainer hands weights over, and engines lie on the last: gloo goes between.
        On GPUs CUDA IPC on shared devices, NCCL between those of their own.
        """
        if self.placement.transport != "auto":
            return self.placement.transport
        if self._is_on_gpus:
            return Transport.NCCL if self.placement.placement == "disaggregated" else Transport.CUDA_IPC
        return Transport.SHARED_MEMORY if self.hardware.num_hosts == 1 else Transport.GLOO

    @model_validator(mode="after")
    def _longest_fits_a_micro_batch(self) -> "JobSpec":
        if self.max_tokens_per_micro_batch < self.workload.max_seq_len:
            raise ValueError(
                f"training.max_tokens_per_micro_batch = {self.max_tokens_per_micro_batch} must hold one longest "
                f"sequence, workload.max_prompt_len + max_response_len = {self.workload.max_seq_len}"
            )
        if self.algorithm.declaration.trains_pairs and self.max_tokens_per_micro_batch < 2 * self.workload.max_seq_len:
            raise ValueError(
                f"a micro-batch of {self.max_tokens_per_micro_batch} tokens must hold two longest sequences, for "
                f"{self.algorithm.name} compares them: workload.micro_batch_size_per_gpu of at least 2, or "
                f"training.max_tokens_per_micro_batch of {2 * self.workload.max_seq_len}"
            )
        return self

    @model_validator(mode="after")
    def _something_is_rewarded(self) -> "JobSpec":
        stands_in = {Role.REWARD, Role.TEACHER} & set(self.roles.paths) or self.has_turns
        if not self.rewards and not stands_in and self.algorithm.declaration.has_rollouts:
            raise ValueError(
                "rewards is [], and there is neither a reward model (roles.reward.path) nor a teacher "
                "(roles.teacher.path): one of the three is needed"
            )
        return self

    @model_validator(mode="after")
    def _roles_are_used(self) -> "JobSpec":
        if self.roles.value != ValueSpec() and not self.algorithm.declaration.has_value:
            having = ", ".join(name for name, declared in ALGORITHMS.items() if declared.has_value)
            raise ValueError(f"roles.value: {self.algorithm.name} has no value model; {having} has")
        if self.algorithm.value_warmup_steps and self.roles.value.shares_backbone:
            raise ValueError("algorithm.value_warmup_steps: a value head on the policy's backbone is trained with it")
        if self.roles.reference.path is not None and not self.algorithm.kl_coef:
            raise ValueError("roles.reference: algorithm.kl_coef is 0, so that nothing reads the reference")
        return self

    @model_validator(mode="after")
    def _rewards_differ_in_name(self) -> "JobSpec":
        labels = [reward.label for reward in self.rewards]
        if len(set(labels)) < len(labels):
            raise ValueError(
                f"rewards: each name (by default the kind) stands at most once, these are {', '.join(labels)}"
            )
        return self

    @property
    def has_reward_processes(self) -> bool:
        """Whether judging takes processes of its own, beside the driver."""
        return any(runs_elsewhere(reward) for reward in self.rewards)

    @model_validator(mode="after")
    def _prefill_fits_a_batch(self) -> "JobSpec":
        if self.rollout.max_num_batched_tokens < self.workload.max_seq_len and not self._is_on_gpus:
            raise ValueError(
                f"rollout.max_num_batched_tokens = {self.rollout.max_num_batched_tokens} must hold one longest "
                f"sequence, workload.max_prompt_len + max_response_len = {self.workload.max_seq_len}"
            )
        if self.rollout.max_num_batched_tokens < self.rollout.max_num_seqs:
            raise ValueError(
                f"rollout.max_num_batched_tokens = {self.rollout.max_num_batched_tokens} must be at least "
                f"rollout.max_num_seqs = {self.rollout.max_num_seqs}: each running sequence decodes one token a batch"
            )
        return self

    def with_paths(self, change: Callable[[str], str]) -> "JobSpec":
        """The same job with every path passed through `change`."""
        policy = self.policy.model_copy(update={"path": change(self.policy.path)})
        file, _, name = (self.algorithm.path or "").rpartition(":")
        algorithm = self.algorithm.model_copy(update={"path": f"{change(file)}:{name}" if file else None})
        roles = self.roles.with_paths({role: change(path) for role, path in self.roles.paths.items()})
        workload = self.workload.model_copy(
            update={"prompts": change(self.workload.prompts), "heldout_prompts": change(self.workload.heldout_prompts)}
        )
        rewards = tuple(_moved(reward, change) for reward in self.rewards)
        rollout, path = self.rollout, self.rollout.environment.path
        if path is not None:
            file, _, function = path.rpartition(":")
            environment = rollout.environment.model_copy(update={"path": f"{change(file)}:{function}"})
            rollout = rollout.model_copy(update={"environment": environment})
        changed = {"policy": policy, "algorithm": algorithm, "roles": roles, "workload": workload}
        return self.model_copy(update={**changed, "rewards": rewards, "rollout": rollout})

    def resolved(self, folder: Path) -> "JobSpec":
        """Paths made absolute, read relative to `folder`."""
        return self.with_paths(lambda path: os.path.normpath(folder.resolve() / path))

    def relative_to(self, folder: Path) -> "JobSpec":
        """Paths made relative to `folder`, for writing the job into it."""
        return self.with_paths(lambda path: os.path.relpath(path, folder.resolve()))

    def load_model(self) -> ModelSpec:
        """The policy's shape. Raises: SpecError when the folder, its config or the length limit is wrong."""
        model = load_model(Path(self.policy.path))
        if self.workload.max_seq_len > model.max_position_embeddings:
            raise SpecError(
                f"prompt and response may reach {self.workload.max_seq_len} tokens, the model's limit is "
                f"{model.max_position_embeddings}",
                where="workload.max_prompt_len + workload.max_response_len",
                rule="at most max_position_embeddings of the model's config.json",
                way_out="shorten the lengths or take a model with a longer context",
            )
        self.adapter_parameters(model)
        check_sharing(self.training, model, "policy.path")
        return model

    def trained_parameters(self, role: Role, model: ModelSpec) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...]]:
        """(trained, frozen) parameters of a role's module, in its order. Raises: SpecError."""
        if role is not Role.POLICY:
            return model.parameters, ()
        has_head = Role.VALUE in self.scored_roles and self.holder_of(Role.VALUE) is Role.POLICY
        head = (Parameter("value_head.weight", (1, model.hidden_size)),) if has_head else ()
        adapters = self.adapter_parameters(model)
        return (*(adapters or model.parameters), *head), model.parameters if adapters else ()

    def adapter_parameters(self, model: ModelSpec) -> tuple[Parameter, ...]:
        """The adapters beside a model's linear layers; none where the model itself is trained. Raises: SpecError."""
        lora = self.training.lora
        return () if lora.rank is None else lora_parameters(model, lora.rank, lora.target_modules)

    @property
    def scored_roles(self) -> tuple[Role, ...]:
        """Roles that say something about a finished rollout, in order.

        The policy among them where its log-probs before the step are needed and its first pass does not give them.
        """
        wanted = {
            Role.POLICY: self.algorithm.importance != "none" and self.workload.num_mini_batches > 1,
            Role.VALUE: self.algorithm.declaration.has_value,
            Role.REFERENCE: self.algorithm.kl_coef > 0,
            Role.REWARD: Role.REWARD in self.roles.paths,
            Role.TEACHER: Role.TEACHER in self.roles.paths,
        }
        return tuple(role for role, is_wanted in wanted.items() if is_wanted)

    @property
    def frozen_roles(self) -> tuple[Role, ...]:
        """Scored roles that have a model and a process of their own and are never trained."""
        trained = self.algorithm.declaration.trained_roles
        return tuple(role for role in self.scored_roles if self.holder_of(role) is role and role not in trained)

    @property
    def trained_roles(self) -> tuple[Role, ...]:
        """Roles with an optimizer and processes of their own."""
        return tuple(role for role in self.algorithm.declaration.trained_roles if self.holder_of(role) is role)

    def holder_of(self, role: Role) -> Role:
        """The role whose processes compute this one: its own, or the policy's where it shares the policy's weights."""
        if role is Role.VALUE and self.roles.value.shares_backbone:
            return Role.POLICY
        if role is Role.REFERENCE and self.training.trains_adapters and self.roles.reference.path is None:
            return Role.POLICY
        return role

    def load_role_models(self) -> dict[Role, ModelSpec]:
        """The shape of every role's model but the policy's. Raises: SpecError."""
        models: dict[Role, ModelSpec] = {}
        for role in self.scored_roles:
            if role is Role.POLICY:
                continue
            path = self.roles.paths.get(role, self.policy.path)
            limit = self.roles.reward.max_seq_len if role is Role.REWARD else None
            needs = limit or self.workload.max_seq_len
            models[role] = load_role_model(role, path, needs_tokens=needs, where=f"roles.{role}.path")
            if role in self.trained_roles:
                check_sharing(self.training, models[role], f"roles.{role}.path")
        return models

    @property
    def _is_on_gpus(self) -> bool:
        try:
            return self.device_kind != "cpu"
        except SpecError:  # an unknown profile is said where it is read
            return False

    @property
    def device_kind(self) -> Literal["cpu", "cuda"]:
        """What a device of the job is: a slot of a CPU host, or a GPU. Raises: SpecError for an unknown profile."""
        return "cpu" if is_cpu_host(self.hardware.profile, where="hardware.profile") else "cuda"

    def load_gpu(self) -> GpuProfile:
        """The GPU that the job names, by itself or by its node. Raises: SpecError."""
        return get_gpu(self.hardware.profile, where="hardware.profile")

    def load_profile(self) -> HardwareProfile:
        """The profile of the CPU host that the job names. Raises: SpecError."""
        profile = get_profile(self.hardware.profile, where="hardware.profile")
        if self.hardware.num_devices > profile.max_devices * self.hardware.num_hosts:
            raise SpecError(
                f"hardware.num_devices is {self.hardware.num_devices}, profile '{profile.name}' has at most "
                f"{profile.max_devices} on each of {self.hardware.num_hosts} host(s)",
                where="hardware.num_devices",
                rule="at most the profile's max_devices on each host",
                way_out="ask for fewer devices or name another profile",
            )
        return profile


def _moved(reward: RewardSpec, change: Callable[[str], str]) -> RewardSpec:
    """A reward with its file's path changed, where it has one."""
    if not isinstance(reward, FunctionSpec):
        return reward
    file, _, name = reward.path.rpartition(":")
    return reward.model_copy(update={"path": f"{change(file)}:{name}"})
