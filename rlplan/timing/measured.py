"""Predicted and measured seconds of each action, side by side.

In: a schedule, its JobTiming, and the spans and metric rows of a run. Out: one ActionSeconds per action.
Left out: single steps, which differ with the load of the machine.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rlplan.dataflow.schedule import Part, Schedule
from rlplan.timing.step import JobTiming
from rlplan.trace import Span
from rlplan.vocabulary import Phase

Durations = Mapping[tuple[Part, str], Sequence[float]]
FIRST = 1
"""The first step is slower, and no formula predicts it. It counts only where a run has no other step."""


@dataclass(frozen=True, slots=True)
class ActionSeconds:
    """Predicted and measured seconds of one action."""

    part: Part
    action_id: str
    phase: Phase
    predicted_s: float | None
    """None where the plan has no predicted time."""
    median_s: float
    """Median over `count` executions."""
    count: int

    @property
    def ratio(self) -> float | None:
        """Predicted over measured seconds; below one, the prediction was too short."""
        return self.predicted_s / self.median_s if self.predicted_s is not None and self.median_s > 0 else None


def collect_durations(schedule: Schedule, spans: Iterable[Span], rows: Iterable[Mapping[str, Any]]) -> Durations:
    """Collect the seconds of each execution, without the first step.

    The driver's own measurement (`seconds/ACTION` of a row) wins, because it includes the calls. Actions without one,
    such as starting a worker, last from the start of the first process to the end of the last.
    """
    ends: dict[tuple[Part, str], dict[tuple[int, int], tuple[float, float]]] = {}
    for span in spans:
        runs = ends.setdefault((_find_part(span.step), span.action_id), {})
        start_s, end_s = runs.get((span.step, span.attempt), (span.start_s, span.end_s))
        runs[(span.step, span.attempt)] = (min(start_s, span.start_s), max(end_s, span.end_s))
    written = [row for row in rows if row["step"] >= FIRST]
    durations: dict[tuple[Part, str], list[float]] = {}
    for part, actions in schedule.parts:
        for action in actions:
            timed = {run[0]: end - start for run, (start, end) in ends.get((part, action.id), {}).items()}
            name = f"seconds/{action.id}"
            if part == "step" and any(row.get(name) is not None for row in written):
                timed = {row["step"]: float(row[name]) for row in written if row.get(name) is not None}
            later = [seconds for step, seconds in timed.items() if step != FIRST]
            if timed:
                durations[(part, action.id)] = later or list(timed.values())
    return durations


def join_seconds(schedule: Schedule, timing: JobTiming | None, measured: Durations) -> tuple[ActionSeconds, ...]:
    """Make a row for each measured action, in the order of the schedule."""
    rows = []
    for part, actions in schedule.parts:
        for action in actions:
            durations = measured.get((part, action.id))
            if durations:
                cost = timing.cost(part, action.id) if timing else None
                predicted = cost.seconds if cost else None
                rows.append(ActionSeconds(part, action.id, action.phase, predicted, median(durations), len(durations)))
    return tuple(rows)


def _find_part(step: int) -> Part:
    special_steps: dict[int, Part] = {0: "start", -1: "finish"}
    return special_steps.get(step, "step")
