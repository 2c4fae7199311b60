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
    """What an algorithm is made of. `loss` and `advantage` are names that `rlplan.runtime.losses` knows.

    has_reference: whether it holds a KL anchor unless told otherwise. has_rollouts: False where the answers are given.
    sequences_per_sample: that one sample of a batch brings into a pass: two where a chosen and a rejected answer meet.
    is_runnable: False where memory can be estimated and the runtime has no loss yet.
    """

    name: str
    trained_roles: tuple[Role, ...]
    advantage: str
    loss: str
    min_samples_per_prompt: int
    source: str
    has_reference: bool = True
    has_rollouts: bool = True
    sequences_per_sample: int = 1
    is_runnable: bool = False


_POLICY = (Role.POLICY,)
_DECLARED = (
    Algorithm(
        name="grpo",
        trained_roles=_POLICY,
        advantage="group_normalized",
        loss="clipped_ratio_with_kl",
        min_samples_per_prompt=2,
        source="DeepSeekMath, arXiv:2402.03300, section 4.1",
        is_runnable=True,
    ),
    Algorithm(
        name="ppo",
        trained_roles=(Role.POLICY, Role.VALUE),
        advantage="generalized",
        loss="clipped_ratio",
        min_samples_per_prompt=1,
        source="Schulman et al. 2017, arXiv:1707.06347; Ouyang et al. 2022, arXiv:2203.02155",
        is_runnable=True,
    ),
    Algorithm("rloo", _POLICY, "leave_one_out", "log_prob", 2, "Ahmadian et al. 2024, arXiv:2402.14740"),
    Algorithm("reinforce++", _POLICY, "batch_normalized", "clipped_ratio", 1, "Hu 2025, arXiv:2501.03262"),
    Algorithm(
        "dapo", _POLICY, "group_normalized", "clipped_ratio", 2, "Yu et al. 2025, arXiv:2503.14476", has_reference=False
    ),
    Algorithm("dr_grpo", _POLICY, "group_centred", "clipped_ratio", 2, "Liu et al. 2025, arXiv:2503.20783", False),
    Algorithm("gspo", _POLICY, "group_normalized", "sequence_ratio", 2, "Zheng et al. 2025, arXiv:2507.18071"),
    Algorithm(
        name="dpo",
        trained_roles=_POLICY,
        advantage="none",
        loss="preference",
        min_samples_per_prompt=1,
        source="Rafailov et al. 2023, arXiv:2305.18290",
        has_rollouts=False,
        sequences_per_sample=2,
    ),
)
ALGORITHMS = {algorithm.name: algorithm for algorithm in _DECLARED}
"""Every declared algorithm by name."""
RUNNABLE = {name: algorithm for name, algorithm in ALGORITHMS.items() if algorithm.is_runnable}
"""Those that the runtime has a loss for."""


class AlgorithmSpec(Spec):
    """The `algorithm:` part of a job.

    clip_low, clip_high: the ratio is kept within [1 - clip_low, 1 + clip_high].
    kl_coef: weight of the estimate of KL(policy || reference) in the loss or in the rewards, as the algorithm has it;
    0 does without a reference model. teacher_coef: weight of KL(policy || teacher) in the loss, where there is one.
    gamma, gae_lambda: of generalized advantage estimation. value_clip: how far a value may move from the one that the
    rollouts were judged by; 0 does not clip. value_coef: weight of the value loss on a shared backbone.
    value_learning_rate: of the value model; the policy's where it is not given.
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
    teacher_coef: float = Field(default=1.0, ge=0)
    gamma: float = Field(default=1.0, gt=0, le=1)
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    value_clip: float = Field(default=0.2, ge=0)
    value_coef: float = Field(default=0.1, ge=0)
    value_learning_rate: float | None = Field(default=None, ge=0)

    @field_validator("name")
    @classmethod
    def _known_name(cls, name: str) -> str:
        if name in ALGORITHMS and name not in RUNNABLE:
            raise ValueError(
                f"{name} can be estimated (`rlplan estimate --algorithm {name}`), not run; {', '.join(RUNNABLE)} can"
            )
        if name not in RUNNABLE:
            raise ValueError(f"known algorithms: {', '.join(RUNNABLE)}." + did_you_mean(name, RUNNABLE))
        return name

    @property
    def declaration(self) -> Algorithm:
        """The declaration that this spec names."""
        return ALGORITHMS[self.name]
