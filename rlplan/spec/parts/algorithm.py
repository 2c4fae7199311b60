"""AlgorithmSpec: which algorithm a job trains with, and its numbers.

In: the `algorithm:` part of a job. Out: a frozen value that leads to the algorithm's declaration.
Left out: the declarations (algorithms/, one file each), and the losses that they name (`rlplan.runtime.losses`).
"""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from rlplan.errors import did_you_mean
from rlplan.spec.algorithms import ALGORITHMS, DEFAULT
from rlplan.spec.base import Spec
from rlplan.spec.declaration import Algorithm

__all__ = ["ALGORITHMS", "Algorithm", "AlgorithmSpec"]

KlEstimator = Literal["k1", "k2", "k3"]
LrScheduler = Literal["constant", "linear", "cosine"]

_MASK_BOUNDS = {"token": (0.5, 5.0), "sequence": (0.0, 3.0), "geometric": (0.999, 1.001)}
"""Default bounds of `importance: mask` by level. Source: IcePop, arXiv:2510.18855, section 3; TRL 1.16 GRPOConfig
(`sequence_mask`, 3.0); verl docs/algo/rollout_corr.md (`geo_rs`)."""
_UNCLIPPED = ("clipped_weight", "log_prob")
"""Losses of sampled tokens without a clipped ratio."""


