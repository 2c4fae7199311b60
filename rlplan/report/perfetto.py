"""trace.pftrace: what ran when and what it held, in Perfetto's own format, for https://ui.perfetto.dev.

In: a TracedSchedule, planned, simulated or measured. Out: bytes of a protobuf `Trace`. A device is a process of the
trace, a process of ours a thread in it (several where its actions overlap), an action a slice; memory is a counter for
each kind, weights flow from a sync to what they generate first. Left out: interned strings and clocks: timestamps are
nanoseconds since the first span.

Source of the messages and field numbers: protos/perfetto/trace/{trace,trace_packet}.proto and track_event/*.proto of
github.com/google/perfetto (v2 syntax, all optional). They are so few that no protobuf package is needed to write them.
"""

import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from rlplan.report import timeline
from rlplan.report.timeline import TracedSchedule
from rlplan.trace import Span
from rlplan.vocabulary import ActionKind, words_of

BEGIN, END, COUNTER = 1, 2, 4
"""TrackEvent.Type."""
UNIT_SIZE_BYTES = 3
"""CounterDescriptor.Unit."""
SEQUENCE = 1
"""TracePacket.trusted_packet_sequence_id: everything comes from one writer."""
FIRST_TID = 1_000
"""No thread has the number of a process: that would be its main thread, and have its name."""
USES_WEIGHTS = (ActionKind.GENERATE, ActionKind.EVALUATE)
ENGINE = "rollout_engine"


def varint(value: int) -> bytes:
    """Base-128, least significant group first; a negative number in two's complement of 64 bits.

    >>> varint(300).hex(), len(varint(-1))
    ('ac02', 10)
    """
    value &= (1 << 64) - 1
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])


def message(fields: Iterable[tuple[int, Any]]) -> bytes:
    """A protobuf message of (field number, value): an int is a varint, text and bytes come with their length."""
    parts = []
    for number, value in fields:
        if isinstance(value, Fixed64):
            parts.append(varint(number << 3 | 1) + struct.pack("<Q", value))
        elif isinstance(value, int):
            parts.append(varint(number << 3) + varint(value))
        else:
            data = value.encode() if isinstance(value, str) else value
            parts.append(varint(number << 3 | 2) + varint(len(data)) + data)
    return b"".join(parts)


class Fixed64(int):
    """A number of eight bytes, as flows are."""


