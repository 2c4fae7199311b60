"""StepGraph: what one RL step consists of, before anyone decides where.

In: nothing but words. Out: calls with what must come before them.
Left out: devices, processes, bytes and seconds.
"""

from dataclasses import dataclass

from rlplan.vocabulary import ActionKind, Phase, Role


@dataclass(frozen=True, slots=True)
class Call:
    """One thing that happens to one role.

    after: ids of calls of the same part (start, step or finish) that must have finished.
    every: the call happens in steps that are a multiple of it; first: from that step on.
    mini_batch: index of the mini-batch, for train calls. repeat: of how many alike that follow one another it is the
    first, in a view.
    held_by: the role whose processes do it, where that is not `role`. takes_all: every rank of it takes part, where
    one would do.
    """

    id: str
    kind: ActionKind
    role: Role
    phase: Phase
    after: tuple[str, ...] = ()
    every: int = 1
    mini_batch: int | None = None
    held_by: Role | None = None
    takes_all: bool = False
    first: int = 1
    repeat: int = 1


@dataclass(frozen=True, slots=True)
class AsyncRollouts:
    """Rollouts that are generated beside the steps (off-policy by at most max_staleness versions).

    action_id: of the generating action. max_staleness: in policy versions, through a bounded queue. interrupts: new
    weights reach it in the middle of its work; otherwise it comes to rest first.
    """

    action_id: str
    max_staleness: int
    interrupts: bool


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A whole job: what happens once before, in every step, and once after."""

    start: tuple[Call, ...]
    step: tuple[Call, ...]
    finish: tuple[Call, ...]
    async_rollouts: AsyncRollouts | None = None
