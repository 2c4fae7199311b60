"""The roles of a job: who is trained, who only reads, and what model each of them is.

In: the parts of a job. Out: roles, parameters, shapes. Left out: where roles lie (dataflow/placements.py).
"""

import json
from functools import lru_cache
from pathlib import Path
from typing import Literal

from rlplan.errors import SpecError
from rlplan.frameworks.profile import FrameworkRelease, find_release
from rlplan.spec.hardware.catalogue import is_cpu_host
from rlplan.spec.job_parts import JobParts
from rlplan.spec.model import (
    ModelSpec,
    Parameter,
    load_model,
    load_scalar_base,
    model_from_config,
    with_positions,
)
from rlplan.spec.models.adapters import adapted_modules, lora_parameters
from rlplan.spec.models.catalogue import resolve_model
from rlplan.spec.parts.adapter_files import check_same_adapter, held_beside, read_adapter
from rlplan.spec.parts.rewards import Evaluation, evaluations_of, ranking_evaluations, runs_elsewhere
from rlplan.spec.parts.roles import START_ADAPTER, load_role_model, with_scalar_head
from rlplan.spec.parts.training import LoraSpec, check_sharing
from rlplan.units import ceil_div
from rlplan.vocabulary import Backend, Role


@lru_cache(maxsize=64)
def _model_of(config: str) -> ModelSpec:
    return model_from_config(json.loads(config), where="policy.config")


