"""AlgorithmSpec: which algorithm a job trains with, and its numbers.

In: the `algorithm:` part of a job. Out: a frozen value that leads to the algorithm's declaration.
Left out: the declarations (algorithms/, one file each), and the losses that they name (`rlplan.runtime.losses`).
"""

import math
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from rlplan.errors import did_you_mean
from rlplan.spec.algorithms import ALGORITHMS, DEFAULT
from rlplan.spec.base import Spec
from rlplan.spec.declaration import Algorithm

__all__ = ["ALGORITHMS", "Algorithm", "AlgorithmSpec"]

KlEstimator = Literal["k1", "k2", "k3"]
LrScheduler = Literal["constant", "linear", "cosine"]


class AlgorithmSpec(Spec):
    """The `algorithm:` part of a job. Defaults that an algorithm has of its own stand in its declaration."""

    path: str | None = None
    """`file.py:NAME` of a declaration of one's own."""
    custom: dict[str, Any] | None = None
    """What stands at `path`, filled in when the job is read."""
    name: str = DEFAULT
    learning_rate: float = Field(default=1e-6, ge=0)
    lr_scheduler_type: LrScheduler = "constant"
    """How the learning rate goes on behind its warm-up, step by step of RL."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """First steps in which it rises from 0."""
    lr_warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """The same as a part of the steps in which it changes, rounded up."""
    lr_decay_steps: int | None = Field(default=None, ge=1)
    """Steps by which a linear or cosine schedule has ended, its warm-up among them; None for workload.num_steps."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """What a cosine schedule ends at, as a part of learning_rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    gradient_clipping: float = Field(default=1.0, ge=0)
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The importance ratio is kept at or above 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """The importance ratio is kept at or below 1 + clip_high."""
    kl_coef: float = Field(default=0.001, ge=0)
    """Weight of the estimate of KL(policy || reference); 0 does without a reference model."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether the KL term is added to the loss, or taken off the rewards."""
    kl_estimator: KlEstimator = "k3"
    """k1 is log(p/q), k2 its square / 2, k3 q/p - 1 + log(p/q)."""
    teacher_coef: float = Field(default=1.0, ge=0)
    """Weight of the reverse KL, KL(policy || teacher), in the loss, where there is a teacher."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    token_weights: Literal["sequence", "token", "constant"] = "sequence"
    """Whether each sequence counts the same, or each token, or each token as 1 / max_response_len."""
    masks_truncated: bool = False
    """Nothing is learned from responses that were cut off at max_response_len."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Tokens before max_response_len in which a penalty grows from 0 to `overlong_penalty`."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    max_refills: int = Field(default=0, ge=0, le=100)
    """How often a step replaces zero-variance groups by those of new prompts (dynamic sampling); then what is left
    stays."""
    importance: Literal["auto", "none", "truncate", "mask"] = "auto"
    """Correction of engine-trainer mismatch and staleness. A token's loss is weighted with the trainer's probability
    before the step over the engine's. The weight is truncated to, or masked outside of, [importance_low,
    importance_high]; `none` leaves it out. `auto` truncates in 16 bits or less and where rollouts may be stale. The
    clipped ratio never compares with the engine: its denominator is the trainer's own log-prob before the step."""
    importance_low: float = Field(default=0.0, ge=0)
    importance_high: float = Field(default=2.0, gt=0)
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of generalized advantage estimation."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Lambda of generalized advantage estimation."""
    value_clip: float = Field(default=0.2, ge=0)
    """How far a value may move from the one at rollout time; 0 does not clip."""
    value_coef: float = Field(default=0.1, ge=0)
    """Weight of the value loss where the value model shares the policy's backbone."""
    value_learning_rate: float | None = Field(default=None, ge=0)
    """None for the policy's."""
    value_warmup_steps: int = Field(default=0, ge=0)
    """First steps in which the value model alone is trained."""

    @model_validator(mode="before")
    @classmethod
    def _take_the_algorithm_s_defaults(cls, data: Any) -> Any:
        """What the job leaves out is as the algorithm has it."""
        if not isinstance(data, dict):
            return data
        custom = data.get("custom")
        declared = custom if isinstance(custom, dict) else _declared_defaults(data.get("name", DEFAULT))
        defaults = declared.get("defaults", {})
        return {**defaults, **data} if isinstance(defaults, dict) else data

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str, info: ValidationInfo) -> str:
        custom = info.data.get("custom")
        if custom is None and name not in ALGORITHMS:
            raise ValueError(f"known algorithms: {', '.join(ALGORITHMS)}." + did_you_mean(name, ALGORITHMS))
        return name

    @model_validator(mode="after")
    def _the_file_declares_its_name(self) -> "AlgorithmSpec":
        declared = self.declaration.name
        if self.name != declared:
            raise PydanticCustomError(
                "value_error",
                f"algorithm.name is '{self.name}', and the file at algorithm.path declares '{declared}'",
                {"way_out": f"algorithm.name={declared}"},
            )
        return self

    @model_validator(mode="after")
    def _keys_are_used(self) -> "AlgorithmSpec":
        declared = self.declaration
        if self.value_warmup_steps and not declared.has_value:
            raise ValueError(f"algorithm.value_warmup_steps: {self.name} has no value model")
        if self.importance_low >= self.importance_high:
            raise ValueError("algorithm.importance_low must be below algorithm.importance_high")
        if declared.trains_scalar and (self.kl_coef or self.entropy_coef):
            raise ValueError(
                f"algorithm: {self.name} trains no distribution: it has no use for kl_coef or entropy_coef"
            )
        if declared.joins_rollouts and not declared.trains_scalar and not self.kl_coef:
            raise ValueError(f"algorithm.kl_coef is {self.name}'s beta and must be above 0")
        if declared.joins_rollouts and (self.max_refills or self.masks_truncated or self.corrects_importance):
            raise ValueError(f"algorithm: {self.name} has no use for max_refills, masks_truncated or importance")
        if self.has_kl_in_reward and not self.weighs_rollouts:
            raise PydanticCustomError(
                "value_error",
                f"algorithm.kl_in: {self.name} learns from no reward of a token, so no KL can be taken off one",
                {"way_out": "algorithm.kl_in=loss"},
            )
        return self

    @model_validator(mode="after")
    def _schedule_is_one(self) -> "AlgorithmSpec":
        kind = self.lr_scheduler_type
        if self.lr_warmup_steps and self.lr_warmup_ratio:
            raise ValueError("algorithm.lr_warmup_steps and algorithm.lr_warmup_ratio say the same: give one of them")
        if self.min_lr_ratio and kind != "cosine":
            raise ValueError(f"algorithm.min_lr_ratio: a {kind} schedule has no minimum; a cosine one has")
        if self.lr_decay_steps is not None and kind == "constant":
            raise ValueError("algorithm.lr_decay_steps: a constant learning rate does not decay; linear and cosine do")
        return self

    def schedule_steps(self, num_steps: int) -> tuple[int, int]:
        """(steps of warm-up, steps by which the schedule has ended) in a run of so many.

        >>> AlgorithmSpec(lr_scheduler_type="cosine", lr_warmup_ratio=0.03).schedule_steps(200)
        (6, 200)
        """
        end = num_steps if self.lr_decay_steps is None else self.lr_decay_steps
        return self.lr_warmup_steps or math.ceil(self.lr_warmup_ratio * end), end

    @property
    def corrects_importance(self) -> bool:
        """Whether losses are weighted; `auto` is settled before a loss is computed."""
        return self.importance in ("truncate", "mask")

    @property
    def has_kl(self) -> bool:
        """Whether the policy is held to a reference."""
        return self.kl_coef > 0

    @property
    def has_kl_in_reward(self) -> bool:
        """Whether tokens' rewards are less a KL estimate of the policy against the reference."""
        return self.kl_in == "reward" and self.kl_coef > 0

    @property
    def weighs_rollouts(self) -> bool:
        """Whether it learns token by token from what an engine sampled, so that a ratio or a weight is needed."""
        return self.declaration.has_rollouts and not self.declaration.joins_rollouts

    @property
    def declaration(self) -> Algorithm:
        """The declaration that this spec names."""
        return ALGORITHMS[self.name] if self.custom is None else Algorithm.model_validate(self.custom)


def _declared_defaults(name: Any) -> dict[str, Any]:
    found = ALGORITHMS.get(name) if isinstance(name, str) else None
    return {"defaults": found.defaults} if found else {}
