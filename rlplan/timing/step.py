"""One steady step in seconds: when each action of a schedule starts, and what it waits for.

In: a Schedule, the Cost of each action. Out: StepTiming, and the same as predicted spans.
Left out: how costs are computed (the other files of timing/), randomness (simulate/).

A synchronous step is its chain. With max_staleness of 1 and more, generation runs on its own devices beside everything
else, so that a steady step lasts as long as the slower of the two sides; the weight sync belongs to both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from rlplan.dataflow.schedule import Schedule
from rlplan.timing.cost import NOTHING, Cost
from rlplan.trace import Span
from rlplan.vocabulary import ActionKind, Phase


@dataclass(frozen=True)
class ActionTime:
    """An action within a steady step."""

    action_id: str
    phase: Phase
    start_s: float
    """From the beginning of the step."""
    cost: Cost

    @property
    def end_s(self) -> float:
        """When it has ended."""
        return self.start_s + self.cost.seconds


@dataclass(frozen=True)
class StepTiming:
    """A steady step."""

    actions: tuple[ActionTime, ...]
    """In the order of the schedule."""
    idle_s: float = 0.0
    """How long the faster of generation and training waits for the other."""

    @cached_property
    def seconds(self) -> float:
        """Duration of a steady step."""
        return max((action.end_s for action in self.actions), default=0.0)

    def spans(self, schedule: Schedule) -> tuple[Span, ...]:
        """The step as spans of a trace, one for each process of each action."""
        devices = dict(schedule.processes)
        processes = {action.id: action.processes for action in schedule.step}
        return tuple(
            Span(action.action_id, 1, process, devices[process], action.start_s, action.end_s)
            for action in self.actions
            for process in processes[action.action_id]
        )


def time_step(schedule: Schedule, costs: Mapping[str, Cost], *, max_staleness: int = 0) -> StepTiming:
    """When each action of a steady step runs. costs: by action id; an action without one takes no time."""

    def chain(actions: list[str], start: float) -> dict[str, float]:
        starts = {}
        for action_id in actions:
            starts[action_id] = start
            start += costs.get(action_id, NOTHING).seconds
        return starts

    beside = [a.id for a in schedule.step if max_staleness and a.kind is ActionKind.GENERATE]
    shared = [a.id for a in schedule.step if beside and a.kind is ActionKind.SYNC_WEIGHTS]
    rest = [a.id for a in schedule.step if a.id not in (*beside, *shared)]
    lengths = [sum(costs.get(a, NOTHING).seconds for a in side) for side in (beside, rest)]
    starts = chain(rest, 0.0) | chain(beside, 0.0) | chain(shared, max(lengths))
    actions = tuple(ActionTime(a.id, a.phase, starts[a.id], costs.get(a.id, NOTHING)) for a in schedule.step)
    return StepTiming(actions, abs(lengths[0] - lengths[1]) if beside else 0.0)