@dataclass
class _Flows:
    """Which flows start and end at a slice."""

    starts: dict[Span, list[int]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[Span, list[int]] = field(default_factory=lambda: defaultdict(list))


@dataclass
class _Writer:
    """Collects descriptors, and events with their nanoseconds."""

    origin_s: float
    descriptors: list[bytes] = field(default_factory=list)
    events: list[tuple[int, bytes]] = field(default_factory=list)
    _uuids: Iterator[int] = field(default_factory=lambda: count(1))

    def track(self, *fields: tuple[int, Any]) -> int:
        """A TrackDescriptor; its uuid."""
        uuid = next(self._uuids)
        self.descriptors.append(message([(10, SEQUENCE), (60, message([(1, uuid), *fields]))]))
        return uuid

    def event(self, at_s: float, kind: int, track: int, *fields: tuple[int, Any]) -> None:
        """A TrackEvent."""
        at_ns = round((at_s - self.origin_s) * 1e9)
        event = message([(9, kind), (11, track), *fields])
        self.events.append((at_ns, message([(8, at_ns), (10, SEQUENCE), (11, event)])))

    def counter(self, parent: int, name: str, points: Iterable[tuple[float, float]]) -> None:
        """A counter of bytes below a process; a point for each change."""
        track, before = 0, None
        for at_s, value in points:
            if round(value) != before:
                before = round(value)
                track = track or self.track((5, parent), (2, name), (8, message([(3, UNIT_SIZE_BYTES)])))
                self.event(at_s, COUNTER, track, (30, before))

    def dump(self) -> bytes:
        """The Trace: descriptors, then events in order of time; those at one time in the order in which they came."""
        ordered = [packet for _, packet in sorted(self.events, key=lambda event: event[0])]
        return message((1, packet) for packet in (*self.descriptors, *ordered))


def write_trace(traced: TracedSchedule, path: Path) -> None:
    """Write the trace; where nothing was timed there is none, an older one neither. Raises: OSError."""
    if data := perfetto_trace(traced):
        path.write_bytes(data)
    else:
        path.unlink(missing_ok=True)


def perfetto_trace(traced: TracedSchedule) -> bytes:
    """The trace of a plan, a simulation or a run; empty where nothing was timed."""
    spans = sorted(traced.trace.spans, key=lambda span: (span.start_s, -span.end_s))
    if not spans:
        return b""
    writer = _Writer(spans[0].start_s)
    places = {one.device for part in (spans, traced.ledger.rows, traced.trace.samples) for one in part}
    devices = sorted(places, key=lambda name: (name.partition(":")[0], len(name), name))
    pids = {device: pid for pid, device in enumerate(devices, 1)}
    tracks = {device: writer.track((3, message([(1, pid), (6, device)]))) for device, pid in pids.items()}
    _write_slices(writer, spans, pids, _flows(spans), traced)
    _write_predicted(writer, traced, tracks)
    _write_measured(writer, traced, tracks)
    return writer.dump()


def lanes_of(spans: Iterable[Span]) -> list[list[Span]]:
    """Sorted spans of one process, so that those of a lane follow or enclose each other, as slices of a thread must."""
    lanes: list[list[Span]] = []
    still_open: list[list[Span]] = []
    for span in spans:
        for mine in still_open:
            while mine and mine[-1].end_s <= span.start_s:
                mine.pop()
        fits = (n for n, mine in enumerate(still_open) if not mine or span.end_s <= mine[-1].end_s)
        number = next(fits, len(lanes))
        if number == len(lanes):
            lanes.append([])
            still_open.append([])
        lanes[number].append(span)
        still_open[number].append(span)
    return lanes


def _write_slices(
    writer: _Writer, spans: list[Span], pids: dict[str, int], flows: _Flows, traced: TracedSchedule
) -> None:
    phases = {action.id: str(action.phase) for _, part in traced.schedule.parts for action in part}
    threads: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in spans:
        threads[(span.device, span.process)].append(span)
    tids = count(FIRST_TID)
    for device, process in sorted(threads, key=lambda key: (pids[key[0]], key[1])):
        for number, lane in enumerate(lanes_of(threads[(device, process)]), 1):
            name = process if number == 1 else f"{process} ({number})"
            track = writer.track((4, message([(1, pids[device]), (2, next(tids)), (5, name)])))
            open_ends: list[float] = []
            for span in lane:
                while open_ends and open_ends[-1] <= span.start_s:
                    writer.event(open_ends.pop(), END, track)
                phase = [(22, phases[span.action_id])] if span.action_id in phases else []
                notes = [(4, message([(10, key), (4, getattr(span, key))])) for key in ("step", "attempt")]
                starts = [(47, Fixed64(one)) for one in flows.starts.get(span, ())]
                ends = [(48, Fixed64(one)) for one in flows.ends.get(span, ())]
                writer.event(span.start_s, BEGIN, track, (23, span.action_id), *phase, *notes, *starts, *ends)
                open_ends.append(span.end_s)
            for end_s in reversed(open_ends):
                writer.event(end_s, END, track)


def _flows(spans: list[Span]) -> _Flows:
    """Of every sync one flow to each engine: from the sender's slice to what the engine generates next."""
    flows, ids = _Flows(), count(1)
    syncs: dict[tuple[str, int, int], list[Span]] = defaultdict(list)
    users: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        kind = span.action_id.partition("/")[0]
        if kind == ActionKind.SYNC_WEIGHTS:
            syncs[(span.action_id, span.step, span.attempt)].append(span)
        elif kind in USES_WEIGHTS and span.process.startswith(ENGINE):
            users[span.process].append(span)
    for parts in syncs.values():
        sender = next((span for span in parts if not span.process.startswith(ENGINE)), parts[0])
        for mine in users.values():
            target = next((span for span in mine if span.start_s >= sender.end_s), None)
            if target is not None:
                flow = next(ids)
                flows.starts[sender].append(flow)
                flows.ends[target].append(flow)
    return flows


def _write_predicted(writer: _Writer, traced: TracedSchedule, tracks: dict[str, int]) -> None:
    """What the ledger says, a counter for each device, space and kind."""
    for device, space in sorted({(row.device, row.space) for row in traced.ledger.rows}):
        levels = timeline.predicted_levels(traced, (space,), device=device)
        for kind, values in sorted(levels.by_kind(levels.processes).items()):
            name = f"predicted {words_of(kind)}" + (" in host memory" if space == "host" else "")
            points = zip(levels.edges.tolist(), [*values.tolist(), 0.0], strict=True)
            writer.counter(tracks[device], name, points)


def _write_measured(writer: _Writer, traced: TracedSchedule, tracks: dict[str, int]) -> None:
    """What was resident when each action had ended, a counter for each device and kind."""
    held: dict[tuple[str, str], dict[tuple[str, str], int]] = defaultdict(dict)
    points: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for sample in sorted(traced.trace.samples, key=lambda sample: sample.at_s):
        if sample.statistic == "resident":
            key = (sample.device, sample.kind)
            held[key][(sample.process, sample.role)] = sample.num_bytes
            points[key].append((max(sample.at_s, writer.origin_s), sum(held[key].values())))
    for (device, kind), mine in sorted(points.items()):
        writer.counter(tracks[device], f"measured {words_of(kind)}", mine)
