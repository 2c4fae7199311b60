"""Algorithms as torch-free declarations: the roles they need, the calls of a step, the advantage and the loss by name.

In: the `algorithm:` part of a job. Out: frozen values that the memory model, the planner and the runtime all read.
Left out: the loss itself, found under its name in `rlplan.runtime.losses`.
"""

from dataclasses import dataclass

from pydantic import Field, field_validator

from rlplan.errors import did_you_mean
from rlplan.spec.base import Spec
from rlplan.vocabulary import Role


@dataclass(frozen=True)
class Algorithm:
    """What an algorithm is made of. `loss` and `advantage` are names that `rlplan.runtime.losses` knows."""

    name: str
    trained_roles: tuple[Role, ...]
    advantage: str
    loss: str
    min_samples_per_prompt: int
    source: str


ALGORITHMS = {
    "grpo": Algorithm(
        name="grpo",
        trained_roles=(Role.POLICY,),
        advantage="group_normalized",
        loss="clipped_ratio_with_kl",
        min_samples_per_prompt=2,
        source="DeepSeekMath, arXiv:2402.03300, section 4.1",
    ),
}


class AlgorithmSpec(Spec):
    """The `algorithm:` part of a job.

    clip_low, clip_high: the ratio is kept within [1 - clip_low, 1 + clip_high].
    kl_coef: weight of the k3 estimate of KL(policy || reference) in the loss; 0 does without a reference model.
    """

    name: str = "grpo"
    learning_rate: float = Field(default=1e-6, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    gradient_clipping: float = Field(default=1.0, ge=0)
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.2, gt=0)
    kl_coef: float = Field(default=0.001, ge=0)

    @field_validator("name")
    @classmethod
    def _known_name(cls, name: str) -> str:
        if name not in ALGORITHMS:
            raise ValueError(f"known algorithms: {', '.join(ALGORITHMS)}." + did_you_mean(name, ALGORITHMS))
        return name

    @property
    def declaration(self) -> Algorithm:
        """The declaration that this spec names."""
        return ALGORITHMS[self.name]

    @property
    def frozen_roles(self) -> tuple[Role, ...]:
        """Models that are only read: the KL anchor, unless its coefficient is 0."""
        return (Role.REFERENCE,) if self.kl_coef > 0 else ()
