"""Seconds of a whole job: its start, a typical step, and its finish.

In: a Schedule and a Cost for each action. Out: a JobTiming with the start and the duration of each action.
Left out: how costs are computed (cpu/actions.py), the slower first step, and the controller's work between actions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlplan.dataflow.schedule import Action, Part, Schedule
from rlplan.timing.cost import Cost
from rlplan.timing.step import ActionTime, StepTiming, time_step

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
