"""Scenes and lanes as data for assets/timeline.js.

In: a TracedSchedule, Scenes, windows of time. Out: a JSON-able mapping. Seconds are the trace's, bytes are integers;
values over n intervals are written as their changes, [index, value, index, value ...]. Left out: the choice of scenes
(memory.py), memory levels (timeline.py), drawing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlplan.report import style
from rlplan.report import timeline as clock
from rlplan.timing.cost import Cost, Resource
from rlplan.timing.step import StepTiming
from rlplan.units import format_bytes
from rlplan.vocabulary import MemoryKind, format_name

MAX_LANES = 24
"""Most processes that are drawn; a note gives the total number."""


@dataclass(frozen=True)
class Scene:
    """Memory of some processes and kinds over the intervals of one grid, predicted and measured."""

    title: str
    """Title for the reader."""
    edges: clock.Bytes
    """Interval borders in seconds, [n + 1]."""
    stacks: Mapping[str, clock.Bytes]
    """Predicted bytes by kind, from the bottom to the top, each [n]."""
    measured: clock.Bytes | None = None
    """Measured bytes, [n]; None where only points were measured."""
    points: tuple[clock.Bytes, clock.Bytes] | None = None
    """Measured points: (seconds, bytes), each [points]."""
    capacity: int | None = None
    """Available bytes; None draws no line."""
    band: tuple[clock.Bytes, clock.Bytes] | None = None
    """Bytes at the low and the high end of the prediction, each [n]."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Provenance of each kind's bytes, in words."""
    is_hidden: bool = False
    """Whether it is hidden until the reader selects it."""

    @property
    def total(self) -> clock.Bytes:
        """Predicted bytes of all kinds."""
        return sum(self.stacks.values(), np.zeros(len(self.edges) - 1))

    @property
    def top(self) -> float:
        """The largest value to show."""
        curves = [self.total, *(self.band or ()), *([] if self.measured is None else [self.measured])]
        curves += [self.points[1]] if self.points else []
        return float(max(max(curve, default=0) for curve in curves))


def timeline_chart(
    traced: clock.TracedSchedule,
    scenes: Sequence[Scene],
    windows: Sequence[clock.Window],
    timing: StepTiming | None = None,
    first: int = 0,
) -> dict[str, Any]:
    """Build the chart. timing: of a steady step, where it is predicted. first: the window that is shown initially."""
    phases, actions = _Names(), _Names()
    known = {action.id: str(action.phase) for _, part in traced.schedule.parts for action in part}
    lanes = collect_lanes(traced)
    blocks = [
        [phases.index(block.phase), block.step, _clock(block.start_s), _clock(block.end_s)]
        for block in clock.phase_blocks(traced)
    ]
    bars = [_bars(lane, actions) for lane in lanes[:MAX_LANES]]
    costs = {action.action_id: action.cost for action in timing.actions} if timing else {}
    is_measured = traced.trace.origin == "measured"
    action_rows = [
        _describe_action(name, phases.index(known.get(name, "")), costs.get(name), is_measured)
        for name in actions.names
    ]
    edges = scenes[0].edges if scenes else sorted({end for lane in lanes for bar in lane.bars for end in bar[1:]})
    return {
        "type": "timeline",
        "origin": traced.trace.origin,
        "numbers_steps": len({block[1] for block in blocks if block[1] > 0}) > 2,
        "edges": [_clock(edge) for edge in edges],
        "windows": [
            {"title": w.title, "start": _clock(w.start_s), "end": _clock(w.end_s), "timed": w.is_timed} for w in windows
        ],
        "first": first,
        "scenes": [_scene(scene) for scene in scenes],
        "lanes": bars,
        "actions": action_rows,
        "phases": [{"name": name or "other", "color": style.phase_color(name)} for name in phases.names],
        "blocks": blocks,
        "note": f"{MAX_LANES} of {len(lanes)} processes are drawn." if len(lanes) > MAX_LANES else "",
    }


