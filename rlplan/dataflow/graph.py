"""StepGraph: the calls of one RL step and their order, before they have devices.

In: nothing. Out: calls with the calls that must come before them.
Left out: devices, processes, bytes and seconds.
"""

from dataclasses import dataclass

from rlplan.vocabulary import ActionKind, Phase, Role


@dataclass(frozen=True, slots=True)
class Call:
    """One action of one role, without its devices."""

    id: str
    kind: ActionKind
    role: Role
    phase: Phase
    after: tuple[str, ...] = ()
    """Ids of calls of the same part (start, step or finish) that must finish first."""
    every: int = 1
    """Interval in steps: the call runs in steps that are a multiple of this."""
    mini_batch: int | None = None
    """Index of the mini-batch, for train calls."""
    runs_on: Role | None = None
    """The role whose processes run the call, where that is not `role`."""
    needs_all_ranks: bool = False
    """Every rank of the role takes part, where one rank would suffice."""
    first: int = 1
    """First step in which the call runs."""
    repeat: int = 1
    """Consecutive equal calls that this one represents in a view, itself included."""


@dataclass(frozen=True, slots=True)
class AsyncRollouts:
    """Asynchronous rollouts: generation runs during training steps, off-policy."""

    action_id: str
    """Id of the generating action."""
    max_staleness: int
    """Policy versions by which a rollout may lag, enforced by a bounded queue."""
    interrupts: bool
    """New weights reach the engine while it generates. Otherwise it finishes the running rollouts first."""


@dataclass(frozen=True, slots=True)
class StepGraph:
    """All calls of a job: those before the first step, of every step, and after the last step."""

    start: tuple[Call, ...]
    step: tuple[Call, ...]
    finish: tuple[Call, ...]
    async_rollouts: AsyncRollouts | None = None
