"""JobSpec: one RL job as its user describes it, on a CPU host or on GPUs.

In: the keys of a job file, checked individually and together. Out: a frozen JobSpec whose open choices are `auto`. Left
out: reading files (job_file.py), how each `auto` is resolved (resolved.py).

In memory, paths are absolute; on disk they are relative to the file that names them, so that a folder can be moved.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from rlplan.errors import did_you_mean
from rlplan.spec.declaration import NUM_GIVEN
from rlplan.spec.files.hub_data import HUB_DATA, find_hub_address
from rlplan.spec.files.job_forms import expand_job
from rlplan.spec.job_roles import JobRoles, PolicySpec
from rlplan.spec.models.catalogue import load_catalogue
from rlplan.spec.parts.algorithm import ALGORITHMS
from rlplan.spec.parts.rewards import FunctionSpec, RewardSpec
from rlplan.spec.parts.roles import ValueSpec
from rlplan.vocabulary import Role

__all__ = ["JobSpec", "PolicySpec"]

GIVEN_WORDS = {
    "answer": "reads one answer of each prompt from the data",
    "unpaired": "reads one answer of each prompt from the data and compares it with an answer to another prompt",
    "pair": "reads a chosen and a rejected answer of each prompt from the data",
}
MODELS = "models"
"""Folder beside a job file in which bundled models are looked up, each as ORG/NAME, if a job names them by id."""


class JobSpec(JobRoles):
    """One RL job. Its parts are documented on their own classes and in docs/job.md."""

    @classmethod
    def expand_short_forms(cls, data: Any) -> Any:
        """A parsed job with its short forms expanded. Raises: SpecError where a short form is wrong."""
        return expand_job(data)

    @model_validator(mode="after")
    def _group_is_large_enough(self) -> Self:
        least = self.algorithm.declaration.min_samples_per_prompt
        if self.workload.num_samples_per_prompt < least:
            raise ValueError(
                f"{self.algorithm.name} compares rollouts of one prompt: workload.num_samples_per_prompt = "
                f"{self.workload.num_samples_per_prompt} must be at least {least}"
            )
        return self

    @model_validator(mode="after")
    def _learning_rate_fits_the_run(self) -> Self:
        algorithm, num_steps = self.algorithm, self.workload.num_steps
        warmup, end = algorithm.schedule_steps(num_steps)
        kind, decays = algorithm.lr_scheduler_type, algorithm.lr_scheduler_type != "constant"
        if end > num_steps:
            raise ValueError(
                f"algorithm.lr_decay_steps = {end} is longer than the run, workload.num_steps = {num_steps}: the "
                f"learning rate would not reach its end. algorithm.lr_decay_steps=null follows the run"
            )
        if end < num_steps and not algorithm.min_lr_ratio:
            raise ValueError(
                f"algorithm.lr_decay_steps = {end} is shorter than the run, workload.num_steps = {num_steps}: the "
                f"last {num_steps - end} steps would learn nothing. Give a cosine schedule a min_lr_ratio, or "
                f"algorithm.lr_decay_steps=null"
            )
        if warmup > end - decays:
            raise ValueError(
                f"algorithm.lr_warmup_steps = {warmup} of a {kind} schedule of {end} steps: the warm-up must be "
                f"shorter. algorithm.lr_warmup_ratio sets it as a fraction of the run"
            )
        return self

    @model_validator(mode="after")
    def _pairs_stay_together(self) -> Self:
        declared, work = self.algorithm.declaration, self.workload
        if self.has_turns and (declared.num_baseline_samples or not declared.has_rollouts):
            raise ValueError(f"rollout.environment: {self.algorithm.name} has rollouts of one turn, or none")
        if declared.given and work.num_samples_per_prompt != (count := NUM_GIVEN[declared.given]):
            raise PydanticCustomError(
                "value_error",
                f"{self.algorithm.name} {GIVEN_WORDS[declared.given]}: workload.num_samples_per_prompt must be "
                f"{count}, not {work.num_samples_per_prompt}",
                {"way_out": f"workload.num_samples_per_prompt={count}, or leave it out"},
            )
        if declared.joins_rollouts and work.rollouts_per_mini_batch % work.num_samples_per_prompt:
            raise ValueError(
                f"{self.algorithm.name} compares answers to one prompt: workload.mini_batch_size = "
                f"{work.mini_batch_size} must be a multiple of workload.num_samples_per_prompt = "
                f"{work.num_samples_per_prompt}"
            )
        return self

    @model_validator(mode="after")
    def _teacher_judges_samples(self) -> Self:
        key = "path" if Role.TEACHER in self.roles.paths else "adapter"
        if Role.TEACHER not in self.roles.paths | self.roles.adapters:
            if self.algorithm.teacher_top_k:
                raise PydanticCustomError(
                    "value_error",
                    "algorithm.teacher_top_k: the job has no teacher (roles.teacher.path)",
                    {"way_out": "algorithm.teacher_top_k=0"},
                )
            return self
        if not self.has_rollouts:
            raise ValueError(
                f"roles.teacher with {self.algorithm.name}, which learns from answers in the data: distillation "
                f"estimates KL(policy || teacher) on the policy's own samples. algorithm.name=grpo has them; sft "
                "learns from a teacher's answers without roles.teacher"
            )
        if not self.algorithm.weighs_rollouts:
            raise PydanticCustomError(
                "value_error",
                f"roles.teacher with {self.algorithm.name}, which compares whole answers: distillation weighs each "
                f"token by how far the policy has moved since it was sampled, which these losses do not compute",
                {"way_out": f"algorithm.name=grpo weighs each token; roles.teacher.{key}=null leaves the teacher out"},
            )
        return self

    @model_validator(mode="after")
    def _scorer_is_not_judged(self) -> Self:
        if self.algorithm.declaration.trains_scalar and (self.rewards or self.roles.paths or self.training.lora):
            raise ValueError(
                f"{self.algorithm.name} learns only from pairs and saves a full model: rewards, roles with paths "
                f"and training.lora do not apply"
            )
        return self

    @model_validator(mode="after")
    def _buffer_holds_a_step(self) -> Self:
        capacity, count = self.placement.max_buffered_groups, self.workload.num_prompts_per_step
        if capacity is not None and capacity < count:
            raise ValueError(
                f"placement.max_buffered_groups = {capacity} must hold one step's prompts, "
                f"workload.num_prompts_per_step = {count}"
            )
        return self

    @model_validator(mode="after")
    def _penalty_begins_within_the_limit(self) -> Self:
        if self.algorithm.overlong_buffer > self.workload.max_response_len:
            raise ValueError(
                f"algorithm.overlong_buffer = {self.algorithm.overlong_buffer} must be at most "
                f"workload.max_response_len = {self.workload.max_response_len}"
            )
        return self

    @model_validator(mode="after")
    def _turns_end_by_themselves(self) -> Self:
        if self.has_turns and (self.controls.forces_lengths or self.workload.ignores_eos):
            raise ValueError(
                "rollout.environment answers when a turn has ended: controls.forces_lengths and workload.ignores_eos "
                "leave the policy no way to end one"
            )
        return self

    @model_validator(mode="after")
    def _agents_share_advantages(self) -> Self:
        declared = self.algorithm.declaration
        differs = declared.has_value or declared.joins_rollouts or self.algorithm.has_kl_in_reward
        if self.rollout.environment.agent is not None and (differs or self.algorithm.gamma != 1):
            raise ValueError(
                f"rollout.environment.agent: an agent's conversations share one advantage, which {self.algorithm.name} "
                "with these settings does not have: use algorithm.name=grpo, with algorithm.gamma=1 and no KL in the "
                "reward"
            )
        return self

    @model_validator(mode="after")
    def _shuffled_rewards_are_used(self) -> Self:
        if self.controls.shuffle_rewards and self.algorithm.declaration.given == "answer":
            raise ValueError(
                f"controls.shuffle_rewards with {self.algorithm.name}, which learns from answers and no rewards: "
                "its control is algorithm.learning_rate=0"
            )
        return self

    @model_validator(mode="after")
    def _longest_fits_a_micro_batch(self) -> Self:
        work, tokens = self.workload, self.training.max_tokens_per_micro_batch
        if tokens == "auto":
            if work.micro_batch_size_per_gpu == "auto":
                return self
            tokens = work.micro_batch_size_per_gpu * work.max_seq_len
        if tokens < work.max_seq_len:
            raise ValueError(
                f"training.max_tokens_per_micro_batch = {tokens} must hold one longest "
                f"sequence, workload.max_prompt_len + max_response_len = {work.max_seq_len}"
            )
        if tokens < self.sequences_per_unit * work.max_seq_len:
            raise ValueError(
                f"a micro-batch of {tokens} tokens must hold two longest sequences, for "
                f"{self.algorithm.name} compares them: workload.micro_batch_size_per_gpu of at least 2, or "
                f"training.max_tokens_per_micro_batch of {2 * work.max_seq_len}"
            )
        return self

    @model_validator(mode="after")
    def _scoring_passes_have_a_size(self) -> Self:
        longest = self.workload.max_seq_len
        for role in (role for role in Role if role is not Role.VERIFIER):
            size, tokens = self.scoring.get_pass(role).sizes
            if tokens == "auto":
                continue
            key = f"scoring.{role}.max_tokens_per_micro_batch"
            if size != "auto":
                raise PydanticCustomError(
                    "value_error",
                    f"scoring.{role}.micro_batch_size_per_gpu = {size} and {key} = {tokens} both size a pass",
                    {"way_out": f"{key}=auto"},
                )
            if tokens < longest:
                raise PydanticCustomError(
                    "value_error",
                    f"{key} = {tokens} must hold one longest sequence, workload.max_prompt_len + max_response_len = "
                    f"{longest}",
                    {"way_out": f"{key}={longest}"},
                )
        return self

    @model_validator(mode="after")
    def _watched_metrics_exist(self) -> Self:
        checkpoints, stopping = self.checkpoints, self.early_stopping
        known = (*(evaluation.metric for evaluation in self.evaluations), self.progress_metric)
        watched = {"checkpoints.best_metric": (checkpoints.best_metric, checkpoints.best_mode)}
        if stopping is not None:
            watched["early_stopping.metric"] = (stopping.metric, stopping.mode)
        for key, (metric, mode) in watched.items():
            if metric == "policy/loss" and mode == "max":
                mode_key = "checkpoints.best_mode" if "best" in key else "early_stopping.mode"
                raise ValueError(f"{key} = {metric}: a lower loss is better, so {mode_key} must be min")
            if metric is not None and self.data is not None and metric not in known:
                raise ValueError(
                    f"{key} = {metric}: the job's metrics to watch are {', '.join(known)}.{did_you_mean(metric, known)}"
                )
        if checkpoints.exports_policy and not checkpoints.every:
            raise ValueError("checkpoints.exports_policy: checkpoints.every is 0, so that there is nothing to export")
        if checkpoints.best_metric is None:
            return self
        if not checkpoints.every:
            raise ValueError(
                "checkpoints.best_metric: checkpoints.every is 0, so that there are no checkpoints to keep"
            )
        if checkpoints.best_metric != self.progress_metric and self.workload.evaluate_every % checkpoints.every:
            raise ValueError(
                f"checkpoints.best_metric: workload.evaluate_every = {self.workload.evaluate_every} must be a multiple "
                f"of checkpoints.every = {checkpoints.every}, so that every evaluated step has a checkpoint"
            )
        return self

    @model_validator(mode="after")
    def _roles_are_used(self) -> Self:
        if self.roles.value != ValueSpec.create_default() and not self.algorithm.declaration.has_value:
            having = ", ".join(name for name, declared in ALGORITHMS.items() if declared.has_value)
            raise ValueError(f"roles.value: {self.algorithm.name} has no value model; {having} has")
        if self.algorithm.value_warmup_steps and self.roles.value.shares_backbone:
            raise ValueError("algorithm.value_warmup_steps: a value head on the policy's backbone is trained with it")
        reference = self.roles.reference
        if (reference.path or reference.adapter) is not None and not self.algorithm.kl_coef:
            raise ValueError("roles.reference: algorithm.kl_coef is 0, so that nothing reads the reference")
        for role in (Role.REFERENCE, Role.TEACHER):
            if self.training.lora is None and getattr(self.roles, role).adapter is not None:
                raise ValueError(
                    f"roles.{role}.adapter: adapters of roles need the frozen base of training.lora, and there is "
                    f"none. training.lora={{rank: 16}} trains one, roles.{role}.path=FOLDER is a separate model"
                )
        return self

    @model_validator(mode="after")
    def _engines_of_a_step_are_whole(self) -> Self:
        if self.release.serves:
            return self
        for key, value in {"rollout.pp": self.rollout.pp, "rollout.cp": self.rollout.cp}.items():
            if value > 1:
                raise ValueError(f"{key} = {value}: engines of an RL step have one; {key}=1, or framework=vllm serves")
        if self.workload.num_concurrent_requests is not None:
            raise ValueError(
                f"workload.num_concurrent_requests = {self.workload.num_concurrent_requests}: an RL step has "
                f"num_prompts_per_step x num_samples_per_prompt; leave it out, or framework=vllm serves"
            )
        return self

    @model_validator(mode="after")
    def _rewards_differ_in_name(self) -> Self:
        labels = [reward.label for reward in self.rewards]
        if len(set(labels)) < len(labels):
            raise ValueError(
                f"rewards: each name (by default the kind) occurs at most once, these are {', '.join(labels)}"
            )
        return self

    @model_validator(mode="after")
    def _cpu_host_runs_rlplan(self) -> Self:
        framework, backend = self.framework, self.training.backend
        is_for_another = not self.release.is_rlplan or backend not in ("auto", "deepspeed")
        if is_for_another and self.is_on_cpu_host:
            named = f"training.backend = {backend}" if framework == "auto" else f"framework = {framework}"
            raise PydanticCustomError(
                "value_error",
                "{named}: on a CPU host only rlplan's own runtime trains; hardware.profile is {profile}",
                {
                    "named": named,
                    "profile": self.hardware.profile,
                    "way_out": "framework=rlplan training.backend=auto, or GPUs such as hardware=8xH100",
                },
            )
        return self

    @model_validator(mode="after")
    def _trainer_can_combine(self) -> Self:
        if self.is_for_rlplan and not self.is_on_gpus:  # on GPUs planner/checks/trainers.py reports it with the key
            for contradiction in self.training.combination().contradictions():
                raise ValueError(contradiction.reason)
        return self

    @model_validator(mode="after")
    def _prefill_fits_a_batch(self) -> Self:
        tokens, seqs = self.rollout.max_num_batched_tokens, self.rollout.max_num_seqs
        if tokens == "auto":
            return self
        if tokens < self.workload.max_seq_len and not self.is_on_gpus:
            raise ValueError(
                f"rollout.max_num_batched_tokens = {tokens} must hold one longest "
                f"sequence, workload.max_prompt_len + max_response_len = {self.workload.max_seq_len}"
            )
        if seqs != "auto" and tokens < seqs:
            raise ValueError(
                f"rollout.max_num_batched_tokens = {tokens} must be at least "
                f"rollout.max_num_seqs = {seqs}: each running sequence decodes one token a batch"
            )
        return self

    def map_paths(
        self,
        change: Callable[[str], str],
        change_model: Callable[[str], str] | None = None,
        change_data: Callable[[str], str] | None = None,
    ) -> Self:
        """A copy with every path passed through `change`, paths of models through `change_model`, and paths of data
        through `change_data`. Data sets on the hub stay.
        """
        move_model = change_model or change

        def move_data(place: str) -> str:
            return place if place.startswith(HUB_DATA) else (change_data or change)(place)

        policy = self.policy.model_copy(update={"path": move_model(self.policy.path)})
        file, _, name = (self.algorithm.path or "").rpartition(":")
        algorithm = self.algorithm.model_copy(update={"path": f"{change(file)}:{name}" if file else None})
        roles = self.roles.map_paths(move_model, change)
        changed: dict[str, object] = {"policy": policy, "algorithm": algorithm, "roles": roles}
        if (lora := self.training.lora) is not None and lora.path is not None:
            moved = lora.model_copy(update={"path": change(lora.path)})
            changed["training"] = self.training.model_copy(update={"lora": moved})
        if self.data is not None:
            changed["data"] = self.data.map_paths(move_data)
        changed["rewards"] = tuple(_move_reward(reward, change) for reward in self.rewards)
        rollout: dict[str, object] = {"environment": self.rollout.environment.map_paths(change)}
        if self.rollout.base_path is not None:
            rollout["base_path"] = move_model(self.rollout.base_path)
        changed["rollout"] = self.rollout.model_copy(update=rollout)
        return self.model_copy(update=changed)

    def resolve_paths(self, folder: Path) -> Self:
        """A copy with absolute paths, read relative to `folder`; a bundled model's id becomes its folder in
        `models/`.
        """
        root = folder.resolve()

        def place(path: str) -> str:
            return os.path.normpath(root / path)

        def place_of_model(path: str) -> str:
            is_id = path in load_catalogue() and not (root / path).exists()
            return place(f"{MODELS}/{path}" if is_id else str(Path(path).expanduser()))

        return self.map_paths(place, place_of_model, lambda path: find_hub_address(path, root) or place(path))

    def make_relative(self, folder: Path) -> Self:
        """A copy with paths relative to `folder`, for writing the job into it."""
        return self.map_paths(lambda path: os.path.relpath(path, folder.resolve()))


def _move_reward(reward: RewardSpec, change: Callable[[str], str]) -> RewardSpec:
    """A copy of a reward with its file's path changed, if it has one."""
    if not isinstance(reward, FunctionSpec):
        return reward
    file, _, name = reward.path.rpartition(":")
    return reward.model_copy(update={"path": f"{change(file)}:{name}"})
