"""Seconds of one steady-state step: when each action starts, and what it waits for.

In: a Schedule and the Cost of each action. Out: a StepTiming.
Left out: how costs are computed (the other files of timing/), randomness (simulate/).

The actions of a synchronous step follow each other. With max_staleness of at least 1, generation runs on its own
devices beside all other actions. A steady step then lasts as long as the slower side plus the weight sync, which
occupies both sides.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from rlplan.dataflow.schedule import Schedule
from rlplan.timing.cost import NOTHING, Cost
from rlplan.vocabulary import ActionKind, Phase


@dataclass(frozen=True)
class ActionTime:
    """Start and Cost of an action within a steady step."""

    action_id: str
    phase: Phase
    start_s: float
    """Seconds since the beginning of the step."""
    cost: Cost

    @property
    def end_s(self) -> float:
        """Seconds from the beginning of the step to the end of the action."""
        return self.start_s + self.cost.seconds


@dataclass(frozen=True)
class StepTiming:
    """Timing of a steady step."""

    actions: tuple[ActionTime, ...]
    """Actions in the order of the schedule."""
    idle_s: float = 0.0
    """Seconds that the faster of generation and training waits for the other."""

    @cached_property
    def seconds(self) -> float:
        """Duration of a steady step."""
        return max((action.end_s for action in self.actions), default=0.0)


def time_step(schedule: Schedule, costs: Mapping[str, Cost], *, max_staleness: int = 0) -> StepTiming:
    """Compute when each action of a steady step runs. costs: by action id; an action without one takes no time."""

    def time_chain(actions: list[str], start: float) -> dict[str, float]:
        starts = {}
        for action_id in actions:
            starts[action_id] = start
            start += costs.get(action_id, NOTHING).seconds
        return starts

    generation = [a.id for a in schedule.step if max_staleness and a.kind is ActionKind.GENERATE]
    weight_sync = [a.id for a in schedule.step if generation and a.kind is ActionKind.SYNC_WEIGHTS]
    training = [a.id for a in schedule.step if a.id not in (*generation, *weight_sync)]
    side_s = [sum(costs.get(a, NOTHING).seconds for a in side) for side in (generation, training)]
    starts = time_chain(training, 0.0) | time_chain(generation, 0.0) | time_chain(weight_sync, max(side_s))
    actions = tuple(ActionTime(a.id, a.phase, starts[a.id], costs.get(a.id, NOTHING)) for a in schedule.step)
    return StepTiming(actions, abs(side_s[0] - side_s[1]) if generation else 0.0)
