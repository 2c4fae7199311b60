"""Forecast: a plan in time, so that it can be drawn like a run.

In: a Plan. Out: a TracedSchedule with predicted spans, and the windows to draw.
Left out: drawing. Simulated plans have their own trace.

A plan predicts only the seconds of a steady step. The first step is drawn with the same seconds. Start and finish are
drawn in order with one second per action, and so is everything where no seconds are known.
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
    """A schedule with its predicted memory and times."""

    name: str
    """Name of the plan's file."""
    ledger: MemoryLedger
    """Bytes during and after each action."""
    schedule: Schedule
    """Schedule of the actions."""
    trace: Trace
    """Spans of the start, a first and a steady step, and the finish. The steady step begins at 0 s."""
    windows: tuple[Window, ...]
    """Windows to draw."""
    timing: StepTiming | None = None
    """Timing of a steady step; None where no seconds are known."""

    def drop_seconds(self) -> "Forecast":
        """A forecast in which all actions have equal length and follow each other."""
        return _forecast(self.name, self.ledger, self.schedule, None)


def forecast(plan: Plan, name: str) -> Forecast:
    """Forecast a plan with the seconds of its steady step, or with its actions in order where none are known."""
    step = plan.timing.step if plan.timing is not None and plan.seconds else None
    return _forecast(name, plan.ledger, plan.shown_schedule, step)


def _forecast(name: str, ledger: MemoryLedger, schedule: Schedule, timing: StepTiming | None) -> Forecast:
    """Lay out start, two steps and finish; the second step represents all later ones and begins at 0 s."""
    if timing is None:
        step, length = _arrange_in_order(schedule.step)
    else:
        step, length = {action.action_id: (action.start_s, action.end_s) for action in timing.actions}, timing.seconds
        step |= {action.id: (length, length) for action in schedule.step if action.id not in step}  # not in every step
    start, start_length = _arrange_in_order(schedule.start)
    finish, finish_length = _arrange_in_order(schedule.finish)
    parts = (
        # the steady step starts at 0 s, so its times on the axis are those of the plan
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


def _arrange_in_order(actions: tuple[Action, ...]) -> tuple[dict[str, tuple[float, float]], float]:
    """(start and end of each action, total length), if each takes a second and starts after its predecessors."""
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
    """Choose the steady step, and each other window in which a device or host has its peak.

    Where nothing has seconds, the start is always shown, because it takes no room from timed windows.
    """
    peaks = [ledger.host_peak(), *map(ledger.device_peak, ledger.devices)]
    run_phases = {peak.run_phase for peak in peaks}
    start, first, steady, finish = windows
    shows_start = "start" in run_phases or not steady.is_timed
    chosen = ((start, shows_start), (first, "first" in run_phases), (steady, True), (finish, "finish" in run_phases))
    return tuple(window for window, is_wanted in chosen if is_wanted)
