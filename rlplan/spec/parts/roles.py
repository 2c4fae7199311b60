"""Roles: the models beside the policy, where they come from, and who holds each in its memory.

In: the `roles:` part of a job, a model's folder. Out: frozen values; the shape of a role's model.
Left out: which roles an algorithm trains (algorithm.py), and how a role computes (runtime/workers).
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
"""In place of an adapter's folder: the frozen base alone."""
START_ADAPTER = "start"
"""In place of an adapter's folder: a frozen copy of the adapter that training starts from."""
OnBase = TypeVar("OnBase", "ReferenceSpec", "TeacherSpec")


def _either(spec: OnBase, role: Role) -> OnBase:
    if spec.path is not None and spec.adapter is not None:
        raise ValueError(
            f"roles.{role}.path is a model of its own, roles.{role}.adapter one on the policy's base: drop one"
        )
    return spec


class ReferenceSpec(Spec):
    """The KL anchor."""

    path: str | None = None
    """Its own model; None for the policy as it starts."""
    adapter: str | None = None
    """A folder in PEFT's layout with its adapter on the policy's frozen base; `none` for that base alone; `start` for a
    copy of the adapter as training starts (AgileRL); None for the policy as it starts."""
    dtype: Dtype | Auto = "auto"
    """What its weights are kept in; `auto`: as the policy's passes have them."""
    is_precomputed: bool = False
    """Its log-probs stand beside the given answers before training begins, so that nothing loads it."""

    @model_validator(mode="after")
    def _one_model(self) -> "ReferenceSpec":
        return _either(self, Role.REFERENCE)


class RewardModelSpec(Spec):
    """A learned reward: a sequence classifier with one label, read at the last token. Without a path there is none."""

    path: str | None = None
    weight: float = 1.0
    """Its factor in a rollout's reward, beside the `rewards:`."""
    max_seq_len: int | None = Field(default=None, ge=1)
    """Tokens that it reads where it has another tokenizer than the policy; longer texts lose their beginning."""


class ValueTrainingSpec(Spec):
    """How the value model is laid out and trained where that is not as the policy; `auto` is as the policy."""

    zero_stage: Literal["auto", 0, 1, 2, 3] = "auto"
    """The ZeRO stage of its states, as training.zero_stage counts it."""
    gradient_checkpointing: bool | Auto = "auto"
    """Whether its activations are computed again in the backward pass."""
    micro_batch_size_per_gpu: Count | Auto = "auto"
    """Rollouts of a training pass of a rank, counted at their longest."""
    max_tokens_per_micro_batch: Count | Auto = "auto"
    """Tokens that are packed into one training pass."""
    ulysses: Ranks = "auto"
    """Ranks that share a pass, each with a part of its tokens."""
    tp: Ranks = "auto"
    """Ranks that share a pass, each with a part of every layer."""
    pp: Ranks = "auto"
    """Pipeline stages."""
    cp: Ranks = "auto"
    """Ranks that share a sequence's attention."""
    ep: Ranks = "auto"
    """Ranks that share the experts of a layer."""


class ValueSpec(Spec):
    """The value model."""

    path: str | None = None
    """Where it starts; None for the policy's start weights."""
    shares_backbone: bool = False
    """It is one more head on the policy, trained with it."""
    training: ValueTrainingSpec = ValueTrainingSpec.by_default()
    """Its own layout and passes."""

    @model_validator(mode="after")
    def _one_backbone(self) -> "ValueSpec":
        if self.path is not None and self.shares_backbone:
            raise ValueError("a value head on the policy's backbone has no path of its own: drop one of the two keys")
        if self.shares_backbone and self.training != ValueTrainingSpec.by_default():
            raise ValueError("a value head on the policy's backbone is trained with it: drop roles.value.training")
        return self


class TeacherSpec(Spec):
    """A model that is distilled into the policy on the policy's own samples: algorithm.teacher_coef weighs the reverse
    KL, KL(policy || teacher). Without a path or an adapter there is no teacher."""

    path: str | None = None
    adapter: str | None = None
    """A folder in PEFT's layout with its adapter on the policy's frozen base."""

    @model_validator(mode="after")
    def _one_model(self) -> "TeacherSpec":
        return _either(self, Role.TEACHER)


class RolesSpec(Spec):
    """The `roles:` part of a job. A reward model and a teacher are there when they have a path."""

    reference: ReferenceSpec = ReferenceSpec.by_default()
    reward: RewardModelSpec = RewardModelSpec.by_default()
    value: ValueSpec = ValueSpec.by_default()
    teacher: TeacherSpec = TeacherSpec.by_default()

    @property
    def paths(self) -> dict[Role, str]:
        """The folder of every role that has one of its own."""
        named = {
            Role.REFERENCE: self.reference.path,
            Role.REWARD: self.reward.path,
            Role.VALUE: self.value.path,
            Role.TEACHER: self.teacher.path,
        }
        return {role: path for role, path in named.items() if path is not None}

    @property
    def adapters(self) -> dict[Role, str]:
        """The folder of every role's adapter on the policy's base that the job names."""
        named = {Role.REFERENCE: self.reference.adapter, Role.TEACHER: self.teacher.adapter}
        return {role: folder for role, folder in named.items() if folder not in (None, NO_ADAPTER, START_ADAPTER)}

    def with_paths(self, of_model: Callable[[str], str], of_adapter: Callable[[str], str]) -> "RolesSpec":
        """The same roles in other folders."""
        places = {role: {"path": of_model(path)} for role, path in self.paths.items()}
        places |= {role: {"adapter": of_adapter(folder)} for role, folder in self.adapters.items()}
        return self.model_copy(
            update={role.value: getattr(self, role.value).model_copy(update=place) for role, place in places.items()}
        )


class ScalarHeadModel(ModelSpec):
    """A decoder whose head gives one number a token: a value or a reward.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> model = find_model("meta-llama/Llama-3.1-8B")
    >>> model.num_parameters - with_scalar_head(model).num_parameters  # 128255 * 4096
    525332480
    """

    @cached_property
    def tensors(self) -> tuple[Parameter, ...]:
        """Every tensor; the language head is one row of h."""
        whole = super().tensors
        kept = tuple(tensor for tensor in whole if tensor.component is not Component.HEAD)
        return (*kept, Parameter(SCALAR_HEAD, (1, self.hidden_size), Component.HEAD))

    @property
    def head_width(self) -> int:
        """Numbers that the head gives for a token: one."""
        return 1


@lru_cache(maxsize=64)
def with_scalar_head(model: ModelSpec) -> ScalarHeadModel:
    """The same decoder with a scalar head. A tied table then is the embedding alone."""
    return ScalarHeadModel(**{**model.model_dump(), "has_tied_embeddings": False})


def load_role_model(role: Role, path: str, *, needs_tokens: int, where: str) -> ModelSpec:
    """The shape of a role's model. needs_tokens: of the longest sequence that it reads. Raises: SpecError."""
    has_scalar_head = role in (Role.VALUE, Role.REWARD)
    model = with_scalar_head(load_scalar_base(Path(path))) if has_scalar_head else load_model(Path(path))
    if needs_tokens > model.max_position_embeddings:
        raise SpecError(
            f"the {role} reads up to {needs_tokens} tokens, its model's limit is {model.max_position_embeddings}",
            where=where,
            rule="at most max_position_embeddings of the model's config.json",
            way_out="shorten workload.max_prompt_len or max_response_len, or take a model with a longer context",
        )
    return model
