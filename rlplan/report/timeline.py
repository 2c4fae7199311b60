"""A schedule in time: predicted and measured memory of every process at every second.

In: a TracedSchedule, whose spans are measured (a run folder) or predicted (a plan, a simulation).
Out: step functions of bytes, phase blocks and windows of time. Left out: drawing.

During an action a process counts with its peak; from its end to the process's next action, with the memory that stayed
resident. Processes without actions (the driver, Ray) keep each sample until the next, and their first from the start.
Peaks of two processes in one action may occur at different times, so their sum is an upper bound, for predictions and
measurements alike.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlplan.dataflow.schedule import Schedule
from rlplan.memory.ledger import Bound, LedgerRow, MemoryLedger
from rlplan.report.dataframes import TOTAL, run_phase_of_step
from rlplan.trace import Trace

Bytes: TypeAlias = NDArray[np.float64]
Key = tuple[str, int, int]
"""(action_id, step, attempt)."""


class TracedSchedule(Protocol):
    """A schedule, its memory ledger, and the times of its actions, measured or predicted."""

    @property
    def ledger(self) -> MemoryLedger:
        """Memory of each process, by action."""
        ...

    @property
    def schedule(self) -> Schedule:
        """Schedule of the actions."""
        ...

    @property
    def trace(self) -> Trace:
        """Spans, and measured memory samples where there are any."""
        ...


@dataclass(frozen=True)
class Levels:
    """Step functions over n intervals of one grid."""

    edges: Bytes
    """Interval borders in seconds, [n + 1]."""
    parts: dict[tuple[str, str], Bytes]
    """Bytes by (process, kind), each [n]."""

    @property
    def processes(self) -> tuple[str, ...]:
        """Names of the processes with any memory."""
        return tuple(sorted({process for process, _ in self.parts}))

    def sum_by_kind(self, processes: Iterable[str]) -> dict[str, Bytes]:
        """Sum the bytes of each kind over these processes."""
        wanted = set(processes)
        sums: dict[str, Bytes] = {}
        for (process, kind), values in self.parts.items():
            if process in wanted:
                sums[kind] = sums[kind] + values if kind in sums else values
        return sums

    def total(self, processes: Iterable[str], without: Iterable[str] = ()) -> Bytes:
        """Sum the bytes of all kinds except `without` over these processes."""
        excluded = set(without)
        parts = [values for kind, values in self.sum_by_kind(processes).items() if kind not in excluded]
        return sum(parts, np.zeros(max(len(self.edges) - 1, 0)))


@dataclass(frozen=True, slots=True)
class _Stay:
    """Memory of a process during and after a span, in bytes by kind."""

    span: tuple[float, float]
    inside: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Block:
    """A period of one phase of one step."""

    phase: str
    step: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Window:
    """A period of the run that a chart can show."""

    title: str
    """Title for the reader."""
    start_s: float
    """Start, in the trace's seconds."""
    end_s: float
    """End, in the trace's seconds."""
    is_timed: bool = True
    """Whether its seconds are predicted or measured; otherwise they only express an order."""


def predicted_levels(
    traced: TracedSchedule,
    spaces: Iterable[str] = ("device", "host"),
    bound: Bound = "expected",
    device: str | None = None,
) -> Levels:
    """Memory levels that the ledger predicts for the recorded actions, from rows in those spaces.

    bound: which end of the rows' intervals to use. device: only rows on this device.
    """
    wanted, rows = set(spaces), defaultdict(list)
    for row in traced.ledger.rows:
        if row.space in wanted and device in (None, row.device):
            rows[(row.run_phase, row.action_id)].append(row)
    all_spans, own = intervals(traced), _group_by_process(traced)
    stays: dict[str, dict[Key, _Stay]] = defaultdict(dict)
    for key, span in all_spans.items():
        for row in rows[(run_phase_of_step(key[1]), key[0])]:
            stay = stays[row.process].setdefault(key, _Stay(own.get(row.process, {}).get(key, span)))
            inside, after = _count_bytes(row, bound)
            stay.inside[str(row.kind)] = stay.inside.get(str(row.kind), 0) + inside
            stay.after[str(row.kind)] = stay.after.get(str(row.kind), 0) + after
    return _levels(traced, stays)


def _count_bytes(row: LedgerRow, bound: Bound) -> tuple[int, int]:
    """Bytes (during the action, after it). In host memory, a row counts for all processes that it represents."""
    times = row.num_alike if row.space == "host" else 1
    return row.get_peak(bound) * times, row.get_resident(bound) * times


def measured_levels(traced: TracedSchedule) -> Levels:
    """Total memory of every process as the operating system reports it, under the kind `total`."""
    all_spans, own = intervals(traced), _group_by_process(traced)
    stays: dict[str, dict[Key, _Stay]] = defaultdict(dict)
    for sample in traced.trace.samples:
        if sample.kind == TOTAL:
            key = (sample.action_id, sample.step, sample.attempt)
            span = own.get(sample.process, {}).get(key) or all_spans.get(key) or (sample.at_s, sample.at_s)
            stay = stays[sample.process].setdefault(key, _Stay(span))
            for table in (stay.inside, stay.after):
                table.setdefault(TOTAL, sample.num_bytes)
            (stay.inside if sample.statistic == "peak" else stay.after)[TOTAL] = sample.num_bytes
    return _levels(traced, stays)


