"""Predicted seconds beside measured ones, joined on the action.

In: a schedule, its JobTiming, the spans and the rows of seconds that a run left. Out: one ActionSeconds an action.
Left out: anything about one step alone: single steps differ by what else the machine does.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rlplan.dataflow.schedule import Part, Schedule
from rlplan.timing.job import JobTiming
from rlplan.trace import Span
from rlplan.vocabulary import Phase

Durations = Mapping[tuple[Part, str], Sequence[float]]
FIRST = 1
"""The first step is slower and nothing predicts it; it counts where a run has no other."""


@dataclass(frozen=True, slots=True)
class ActionSeconds:
    """An action of a part."""

    part: Part
    action_id: str
    phase: Phase
    predicted_s: float | None
    """None where the plan has no seconds."""
    median_s: float
    """Over `count` executions."""
    count: int

    @property
    def ratio(self) -> float | None:
        """Predicted over measured: below one the prediction was too short."""
        return self.predicted_s / self.median_s if self.predicted_s is not None and self.median_s > 0 else None


def measured_seconds(schedule: Schedule, spans: Iterable[Span], rows: Iterable[Mapping[str, Any]]) -> Durations:
    """Seconds of each execution that a run timed, the first step apart.

    A step's seconds are the driver's (`seconds/ACTION` of a row), calls included; what has none, such as starting, has
    those from the first process's start to the last one's end.
    """
    ends: dict[tuple[Part, str], dict[tuple[int, int], tuple[float, float]]] = {}
    for span in spans:
        runs = ends.setdefault((_part_of(span.step), span.action_id), {})
        start_s, end_s = runs.get((span.step, span.attempt), (span.start_s, span.end_s))
        runs[(span.step, span.attempt)] = (min(start_s, span.start_s), max(end_s, span.end_s))
    written = [row for row in rows if row["step"] >= FIRST]
    found: dict[tuple[Part, str], list[float]] = {}
    for part, actions in schedule.parts:
        for action in actions:
            timed = {run[0]: end - start for run, (start, end) in ends.get((part, action.id), {}).items()}
            name = f"seconds/{action.id}"
            if part == "step" and any(row.get(name) is not None for row in written):
                timed = {row["step"]: float(row[name]) for row in written if row.get(name) is not None}
            later = [seconds for step, seconds in timed.items() if step != FIRST]
            if timed:
                found[(part, action.id)] = later or list(timed.values())
    return found


def join_seconds(schedule: Schedule, timing: JobTiming | None, measured: Durations) -> tuple[ActionSeconds, ...]:
    """A row for each action that was measured, in the order of the schedule."""
    rows = []
    for part, actions in schedule.parts:
        for action in actions:
            durations = measured.get((part, action.id))
            if durations:
                cost = timing.cost(part, action.id) if timing else None
                predicted = cost.seconds if cost else None
                rows.append(ActionSeconds(part, action.id, action.phase, predicted, median(durations), len(durations)))
    return tuple(rows)


def _part_of(step: int) -> Part:
    named: dict[int, Part] = {0: "start", -1: "finish"}
    return named.get(step, "step")
