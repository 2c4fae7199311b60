"""Roles: the models besides the policy, where they come from, and which processes compute them; the
batch sizes with which they score finished rollouts.

In: the `roles:` and `scoring:` parts of a job, a model's folder. Out: frozen values; the shape of a role's model. Left
out: which roles an algorithm trains (algorithm.py), and how a role computes (runtime/workers).
"""

from collections.abc import Callable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field, model_validator

from rlplan.errors import SpecError
from rlplan.spec.base import Auto, Spec
from rlplan.spec.model import Component, ModelSpec, Parameter, load_model, load_scalar_base
from rlplan.spec.parts.training import Ranks
from rlplan.spec.parts.workload import Count
from rlplan.vocabulary import Dtype, Role

SCALAR_HEAD = "score.weight"
"""The head of a value or reward model in transformers (`...ForSequenceClassification`, one label, no bias)."""


NO_ADAPTER = "none"
"""Value of `adapter` for a reference that is the frozen base without an adapter."""
START_ADAPTER = "start"
"""Value of `adapter` for a reference that is a frozen copy of the adapter that training starts from."""
OnBase = TypeVar("OnBase", "ReferenceSpec", "TeacherSpec")


def _either(spec: OnBase, role: Role) -> OnBase:
    if spec.path is not None and spec.adapter is not None:
        raise ValueError(
            f"roles.{role}.path is a separate model, roles.{role}.adapter an adapter on the policy's base: drop one"
        )
    return spec


class ReferenceSpec(Spec):
    """The reference model of the KL penalty."""

    path: str | None = None
    """Folder of a separate reference model; None: the policy's start weights."""
    adapter: str | None = None
    """Folder of a PEFT adapter on the policy's frozen base, used as the reference. `none`: the base without an adapter.
    `start`: a copy of the adapter that training starts from (AgileRL). None: the policy as it starts."""
    dtype: Dtype | Auto = "auto"
    """Data type of the reference's weights; `auto`: the policy's compute type."""
    is_precomputed: bool = False
    """Whether the reference's log-probs of given answers are computed before training, so that no reference model is
    loaded (TRL's `precompute_ref_log_probs`)."""

    @model_validator(mode="after")
    def _one_model(self) -> "ReferenceSpec":
        return _either(self, Role.REFERENCE)


class RewardModelSpec(Spec):
    """A learned reward: a sequence classifier with one label, read at the last token. Without a path there is none."""

    path: str | None = None
    """Folder of the reward model; None: no learned reward."""
    weight: float = 1.0
    """Weight of the learned reward, added to the weighted sum of `rewards:`."""
    max_seq_len: int | None = Field(default=None, ge=1)
    """Maximum sequence length in tokens if the reward model has another tokenizer than the policy; longer texts are
    truncated at their start."""


class ValueTrainingSpec(Spec):
    """Training settings of the value model where they differ from the policy's; `auto`: same as the policy."""

    zero_stage: Literal["auto", 0, 1, 2, 3] = "auto"
    """ZeRO stage of the value model's states, as in training.zero_stage."""
    gradient_checkpointing: bool | Auto = "auto"
    """Whether activations are recomputed in the backward pass."""
    micro_batch_size_per_gpu: Count | Auto = "auto"
    """Rollouts per training micro-batch on each rank, counted at maximum length."""
    max_tokens_per_micro_batch: Count | Auto = "auto"
    """Tokens packed into one training micro-batch."""
    ulysses: Ranks = "auto"
    """Ulysses sequence-parallel size."""
    tp: Ranks = "auto"
    """Tensor-parallel size."""
    pp: Ranks = "auto"
    """Pipeline-parallel size."""
    cp: Ranks = "auto"
    """Context-parallel size."""
    ep: Ranks = "auto"
    """Expert-parallel size."""


class ValueSpec(Spec):
    """The value model (critic)."""

    path: str | None = None
    """Folder of the value model's start weights; None: the policy's start weights."""
    shares_backbone: bool = False
    """Whether the value model is a second head on the policy, trained together with it."""
    training: ValueTrainingSpec = ValueTrainingSpec.create_default()
    """Layout and batch sizes of the value model's training."""

    @model_validator(mode="after")
    def _one_backbone(self) -> "ValueSpec":
        if self.path is not None and self.shares_backbone:
            raise ValueError("a value head on the policy's backbone cannot have a path: drop one of the two keys")
        if self.shares_backbone and self.training != ValueTrainingSpec.create_default():
            raise ValueError("a value head on the policy's backbone is trained with it: drop roles.value.training")
        return self


class TeacherSpec(Spec):
    """A teacher that is distilled into the policy on the policy's own samples (on-policy distillation).
    algorithm.teacher_coef weighs the reverse KL, KL(policy || teacher). Without a path or an adapter there is no
    teacher.
    """

    path: str | None = None
    """Folder of a separate teacher model."""
    adapter: str | None = None
    """Folder of a PEFT adapter on the policy's frozen base, used as the teacher."""

    @model_validator(mode="after")
    def _one_model(self) -> "TeacherSpec":
        return _either(self, Role.TEACHER)


