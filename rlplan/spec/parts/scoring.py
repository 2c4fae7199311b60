"""Scoring passes: which roles take log-probs, values or rewards of finished rollouts, and how large each pass is.

In: the `scoring:` part of a job. Out: frozen values. Left out: which roles a job has (job_roles.py).
Units: sizes are of one pass of one rank.
"""

from typing import Literal

from rlplan.spec.base import Auto, Spec
from rlplan.spec.parts.workload import Count
from rlplan.vocabulary import Role


class ScoringPassSpec(Spec):
    """The size of a role's scoring passes. One of the two keys says it; without both it is a training pass's size."""

    micro_batch_size_per_gpu: Count | Auto = "auto"
    """Rollouts of a pass of a rank, counted at their longest."""
    max_tokens_per_micro_batch: Count | Auto = "auto"
    """Tokens that are packed into one pass."""

    @property
    def sizes(self) -> tuple[int | Literal["auto"], int | Literal["auto"]]:
        """Rollouts and tokens of a pass."""
        return self.micro_batch_size_per_gpu, self.max_tokens_per_micro_batch

    @property
    def is_stated(self) -> bool:
        """Whether the passes have a size of their own."""
        return self.sizes != ("auto", "auto")


class ScoringSpec(Spec):
    """The `scoring:` part of a job. What is `auto` is as the job's framework does it (rlplan/frameworks)."""

    policy_log_probs: Literal["auto", "always", "never"] = "auto"
    """Whether the trainer recomputes the policy's log-probs of every finished rollout before the step's updates."""
    has_entropy: bool | Auto = "auto"
    """Whether that pass takes entropies beside log-probs."""
    policy: ScoringPassSpec = ScoringPassSpec.by_default()
    """The pass that recomputes the policy's log-probs."""
    reference: ScoringPassSpec = ScoringPassSpec.by_default()
    """The reference's pass."""
    value: ScoringPassSpec = ScoringPassSpec.by_default()
    """The value model's pass."""
    reward: ScoringPassSpec = ScoringPassSpec.by_default()
    """The learned reward's pass."""
    teacher: ScoringPassSpec = ScoringPassSpec.by_default()
    """The teacher's pass."""

    def pass_of(self, role: Role) -> ScoringPassSpec:
        """The size of a role's passes."""
        sizes: ScoringPassSpec = getattr(self, role.value)
        return sizes