class AlgorithmSpec(Spec):
    """The `algorithm:` part of a job. Defaults of an algorithm are in its declaration."""

    path: str | None = None
    """`file.py:NAME` of a user-defined algorithm declaration."""
    custom: dict[str, Any] | None = None
    """Contents of the declaration at `path`, filled in when the job is read."""
    name: str = DEFAULT
    """Name of a bundled algorithm."""
    learning_rate: float = Field(default=1e-6, ge=0)
    """Peak learning rate of the policy."""
    lr_scheduler_type: LrScheduler = "constant"
    """Learning-rate schedule after warm-up, per RL step."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Warm-up steps, in which the learning rate rises from 0."""
    lr_warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Warm-up as a fraction of the schedule's steps, rounded up."""
    lr_decay_steps: int | None = Field(default=None, ge=1)
    """Length of a linear or cosine schedule in steps, warm-up included; None: workload.num_steps."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Final learning rate of a cosine schedule, as a fraction of learning_rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of the optimizer."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay rate of the optimizer's first moment."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay rate of the optimizer's second moment."""
    gradient_clipping: float = Field(default=1.0, ge=0)
    """Maximum gradient norm; 0 does not clip."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Clip range of the importance ratio: lower bound 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """Clip range of the importance ratio: upper bound 1 + clip_high."""
    dual_clip: float = Field(default=0.0, ge=0)
    """Highest ratio of a token with a negative advantage (dual clip); 0 sets no limit. Ye et al. 2020 use 3."""
    kl_coef: float = Field(default=0.001, ge=0)
    """Coefficient of the KL penalty, KL(policy || reference); 0 needs no reference model."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether the KL penalty is added to the loss or subtracted from the rewards."""
    kl_estimator: KlEstimator = "k3"
    """KL estimator, for a token's probability p in the policy and q in the reference: k1 is log(p/q), k2 its square /
    2, k3 q/p - 1 + log(p/q)."""
    has_unbiased_kl: bool = False
    """Whether each token's KL in the loss is multiplied by its ratio and its importance weight. The gradient is then
    that of KL(policy || reference), also on stale rollouts (DeepSeek-V3.2)."""
    teacher_coef: float = Field(default=1.0, ge=0)
    """Coefficient of the reverse KL to the teacher, KL(policy || teacher), in the loss."""
    teacher_top_k: Annotated[int, Field(ge=0)] | Literal["all"] = 0
    """Tokens of the teacher over which each position's reverse KL sums: `all` of the vocabulary, or the teacher's k
    likeliest and the others as one; 0 estimates the KL from the sampled token."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus."""
    token_weights: Literal["sequence", "token", "constant"] = "sequence"
    """Loss aggregation: every sequence counts equally, every token does, or every token counts 1 / max_response_len."""
    masks_truncated: bool = False
    """Whether responses truncated at max_response_len are masked from the loss."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Tokens before max_response_len over which the overlong penalty grows from 0 to `overlong_penalty` (DAPO)."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """Penalty of a response with max_response_len tokens."""
    max_refills: int = Field(default=0, ge=0, le=100)
    """Dynamic sampling: how often a step replaces zero-variance groups by groups of new prompts. Groups that remain
    without variance after that are kept."""
    importance: Literal["auto", "none", "truncate", "mask"] = "auto"
    """Importance-sampling correction of engine-trainer mismatch and staleness. A token's loss is weighted by its
    trainer probability before the step over its engine probability. The weight is truncated to, or masked outside,
    [importance_low, importance_high]. `auto`: `truncate` with 16 bits or less, or with stale rollouts. The PPO ratio is
    unaffected: its denominator is the trainer's own log-prob before the step."""
    importance_level: Literal["token", "sequence", "geometric"] = "token"
    """Level of importance weights: each token's own, the product over its response's tokens, or their geometric
    mean."""
    importance_low: float = Field(default=0.0, ge=0)
    """Lower bound of the importance weight. For `mask` the default is 0.5 for tokens and 0.999 for geometric means."""
    importance_high: float = Field(default=2.0, gt=0)
    """Upper bound of the importance weight. For `mask` the default is 5 for tokens, 3 for sequences and 1.001 for
    geometric means."""
    importance_veto: float = Field(default=0.0, ge=0, lt=1)
    """Responses with a token whose importance ratio is below this count nothing; 0 keeps all. verl suggests 1e-4."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount factor of generalized advantage estimation (GAE)."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Lambda of generalized advantage estimation (GAE)."""
    value_clip: float = Field(default=0.2, ge=0)
    """Clip range of the value around its estimate at rollout time; 0 does not clip."""
    value_coef: float = Field(default=0.1, ge=0)
    """Coefficient of the value loss, if the value model shares the policy's backbone."""
    value_learning_rate: float | None = Field(default=None, ge=0)
    """Learning rate of the value model; None: the policy's."""
    value_warmup_steps: int = Field(default=0, ge=0)
    """Steps at the start of a run that train only the value model."""

    @model_validator(mode="before")
    @classmethod
    def _take_the_algorithm_s_defaults(cls, data: Any) -> Any:
        """Fill keys that the job leaves out with the algorithm's own defaults."""
        if not isinstance(data, dict):
            return data
        custom = data.get("custom")
        declared = custom if isinstance(custom, dict) else _declared_defaults(data.get("name", DEFAULT))
        defaults = declared.get("defaults", {})
        filled = {**defaults, **data} if isinstance(defaults, dict) else data
        bounds = _MASK_BOUNDS.get(str(filled.get("importance_level", "token")))
        if filled.get("importance") != "mask" or bounds is None:
            return filled
        return {"importance_low": bounds[0], "importance_high": bounds[1], **filled}

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str, info: ValidationInfo) -> str:
        custom = info.data.get("custom")
        if custom is None and name not in ALGORITHMS:
            raise ValueError(f"known algorithms: {', '.join(ALGORITHMS)}." + did_you_mean(name, ALGORITHMS))
        return name

    @model_validator(mode="after")
    def _file_declares_its_name(self) -> "AlgorithmSpec":
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
                f"algorithm.kl_in: {self.name} has no rewards per token from which a KL could be subtracted",
                {"way_out": "algorithm.kl_in=loss"},
            )
        return self

    @model_validator(mode="after")
    def _corrections_have_an_effect(self) -> "AlgorithmSpec":
        is_clipped = self.weighs_rollouts and self.declaration.loss not in _UNCLIPPED
        has_kl_loss = self.weighs_rollouts and self.has_kl and not self.has_kl_in_reward
        is_off = self.importance == "none" and (self.importance_veto or self.importance_level != "token")
        lacks_kl = self.has_unbiased_kl and not has_kl_loss
        for is_broken, message, way_out in (
            (is_off, "importance: none ignores importance_level and importance_veto", "importance=truncate"),
            (self.dual_clip and not is_clipped, f"dual_clip: {self.name} clips no ratio", "dual_clip=0"),
            (0 < self.dual_clip <= 1, f"dual_clip {self.dual_clip:g} is a ratio and must be above 1", "dual_clip=3"),
            (
                lacks_kl,
                "has_unbiased_kl: only the KL of sampled tokens in the loss has weights",
                "has_unbiased_kl=false",
            ),
        ):
            if is_broken:
                raise PydanticCustomError("value_error", f"algorithm.{message}", {"way_out": f"algorithm.{way_out}"})
        return self

    @model_validator(mode="after")
    def _schedule_is_one(self) -> "AlgorithmSpec":
        kind = self.lr_scheduler_type
        if self.lr_warmup_steps and self.lr_warmup_ratio:
            raise ValueError(
                "algorithm.lr_warmup_steps and algorithm.lr_warmup_ratio set the same value: give one of them"
            )
        if self.min_lr_ratio and kind != "cosine":
            raise ValueError(f"algorithm.min_lr_ratio: a {kind} schedule has no minimum; a cosine one has")
        if self.lr_decay_steps is not None and kind == "constant":
            raise ValueError("algorithm.lr_decay_steps: a constant learning rate does not decay; linear and cosine do")
        return self

    def schedule_steps(self, num_steps: int) -> tuple[int, int]:
        """Warm-up steps, and the steps after which the schedule has ended, in a run of `num_steps`.

        >>> AlgorithmSpec(lr_scheduler_type="cosine", lr_warmup_ratio=0.03).schedule_steps(200)
        (6, 200)
        """
        end = num_steps if self.lr_decay_steps is None else self.lr_decay_steps
        return self.lr_warmup_steps or math.ceil(self.lr_warmup_ratio * end), end

    @property
    def corrects_importance(self) -> bool:
        """Whether losses have importance weights; `auto` is resolved before a loss is computed."""
        return self.importance in ("truncate", "mask")

    def count_teacher_tokens(self, vocab_size: int) -> int:
        """Tokens of the teacher's distribution that are kept for each position; 0 for the sampled token alone."""
        return vocab_size if self.teacher_top_k == "all" else min(self.teacher_top_k, vocab_size)

    @property
    def has_kl(self) -> bool:
        """Whether the KL to a reference is penalized."""
        return self.kl_coef > 0

    @property
    def has_kl_in_reward(self) -> bool:
        """Whether a KL estimate is subtracted from the tokens' rewards."""
        return self.kl_in == "reward" and self.kl_coef > 0

    @property
    def weighs_rollouts(self) -> bool:
        """Whether the algorithm learns token by token from sampled rollouts, so that it needs importance ratios."""
        return self.declaration.has_rollouts and not self.declaration.joins_rollouts

    @property
    def declaration(self) -> Algorithm:
        """The declaration that this spec names."""
        return ALGORITHMS[self.name] if self.custom is None else Algorithm.model_validate(self.custom)


def _declared_defaults(name: Any) -> dict[str, Any]:
    algorithm = ALGORITHMS.get(name) if isinstance(name, str) else None
    return {"defaults": algorithm.defaults} if algorithm else {}