class RolesSpec(Spec):
    """The `roles:` part of a job. A reward model and a teacher exist only if they have a path."""

    reference: ReferenceSpec = ReferenceSpec.create_default()
    """The reference model of the KL penalty."""
    reward: RewardModelSpec = RewardModelSpec.create_default()
    """The learned reward."""
    value: ValueSpec = ValueSpec.create_default()
    """The value model (critic)."""
    teacher: TeacherSpec = TeacherSpec.create_default()
    """The teacher of on-policy distillation."""

    @property
    def paths(self) -> dict[Role, str]:
        """Folders of roles that have a model of their own."""
        named = {
            Role.REFERENCE: self.reference.path,
            Role.REWARD: self.reward.path,
            Role.VALUE: self.value.path,
            Role.TEACHER: self.teacher.path,
        }
        return {role: path for role, path in named.items() if path is not None}

    @property
    def adapters(self) -> dict[Role, str]:
        """Folders of adapters on the policy's base that roles use as their model."""
        named = {Role.REFERENCE: self.reference.adapter, Role.TEACHER: self.teacher.adapter}
        return {role: folder for role, folder in named.items() if folder not in (None, NO_ADAPTER, START_ADAPTER)}

    def map_paths(self, of_model: Callable[[str], str], of_adapter: Callable[[str], str]) -> "RolesSpec":
        """A copy with every model path changed by `of_model` and every adapter folder by `of_adapter`."""
        places = {role: {"path": of_model(path)} for role, path in self.paths.items()}
        places |= {role: {"adapter": of_adapter(folder)} for role, folder in self.adapters.items()}
        return self.model_copy(
            update={role.value: getattr(self, role.value).model_copy(update=place) for role, place in places.items()}
        )


class ScalarHeadModel(ModelSpec):
    """A decoder whose head outputs one number per token: a value or a reward.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> model = find_model("meta-llama/Llama-3.1-8B")
    >>> model.num_parameters - replace_head(model).num_parameters  # 128255 * 4096
    525332480
    """

    @cached_property
    def tensors(self) -> tuple[Parameter, ...]:
        """Every tensor; the language head is replaced by one row of h."""
        all_tensors = super().tensors
        decoder = tuple(tensor for tensor in all_tensors if tensor.component is not Component.HEAD)
        return (*decoder, Parameter(SCALAR_HEAD, (1, self.hidden_size), Component.HEAD))

    @property
    def head_width(self) -> int:
        """Outputs of the head per token: one."""
        return 1


@lru_cache(maxsize=64)
def replace_head(model: ModelSpec) -> ScalarHeadModel:
    """The same decoder with a scalar head. A tied table then serves only as the embedding."""
    return ScalarHeadModel(**{**model.model_dump(), "has_tied_embeddings": False})


def load_role_model(role: Role, path: str, *, needs_tokens: int, where: str) -> ModelSpec:
    """The shape of a role's model. Raises: SpecError.

    needs_tokens: length of the longest sequence that the model reads.
    """
    has_scalar_head = role in (Role.VALUE, Role.REWARD)
    model = replace_head(load_scalar_base(Path(path))) if has_scalar_head else load_model(Path(path))
    if needs_tokens > model.max_position_embeddings:
        raise SpecError(
            f"the {role} reads up to {needs_tokens} tokens, its model's limit is {model.max_position_embeddings}",
            where=where,
            rule="at most max_position_embeddings of the model's config.json",
            way_out="shorten workload.max_prompt_len or max_response_len, or take a model with a longer context",
        )
    return model


class ScoringPassSpec(Spec):
    """Micro-batch size of a role's scoring passes. At most one of the two keys is set; with neither, the training size
    applies.
    """

    micro_batch_size_per_gpu: Count | Auto = "auto"
    """Rollouts per micro-batch on each rank, counted at maximum length."""
    max_tokens_per_micro_batch: Count | Auto = "auto"
    """Tokens packed into one micro-batch."""

    @property
    def sizes(self) -> tuple[int | Literal["auto"], int | Literal["auto"]]:
        """Rollouts and tokens of a micro-batch."""
        return self.micro_batch_size_per_gpu, self.max_tokens_per_micro_batch

    @property
    def is_stated(self) -> bool:
        """Whether the job sets a size for these passes."""
        return self.sizes != ("auto", "auto")


class ScoringSpec(Spec):
    """The `scoring:` part of a job. `auto` follows the job's framework (rlplan/frameworks)."""

    policy_log_probs: Literal["auto", "always", "never"] = "auto"
    """Whether the trainer recomputes the policy's log-probs of finished rollouts before the step's updates."""
    has_entropy: bool | Auto = "auto"
    """Whether that pass also computes entropies."""
    policy: ScoringPassSpec = ScoringPassSpec.create_default()
    """Micro-batch size of the pass that recomputes the policy's log-probs."""
    reference: ScoringPassSpec = ScoringPassSpec.create_default()
    """Micro-batch size of the reference model."""
    value: ScoringPassSpec = ScoringPassSpec.create_default()
    """Micro-batch size of the value model."""
    reward: ScoringPassSpec = ScoringPassSpec.create_default()
    """Micro-batch size of the reward model."""
    teacher: ScoringPassSpec = ScoringPassSpec.create_default()
    """Micro-batch size of the teacher."""

    def get_pass(self, role: Role) -> ScoringPassSpec:
        """The micro-batch size of a role's scoring passes."""
        sizes: ScoringPassSpec = getattr(self, role.value)
        return sizes