def measured_points(traced: TracedSchedule, processes: Iterable[str]) -> tuple[Bytes, Bytes]:
    """(seconds, bytes): total memory of these processes, each time after an action was measured.

    A point needs a sample of every process that had started by then, so that no partial sum looks like a total.
    """
    wanted = set(processes)
    samples = [
        sample
        for sample in sorted(traced.trace.samples, key=lambda sample: sample.at_s)
        if sample.process in wanted and sample.kind == TOTAL and sample.statistic == "resident"
    ]
    begun = {process: min(span[0] for span in spans.values()) for process, spans in _group_by_process(traced).items()}
    awaited = {sample.process for sample in samples if sample.process in begun}
    latest: dict[str, dict[tuple[str, str], int]] = defaultdict(dict)
    # a process without spans counts from the start with its first sample
    for sample in reversed(samples):
        if sample.process not in begun:
            latest[sample.process][(sample.role, sample.kind)] = sample.num_bytes
    points: dict[Key, tuple[float, float]] = {}
    for sample in samples:
        latest[sample.process][(sample.role, sample.kind)] = sample.num_bytes
        if all(process in latest or begun[process] >= sample.at_s for process in awaited):
            num_bytes = sum(size for parts in latest.values() for size in parts.values())
            points[(sample.action_id, sample.step, sample.attempt)] = (sample.at_s, num_bytes)
    pairs = np.array(list(points.values()), dtype=float).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def phase_blocks(traced: TracedSchedule) -> tuple[Block, ...]:
    """Phases over time; consecutive actions of one phase and step form one block."""
    parts = {"start": traced.schedule.start, "finish": traced.schedule.finish}
    phases = {
        (part, action.id): str(action.phase)
        for part in ("start", "first", "steady", "finish")
        for action in parts.get(part, traced.schedule.step)
    }
    blocks: list[Block] = []
    for (action_id, step, _), (start_s, end_s) in sorted(intervals(traced).items(), key=lambda item: item[1]):
        phase = phases.get((run_phase_of_step(step), action_id), "")
        if blocks and (blocks[-1].phase, blocks[-1].step) == (phase, step):
            blocks[-1] = Block(phase, step, blocks[-1].start_s, max(blocks[-1].end_s, end_s))
        else:
            blocks.append(Block(phase, step, start_s, end_s))
    return tuple(blocks)


def choose_windows(blocks: tuple[Block, ...]) -> tuple[Window, ...]:
    """Choose the windows of a run: the start, the first two steps, and the last two with the finish."""
    steps = sorted({block.step for block in blocks if block.step > 0})
    has_finish = any(block.step < 0 for block in blocks)
    groups = [[0]]
    if len(steps) <= 4:
        groups.append([*steps, -1])
    else:
        groups += [steps[:2], [*steps[-2:], -1]]
    windows = []
    for group in groups:
        group_blocks = [block for block in blocks if block.step in group]
        if group_blocks:
            title = _title([step for step in group if step > 0], 0 in group, has_finish and -1 in group)
            windows.append(Window(title, min(b.start_s for b in group_blocks), max(b.end_s for b in group_blocks)))
    return tuple(windows)


def _title(steps: list[int], is_start: bool, is_finish: bool) -> str:
    if is_start:
        return "Start"
    if not steps:
        return "Finish"
    name = f"Step {steps[0]}" if len(steps) == 1 else f"Steps {steps[0]}\u2013{steps[-1]}"
    return f"{name} and finish" if is_finish else name


def intervals(traced: TracedSchedule) -> dict[Key, tuple[float, float]]:
    """Start and end of each action over all its processes."""
    times: dict[Key, tuple[float, float]] = {}
    for spans in _group_by_process(traced).values():
        for key, (start_s, end_s) in spans.items():
            before = times.get(key, (start_s, end_s))
            times[key] = (min(before[0], start_s), max(before[1], end_s))
    return times


def _group_by_process(traced: TracedSchedule) -> dict[str, dict[Key, tuple[float, float]]]:
    spans: dict[str, dict[Key, tuple[float, float]]] = {}
    for span in traced.trace.spans:
        spans.setdefault(span.process, {})[(span.action_id, span.step, span.attempt)] = (span.start_s, span.end_s)
    return spans


def _levels(traced: TracedSchedule, stays: dict[str, dict[Key, _Stay]]) -> Levels:
    own, edges = _group_by_process(traced), _edges(traced)
    if not len(edges):
        return Levels(edges, {})
    parts: dict[tuple[str, str], Bytes] = {}
    for process, table in stays.items():
        events = sorted(table.values(), key=lambda stay: stay.span)
        if process not in own:
            _fill(parts, edges, process, _Stay((edges[0], events[0].span[0]), events[0].after))
        ends = [stay.span[0] for stay in events[1:]] + [edges[-1]]
        for stay, next_s in zip(events, ends, strict=True):
            _fill(parts, edges, process, stay)
            _fill(parts, edges, process, _Stay((stay.span[1], next_s), stay.after))
    return Levels(edges, parts)


def _edges(traced: TracedSchedule) -> Bytes:
    """One grid for all curves of a chart: all ends of spans, and samples of processes without spans."""
    own = _group_by_process(traced)
    times = {t for spans in own.values() for pair in spans.values() for t in pair}
    if times:
        times |= {sample.at_s for sample in traced.trace.samples if sample.process not in own}
    return np.array(sorted(times))


def _fill(parts: dict[tuple[str, str], Bytes], edges: Bytes, process: str, stay: _Stay) -> None:
    """Raise the levels within the span to `stay.inside`."""

    first, last = (int(np.searchsorted(edges, t)) for t in stay.span)
    for kind, size in stay.inside.items():
        if size and last > first:
            values = parts.setdefault((process, kind), np.zeros(len(edges) - 1))
            values[first:last] = np.maximum(values[first:last], size)
