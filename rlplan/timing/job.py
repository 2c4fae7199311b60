"""JobTiming: seconds of a whole job's actions, by part of its schedule.

In: a Schedule and a Cost for each action of each part. Out: when actions of a usual step run, and what a run takes.
Left out: how costs are computed (cpu/actions.py), the first step, which is slower, and what the controller does in
between.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlplan.dataflow.schedule import Action, Part, Schedule
from rlplan.timing.cost import Cost
from rlplan.timing.step import ActionTime, StepTiming, time_step

ROUNDING_S = 1e-9
"""Seconds below zero that rounding alone may leave of a difference."""
PartCosts = Mapping[tuple[Part, str], Cost]


@dataclass(frozen=True)
class JobTiming:
    """Actions with their start and Cost.

    An action starts when all that come before it have ended; those that run beside each other may overlap.
    """

    start: StepTiming
    step: StepTiming
    """Of every step."""
    sometimes: StepTiming
    """Of some steps (evaluation), from the step's end."""
    finish: StepTiming

    def cost(self, part: Part, action_id: str) -> Cost | None:
        """Of one action; None where the schedule lacks it."""
        timings = (self.step, self.sometimes) if part == "step" else (getattr(self, part),)
        return next((a.cost for timing in timings for a in timing.actions if a.action_id == action_id), None)

    def run_s(self, schedule: Schedule, num_steps: int) -> float:
        """Seconds of a run: its start, all steps with what happens in some of them, its end."""
        every = {action.id: action.every for action in schedule.step}
        extra = sum(a.cost.seconds * (num_steps // every[a.action_id]) for a in self.sometimes.actions)
        return self.start.seconds + num_steps * self.step.seconds + extra + self.finish.seconds


def time_job(schedule: Schedule, costs: PartCosts) -> JobTiming:
    """When each action runs. costs: by part and action id, one for each action of the schedule. Raises: KeyError.

    Async rollouts run beside the rest of a step: the longer of the two sides counts.
    """
    for place, cost in costs.items():
        assert cost.least_part >= -ROUNDING_S, f"a formula gives fewer than 0 seconds: {place} takes {cost}"
    always = tuple(action for action in schedule.step if action.every == 1)
    rare = tuple(action for action in schedule.step if action.every != 1)
    step = _timed("step", always, costs, 0.0)
    if schedule.async_rollouts is not None:
        mine = {action.id: costs[("step", action.id)] for action in always}
        step = time_step(replace(schedule, step=always), mine, max_staleness=schedule.async_rollouts.max_staleness)
    return JobTiming(
        start=_timed("start", schedule.start, costs, 0.0),
        step=step,
        sometimes=_timed("step", rare, costs, step.seconds),
        finish=_timed("finish", schedule.finish, costs, 0.0),
    )


def _timed(part: Part, actions: tuple[Action, ...], costs: PartCosts, begin_s: float) -> StepTiming:
    ends: dict[str, float] = {}
    times = []
    for action in actions:
        start_s = max((ends[name] for name in action.after if name in ends), default=begin_s)
        time = ActionTime(action.id, action.phase, start_s, costs[(part, action.id)])
        ends[action.id] = time.end_s
        times.append(time)
    return StepTiming(tuple(times))
