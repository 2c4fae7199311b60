"""StepGraph: what one RL step consists of, before anyone decides where.

In: nothing but words. Out: calls with what must come before them.
Left out: devices, processes, bytes and seconds.
"""

from dataclasses import dataclass

from rlplan.vocabulary import ActionKind, Phase, Role


@dataclass(frozen=True, slots=True)
class Call:
    """One thing that happens to one role."""

    id: str
    kind: ActionKind
    role: Role
    phase: Phase
    after: tuple[str, ...] = ()
    """Ids of calls of the same part (start, step or finish) that must have finished."""
    every: int = 1
    """It happens in steps that are a multiple of this."""
    mini_batch: int | None = None
    """Index of the mini-batch, for train calls."""
    held_by: Role | None = None
    """The role whose processes do it, where that is not `role`."""
    takes_all: bool = False
    """Every rank of the role takes part, where one would do."""
    first: int = 1
    """The first step in which it happens."""
    repeat: int = 1
    """In a view: how many calls alike follow one another, this one the first."""


@dataclass(frozen=True, slots=True)
class AsyncRollouts:
    """Rollouts that are generated beside the steps, off-policy."""

    action_id: str
    """Of the generating action."""
    max_staleness: int
    """In policy versions, through a bounded queue."""
    interrupts: bool
    """New weights reach the engine while it generates; otherwise it finishes what is running first."""


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A whole job: what happens once before, in every step, and once after."""

    start: tuple[Call, ...]
    step: tuple[Call, ...]
    finish: tuple[Call, ...]
    async_rollouts: AsyncRollouts | None = None