class _Names:
    """Numbers names in the order of their first use."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}

    def index(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))


def _bars(lane: "Lane", actions: _Names) -> dict[str, Any]:
    bars = [[actions.index(name), _clock(start), _clock(end)] for name, start, end in lane.bars]
    return {"process": lane.process, "group": lane.group, "bars": bars}


def _describe_action(name: str, phase: int, cost: Cost | None, is_measured: bool) -> dict[str, Any]:
    """Describe an action; a measured one includes its predicted seconds."""
    row: dict[str, Any] = {"name": format_name(name), "phase": phase}
    if is_measured and cost:
        row["predicted"] = _clock(cost.seconds)
    if cost and cost.seconds and cost.bound_by is not Resource.IDLE:
        row["note"] = f"{format_name(cost.bound_by.value)}-bound"
    return row


def _clock(seconds: float) -> float:
    """Round to microseconds, the precision of our clocks."""
    return round(float(seconds), 6)


def _scene(scene: Scene) -> dict[str, Any]:
    peak = int(scene.total.argmax()) if len(scene.total) else 0
    kinds = [
        {
            "kind": kind,
            "name": format_name(kind),
            "color": style.KIND_COLORS[MemoryKind(kind)],
            "source": scene.sources.get(kind, ""),
            "changes": changes(values),
            "at_peak": int(values[peak]),
            "most": int(values.max()),
        }
        for kind, values in scene.stacks.items()
        if values.max(initial=0) > 0
    ]
    low, high = scene.band or (None, None)
    return {
        "title": scene.title,
        "hidden": scene.is_hidden,
        "height": 290 if len(kinds) > 4 else 190,
        "top": scene.top,
        "capacity": scene.capacity,
        "words": _words(scene),
        "kinds": kinds,
        "low": None if low is None else changes(low),
        "high": None if high is None else changes(high),
        "measured": None if scene.measured is None else changes(scene.measured),
        "points": None
        if scene.points is None or not len(scene.points[0])
        else [[_clock(x) for x in scene.points[0]], [int(y) for y in scene.points[1]]],
    }


def _words(scene: Scene) -> list[str]:
    """Describe the peaks."""
    words = [f"predicted peak {format_bytes(scene.total.max())}"] if scene.stacks else []
    if scene.band is not None and scene.band[1].max() > scene.band[0].max():
        words.append(f"between {format_bytes(scene.band[0].max())} and {format_bytes(scene.band[1].max())}")
    if scene.measured is not None:
        words.append(f"measured peak {format_bytes(scene.measured.max())}")
    if scene.capacity:
        words.append(f"capacity {format_bytes(scene.capacity)}")
    return words


def changes(values: clock.Bytes) -> list[int]:
    """Run-length encode values as (index, value) pairs.

    >>> changes(np.array([5.0, 5.0, 7.0]))
    [0, 5, 2, 7]
    """
    at = [0, *(np.flatnonzero(np.diff(values)) + 1)] if len(values) else []
    return [int(number) for index in at for number in (index, values[index])]


@dataclass(frozen=True)
class Lane:
    """A process with its bars, or several processes with identical bars."""

    process: str
    """Name for the reader."""
    group: str
    """Device group of the process."""
    bars: tuple[tuple[str, float, float], ...]
    """(action, start, end) in seconds."""


def collect_lanes(traced: clock.TracedSchedule) -> list[Lane]:
    """Collect the lanes of all active processes, grouped by device group in the order of the schedule."""
    groups = {process: layout.group for layout in traced.schedule.layouts for process, _ in layout.processes}
    order = [group.name for group in traced.schedule.groups]
    bars: dict[str, list[tuple[str, float, float]]] = {}
    for span in traced.trace.spans:
        bars.setdefault(span.process, []).append((span.action_id, span.start_s, span.end_s))
    alike: dict[tuple[str, str, tuple[tuple[str, float, float], ...]], list[str]] = {}
    for process, process_bars in bars.items():
        worker, _, rank = process.rpartition("/")
        alike.setdefault((groups.get(process, "host"), worker, tuple(process_bars)), []).append(rank)
    lanes = [Lane(_ranks(worker, ranks), group, lane_bars) for (group, worker, lane_bars), ranks in alike.items()]
    return sorted(lanes, key=lambda lane: order.index(lane.group) if lane.group in order else len(order))


def _ranks(worker: str, ranks: Sequence[str]) -> str:
    """Name a process, or several processes with identical bars.

    >>> _ranks("policy_trainer", ["0"]), _ranks("policy_trainer", ["0", "1", "2"]), _ranks("", ["ray_system"])
    ('policy_trainer/0', 'policy_trainer/0 to 2', 'ray_system')
    """
    name = f"{worker}/{ranks[0]}" if worker else ranks[0]
    return name if len(ranks) == 1 else f"{name} to {ranks[-1]}"