class JobRoles(JobParts):
    """What follows from the parts of a job about its roles, its rollouts and its devices."""

    @property
    def num_generated_per_prompt(self) -> int:
        """Rollouts of a prompt that engines make, the baselines that are not trained on among them."""
        return self.workload.num_samples_per_prompt + self.algorithm.declaration.num_baseline_samples

    @property
    def num_generated_per_step(self) -> int:
        """Rollouts of a step that engines make."""
        prompts = self.workload.num_generated_prompts_per_step or self.workload.num_prompts_per_step
        return prompts * self.num_generated_per_prompt

    @property
    def has_rollouts(self) -> bool:
        """Whether answers are generated, and not given."""
        return self.algorithm.declaration.has_rollouts

    @property
    def has_engine(self) -> bool:
        """Whether there is one, to generate rollouts or, on a CPU host, for evaluations alone."""
        return self.has_rollouts or (not self.is_on_gpus and not self.algorithm.declaration.trains_scalar)

    def num_trained_by(self, num_shares: int) -> int:
        """Rollouts of a mini-batch that the largest of so many shares of it trains on; a pair lies in one share."""
        return self.sequences_per_unit * ceil_div(self.num_units_per_mini_batch, num_shares)

    @property
    def num_units_per_mini_batch(self) -> int:
        """Rollouts, or pairs of them, that a mini-batch trains on and that are dealt out one by one."""
        work = self.workload
        trained = self.algorithm.declaration.num_trained(work.rollouts_per_mini_batch, work.num_samples_per_prompt)
        return trained // self.sequences_per_unit

    @property
    def sequences_per_unit(self) -> int:
        """Rollouts that must meet in one pass: the two of a pair, else one."""
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
        """How often zero-variance groups are replaced: never where rules alone cannot tell which are."""
        return 0 if Role.REWARD in self.scored_roles or self.has_turns else self.algorithm.max_refills

    @property
    def takes_images(self) -> bool:
        """Whether prompts have images."""
        return self.data is not None and self.data.image_column is not None

    @property
    def has_turns(self) -> bool:
        """Whether an environment or tools answer the policy, so that a rollout may have several turns."""
        return self.rollout.environment.is_given

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """The metrics over the held-out prompts; none where only a learned reward judges."""
        work = self.workload
        heldout_sets = ("",) if self.data is None else tuple(self.data.heldout_sets) or ("",)
        if self.algorithm.declaration.trains_scalar:
            return ranking_evaluations(heldout_sets)
        return evaluations_of(
            self.rewards,
            has_environment=self.rollout.environment.has_environment,
            heldout_sets=heldout_sets,
            num_samples=work.num_evaluation_samples if work.evaluation_temperature else 0,
        )

    @property
    def num_evaluated_prompts(self) -> int:
        """Held-out prompts of an evaluation, at most: of all data sets."""
        return self.workload.num_heldout_prompts * (1 if self.data is None else max(1, len(self.data.heldout_sets)))

    @property
    def num_evaluated_responses(self) -> int:
        """Responses of all of them; given ones where those are scored."""
        is_given = self.algorithm.declaration.trains_scalar
        return self.num_evaluated_prompts * (2 if is_given else self.workload.num_evaluation_samples)

    @property
    def has_reward_processes(self) -> bool:
        """Whether judging takes processes of its own, beside the driver."""
        return any(runs_elsewhere(reward) for reward in self.rewards)

    @property
    def named_models(self) -> dict[str, str]:
        """Every model that the job names, by its key."""
        base = self.rollout.base_path
        roles = {f"roles.{role}.path": path for role, path in self.roles.paths.items()}
        return {"policy.path": self.policy.path, **roles, **({"rollout.base_path": base} if base is not None else {})}

    def load_model(self) -> ModelSpec:
        """The policy's shape. Raises: SpecError when the folder, its config or the length limit is wrong.

        On GPUs of any known family: whether the runtime takes it is a rule (planner/rules.py).
        """
        path = self.policy.path
        is_scalar = self.algorithm.declaration.trains_scalar
        load = load_scalar_base if is_scalar else load_model
        if self.policy.config is not None:
            model = _model_of(json.dumps(self.policy.config, sort_keys=True))
        else:
            model = resolve_model(path, where="policy.path") if self.is_on_gpus else load(Path(path))
        model = with_scalar_head(model) if is_scalar else model
        if self.policy.max_position_embeddings is not None:
            model = with_positions(model, self.policy.max_position_embeddings)
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
        has_head = Role.VALUE in self.scored_roles and self.holder_of(Role.VALUE) is Role.POLICY
        head = (Parameter("value_head.weight", (1, model.hidden_size)),) if has_head else ()
        adapters = self.adapter_parameters(model)
        frozen = (*model.parameters, *self.frozen_adapter_parameters(model)) if adapters else ()
        return (*(adapters or model.parameters), *head), frozen

    def adapter_parameters(self, model: ModelSpec) -> tuple[Parameter, ...]:
        """The adapters beside a model's linear layers; none where the model itself is trained. Raises: SpecError."""
        lora = self.training.lora
        if lora is None:
            return ()
        if lora.path is not None:
            check_same_adapter(model, lora, read_adapter(Path(lora.path), where="training.lora.path"))
        return lora_parameters(model, lora.rank, lora.target_modules)

    @property
    def frozen_adapters(self) -> dict[Role, LoraSpec]:
        """Of each role that computes with an adapter of its own on the trained adapter's base: what it is.

        Raises: SpecError.
        """
        lora, reference = self.training.lora, self.roles.reference
        if lora is None:
            return {}
        folders = self.roles.adapters
        if lora.path is not None and reference.path is None and reference.adapter is None:
            folders[Role.REFERENCE] = lora.path
        held = [role for role in self.scored_roles if role in folders]
        found = {role: read_adapter(Path(folders[role]), where=f"roles.{role}.adapter") for role in held}
        if reference.adapter == START_ADAPTER and Role.REFERENCE in self.scored_roles:
            found[Role.REFERENCE] = lora
        return found

    def frozen_adapter_parameters(self, model: ModelSpec) -> tuple[Parameter, ...]:
        """What these roles' adapters hold beside a model's linear layers. Raises: SpecError."""
        return held_beside(model, {role.value: adapter for role, adapter in self.frozen_adapters.items()})

    def adapted_modules(self, model: ModelSpec) -> list[str]:
        """Names of the linear layers with an adapter, as PEFT's `target_modules` has them."""
        return adapted_modules(self.adapter_parameters(model))

    @property
    def scored_roles(self) -> tuple[Role, ...]:
        """Roles that score a finished rollout, in the framework's order."""
        step, algorithm = self.release.step, self.algorithm
        has_kl = algorithm.kl_coef > 0 or (step.reference == "always" and self.has_rollouts)
        wanted = {
            Role.POLICY: self.recomputes_log_probs,
            Role.VALUE: algorithm.declaration.has_value,
            Role.REFERENCE: has_kl and not self.roles.reference.is_precomputed,
            Role.REWARD: Role.REWARD in self.roles.paths,
            Role.TEACHER: Role.TEACHER in self.roles.paths or Role.TEACHER in self.roles.adapters,
        }
        order = (*step.order, *(role for role in wanted if role not in step.order))
        return tuple(role for role in order if wanted.get(role))

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
        if role is Role.TEACHER and role in self.roles.adapters:
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
            if role in self.trained_roles and self.is_for_rlplan:
                check_sharing(self.training, models[role], f"roles.{role}.path")
        return models

    @property
    def device_kind(self) -> Literal["cpu", "cuda"]:
        """What a device of the job is: a slot of a CPU host, or a GPU. Raises: SpecError for an unknown profile."""
        return "cpu" if is_cpu_host(self.hardware.profile, where="hardware.profile") else "cuda"

    @property
    def release(self) -> FrameworkRelease:
        """The framework that runs the job, at its release; where the job leaves it open, the one that it comes to on
        this machine unless rlplan's own runtime cannot run the models.
        """
        if self.framework != "auto":
            return find_release(self.framework)
        return find_release("verl" if self.training.backend in ("fsdp2", "megatron") else "rlplan")

    @property
    def backend(self) -> Backend:
        """The trainer: as the job names it, else the framework's own. Raises: SpecError for an unreadable model."""
        asked = self.training.backend
        if asked != "auto":
            return asked
        release = self.release
        has_experts = len(release.backends) > 1 and self.load_model().experts is not None
        return release.backend_for(has_experts=has_experts)

    @property
    def is_for_rlplan(self) -> bool:
        """Whether rlplan's own runtime runs the job; planning decides where a job for GPUs leaves that open."""
        if self.framework == "auto" and self.training.backend == "auto":
            return not self.is_on_gpus
        return self.release.is_rlplan

    @property
    def recomputes_log_probs(self) -> bool:
        """Whether a pass of the trainer takes the policy's log-probs of finished rollouts before the step's updates.

        rlplan's own runtime needs it where a step has several updates, for ratios of the later ones compare with the
        log-probs before the step (the first update's own pass gives them), and where the KL is in the rewards, which
        are complete before that pass. The engine's log-probs are of other kernels, and of older weights where rollouts
        are stale: with them the KL would depend on the number of updates.
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
        """Whether the pass that takes the policy's log-probs takes entropies too."""
        asked = self.scoring.has_entropy
        return self.release.step.has_entropy if asked == "auto" else asked

    @property
    def is_on_gpus(self) -> bool:
        """Whether devices are GPUs; of an unknown profile, which is said where it is read, not."""
        return self._known_device_kind == "cuda"

    @property
    def is_on_cpu_host(self) -> bool:
        """Whether devices are slots of a CPU host; of an unknown profile not."""
        return self._known_device_kind == "cpu"

    @property
    def _known_device_kind(self) -> Literal["cpu", "cuda", ""]:
        try:
            return self.device_kind
        except SpecError:
            return ""
