"""Forecast: a plan on a clock, so that it is drawn by the same hands as a run.

In: a Plan. Out: a TracedSchedule whose spans are predicted, and the windows to draw.
Left out: drawing. Simulated plans bring their own trace.

A plan tells seconds of a steady step alone, so the first step is drawn with the same, and what comes before and after
in order only, an action a second; where no seconds are known at all, everything is.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rlplan.dataflow.schedule import DRIVER_PROCESS, HOST_DEVICE, Action, Schedule
from rlplan.memory.ledger import MemoryLedger
from rlplan.planner.plan import Plan
from rlplan.report.timeline import Window
from rlplan.timing.step import StepTiming
from rlplan.trace import Span, Trace

STEADY_TITLE, FIRST_TITLE = "Every later step", "First step"


@dataclass(frozen=True)
class Forecast:
    """A schedule with what it will hold and when."""

    name: str
    """Of the plan's file."""
    ledger: MemoryLedger
    """Bytes after and inside each action."""
    schedule: Schedule
    """The actions."""
    trace: Trace
    """When they run: starting, a first and a steady step, finishing. The steady step begins at 0 s."""
    windows: tuple[Window, ...]
    """What to draw."""
    timing: StepTiming | None = None
    """Of a steady step; None where no seconds are known."""

    def in_order(self) -> "Forecast":
        """The same with the actions one after the other, each as long as any other."""
        return _forecast(self.name, self.ledger, self.schedule, None)


def forecast(plan: Plan, name: str) -> Forecast:
    """A plan in the seconds of its steady step, or its actions in order where none are known."""
    step = plan.timing.step if plan.timing is not None and plan.seconds else None
    return _forecast(name, plan.ledger, plan.shown_schedule, step)


def _forecast(name: str, ledger: MemoryLedger, schedule: Schedule, timing: StepTiming | None) -> Forecast:
    """Starting, two steps and finishing; the second step, which stands for all later ones, begins at 0 s."""
    if timing is None:
        step, length = _in_order(schedule.step)
    else:
        step, length = {action.action_id: (action.start_s, action.end_s) for action in timing.actions}, timing.seconds
        step |= {action.id: (length, length) for action in schedule.step if action.id not in step}  # in some steps only
    start, start_length = _in_order(schedule.start)
    finish, finish_length = _in_order(schedule.finish)
    parts = (
        (0, schedule.start, start, -length - start_length),
        (1, schedule.step, step, -length),
        (2, schedule.step, step, 0.0),
        (-1, schedule.finish, finish, length),
    )
    spans = [span for part in parts for span in _spans(schedule, *part)]
    windows = (
        Window("Start", -length - start_length, -length, is_timed=False),
        Window(FIRST_TITLE, -length, 0.0, timing is not None),
        Window(STEADY_TITLE, 0.0, length, timing is not None),
        Window("Finish", length, length + finish_length, is_timed=False),
    )
    return Forecast(name, ledger, schedule, Trace("predicted", spans), _telling(windows, ledger), timing)


def _in_order(actions: tuple[Action, ...]) -> tuple[dict[str, tuple[float, float]], float]:
    """(when each action runs if each takes a second and begins when what it comes after has ended, the length)."""
    ends: dict[str, float] = {}
    for action in actions:
        begin = max((ends[other] for other in action.after if other in ends), default=0.0)
        ends[action.id] = begin + 1.0
    return {name: (end - 1.0, end) for name, end in ends.items()}, max(ends.values(), default=0.0)


def _spans(
    schedule: Schedule, step: int, actions: tuple[Action, ...], times: Mapping[str, tuple[float, float]], offset: float
) -> list[Span]:
    devices = dict(schedule.processes)
    return [
        Span(action.id, step, process, devices.get(process, HOST_DEVICE), offset + times[action.id][0],
             offset + times[action.id][1])
        for action in actions
        for process in action.processes or (DRIVER_PROCESS,)
    ]  # fmt: skip


def _telling(windows: tuple[Window, ...], ledger: MemoryLedger) -> tuple[Window, ...]:
    """The steady step, and what comes before and after it where a device or a host holds most then.

    Starting is there too where nothing has seconds, which the rest would take the room from.
    """
    peaks = [ledger.host_peak(), *map(ledger.device_peak, ledger.devices)]
    run_phases = {peak.run_phase for peak in peaks}
    start, first, steady, finish = windows
    shows_start = "start" in run_phases or not steady.is_timed
    chosen = ((start, shows_start), (first, "first" in run_phases), (steady, True), (finish, "finish" in run_phases))
    return tuple(window for window, is_wanted in chosen if is_wanted)
