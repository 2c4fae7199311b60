"""Scoring passes: which roles compute log-probs, values or rewards of finished rollouts, and with which batch sizes.

In: the `scoring:` part of a job. Out: frozen values. Left out: which roles a job has (job_roles.py). Units: sizes are
per micro-batch of one rank.
"""

from typing import Literal

from rlplan.spec.base import Auto, Spec
from rlplan.spec.parts.workload import Count
from rlplan.vocabulary import Role


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
