"""Seconds of a job: its start, one steady-state step, its finish; when each action starts, and what it waits for.

In: a Schedule and the Cost of each action. Out: a StepTiming, a JobTiming.
Left out: how costs are computed (the other files of timing/), randomness (simulate/), the slower first step, and the
controller's work between actions.

The actions of a synchronous step follow each other. With max_staleness of at least 1, generation runs on its own
devices beside all other actions. A steady step then lasts as long as the slower side plus the weight sync, which
occupies both sides.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from rlplan.dataflow.schedule import Action, Part, Schedule
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


ROUNDING_S = 1e-9
"""A difference of two costs may be this many seconds below zero because of rounding."""
PartCosts = Mapping[tuple[Part, str], Cost]


@dataclass(frozen=True)
class JobTiming:
    """Start time and Cost of each action of a job.

    An action starts when all actions that it depends on have ended. Independent actions may overlap.
    """

    start: StepTiming
    step: StepTiming
    """Actions of every step."""
    sometimes: StepTiming
    """Actions of some steps only, such as evaluation. They start when the step ends."""
    finish: StepTiming

    def cost(self, part: Part, action_id: str) -> Cost | None:
        """Cost of one action; None where the schedule lacks it."""
        timings = (self.step, self.sometimes) if part == "step" else (getattr(self, part),)
        return next((a.cost for timing in timings for a in timing.actions if a.action_id == action_id), None)

    def run_s(self, schedule: Schedule, num_steps: int) -> float:
        """Seconds of a run: its start, all steps, the actions of some steps only, and its finish."""
        every = {action.id: action.every for action in schedule.step}
        extra = sum(a.cost.seconds * (num_steps // every[a.action_id]) for a in self.sometimes.actions)
        return self.start.seconds + num_steps * self.step.seconds + extra + self.finish.seconds


def time_job(schedule: Schedule, costs: PartCosts) -> JobTiming:
    """Compute when each action runs. costs: by part and action id, complete for the schedule. Raises: KeyError.

    Asynchronous generation runs beside the other actions of a step, so the longer of the two sides counts.
    """
    for place, cost in costs.items():
        # a formula that subtracts too much would otherwise hide in the total
        assert cost.least_part >= -ROUNDING_S, f"a formula gives fewer than 0 seconds: {place} takes {cost}"
    always = tuple(action for action in schedule.step if action.every == 1)
    rare = tuple(action for action in schedule.step if action.every != 1)
    step = _time_actions("step", always, costs, 0.0)
    if schedule.async_rollouts is not None:
        step_costs = {action.id: costs[("step", action.id)] for action in always}
        max_staleness = schedule.async_rollouts.max_staleness
        step = time_step(replace(schedule, step=always), step_costs, max_staleness=max_staleness)
    return JobTiming(
        start=_time_actions("start", schedule.start, costs, 0.0),
        step=step,
        sometimes=_time_actions("step", rare, costs, step.seconds),
        finish=_time_actions("finish", schedule.finish, costs, 0.0),
    )


def _time_actions(part: Part, actions: tuple[Action, ...], costs: PartCosts, begin_s: float) -> StepTiming:
    ends: dict[str, float] = {}
    times = []
    for action in actions:
        start_s = max((ends[name] for name in action.after if name in ends), default=begin_s)
        time = ActionTime(action.id, action.phase, start_s, costs[(part, action.id)])
        ends[action.id] = time.end_s
        times.append(time)
    return StepTiming(tuple(times))
