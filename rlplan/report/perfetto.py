"""trace.json: actions and memory of a schedule in Chrome's trace format, for https://ui.perfetto.dev.

A device becomes a process of the trace, a process of ours a thread in it (several where its actions overlap), and an
action a slice. Memory is a counter for each kind. A flow leads from each weight sync to the generation that first uses
its weights.

In: a TracedSchedule, planned, simulated or measured. Out: JSON. Left out: clocks; timestamps are microseconds since the
first span, to the nanosecond.

Source: "Trace Event Format" of the Chromium project: phases M (names), X (slices), C (counters), s and f (flows).
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

from rlplan.report import timeline
from rlplan.report.timeline import TracedSchedule
from rlplan.trace import Span
from rlplan.vocabulary import ActionKind, format_name

FIRST_TID = 1_000
"""Thread numbers start here. A thread with the number of its process would be the main thread and take its name."""
USES_WEIGHTS = (ActionKind.GENERATE, ActionKind.EVALUATE)
ENGINE = "rollout_engine"
Event = dict[str, Any]


def write_trace(traced: TracedSchedule, path: Path) -> None:
    """Write the trace. Where nothing was timed, an older file is removed instead. Raises: OSError."""
    if text := perfetto_trace(traced):
        path.write_text(text, encoding="utf-8")
    else:
        path.unlink(missing_ok=True)


def perfetto_trace(traced: TracedSchedule) -> str:
    """Render the trace of a plan, a simulation or a run as JSON; empty where nothing was timed."""
    spans = sorted(traced.trace.spans, key=lambda span: (span.start_s, -span.end_s))
    if not spans:
        return ""
    places = {entry.device for part in (spans, traced.ledger.rows, traced.trace.samples) for entry in part}
    devices = sorted(places, key=lambda name: (name.partition(":")[0], len(name), name))
    writer = _Writer(traced, spans, {device: pid for pid, device in enumerate(devices, 1)})
    writer.add_slices()
    writer.add_flows()
    writer.add_predicted()
    writer.add_measured()
    # the sort is stable: of slices that start together, the enclosing one stays first
    events = [*writer.names, *sorted(writer.events, key=lambda event: event["ts"])]
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n'


def split_lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Split sorted spans of one process into lanes in which they follow or enclose each other, as slices of a thread
    must.
    """
    lanes: list[list[Span]] = []
    still_open: list[list[Span]] = []
    for span in spans:
        for open_spans in still_open:
            while open_spans and open_spans[-1].end_s <= span.start_s:
                open_spans.pop()
        fits = (n for n, open_spans in enumerate(still_open) if not open_spans or span.end_s <= open_spans[-1].end_s)
        number = next(fits, len(lanes))
        if number == len(lanes):
            lanes.append([])
            still_open.append([])
        lanes[number].append(span)
        still_open[number].append(span)
    return lanes


class _Writer:
    """Collects the events of a trace."""

    def __init__(self, traced: TracedSchedule, spans: list[Span], pids: dict[str, int]) -> None:
        self.traced, self.spans, self.pids = traced, spans, pids
        self.names: list[Event] = [self._name("process_name", pid, 0, device) for device, pid in pids.items()]
        self.events: list[Event] = []
        self.threads: dict[Span, int] = {}

    def add_slices(self) -> None:
        """Add a thread for each lane of a process, and its slices."""
        phases = {action.id: str(action.phase) for _, part in self.traced.schedule.parts for action in part}
        processes: dict[tuple[str, str], list[Span]] = defaultdict(list)
        for span in self.spans:
            processes[(span.device, span.process)].append(span)
        tids = count(FIRST_TID)
        for device, process in sorted(processes, key=lambda key: (self.pids[key[0]], key[1])):
            for number, lane in enumerate(split_lanes(processes[(device, process)]), 1):
                tid = next(tids)
                name = process if number == 1 else f"{process} ({number})"
                self.names.append(self._name("thread_name", self.pids[device], tid, name))
                for span in lane:
                    self.threads[span] = tid
                    self._add(
                        "X", span.action_id, span.device, span.start_s, tid=tid, cat=phases.get(span.action_id, ""),
                        dur=(self._nanoseconds(span.end_s) - self._nanoseconds(span.start_s)) / 1000,
                        args={"step": span.step, "attempt": span.attempt},
                    )  # fmt: skip

    def add_flows(self) -> None:
        """Add a flow from the sender of each weight sync to the next generation of every engine."""
        ids = count(1)
        syncs: dict[tuple[str, int, int], list[Span]] = defaultdict(list)
        users: dict[str, list[Span]] = defaultdict(list)
        for span in self.spans:
            kind = span.action_id.partition("/")[0]
            if kind == ActionKind.SYNC_WEIGHTS:
                syncs[(span.action_id, span.step, span.attempt)].append(span)
            elif kind in USES_WEIGHTS and span.process.startswith(ENGINE):
                users[span.process].append(span)
        for parts in syncs.values():
            sender = next((span for span in parts if not span.process.startswith(ENGINE)), parts[0])
            for generations in users.values():
                target = next((span for span in generations if span.start_s >= sender.end_s), None)
                if target is not None:
                    flow = next(ids)
                    for kind, span in (("s", sender), ("f", target)):
                        # bp "e" ends the flow at the slice that encloses its timestamp, not at the next one
                        self._add(kind, "weights", span.device, span.start_s, tid=self.threads[span], cat="weights",
                                  id=flow, **({"bp": "e"} if kind == "f" else {}))  # fmt: skip

    def add_predicted(self) -> None:
        """Add the ledger's memory, with a counter for each device, space and kind."""
        for device, space in sorted({(row.device, row.space) for row in self.traced.ledger.rows}):
            levels = timeline.predicted_levels(self.traced, (space,), device=device)
            for kind, values in sorted(levels.sum_by_kind(levels.processes).items()):
                name = f"predicted {format_name(kind)}" + (" in host memory" if space == "host" else "")
                self._add_counter(name, device, zip(levels.edges.tolist(), [*values.tolist(), 0.0], strict=True))

    def add_measured(self) -> None:
        """Add the memory that was resident after each action, with a counter for each device and kind."""
        latest: dict[tuple[str, str], dict[tuple[str, str], int]] = defaultdict(dict)
        points: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        for sample in sorted(self.traced.trace.samples, key=lambda sample: sample.at_s):
            if sample.statistic == "resident":
                key = (sample.device, sample.kind)
                latest[key][(sample.process, sample.role)] = sample.num_bytes
                points[key].append((max(sample.at_s, self.spans[0].start_s), sum(latest[key].values())))
        for (device, kind), counter in sorted(points.items()):
            self._add_counter(f"measured {format_name(kind)}", device, counter)

    def _add_counter(self, name: str, device: str, points: Iterable[tuple[float, float]]) -> None:
        """Add a counter of bytes with an event for each change."""
        before = None
        for at_s, value in points:
            if round(value) != before:
                before = round(value)
                self._add("C", name, device, at_s, args={"bytes": before})

    def _add(self, kind: str, name: str, device: str, at_s: float, **fields: Any) -> None:
        event: Event = {"ph": kind, "name": name, "pid": self.pids[device], "ts": self._nanoseconds(at_s) / 1000}
        self.events.append(event | fields)

    def _name(self, kind: str, pid: int, tid: int, name: str) -> Event:
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}

    def _nanoseconds(self, at_s: float) -> int:
        return round((at_s - self.spans[0].start_s) * 1e9)
