"""Scenes and lanes as data: what assets/timeline.js draws, and nothing about how.

In: a TracedSchedule, Scenes, windows of time. Out: a JSON-able mapping. Seconds are the trace's, bytes are whole;
values over n intervals are written as their changes, [index, value, index, value ...]. Left out: which scenes there are
(memory.py), what was held when (timeline.py).
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
from rlplan.vocabulary import MemoryKind, words_of

MAX_LANES = 24
"""Processes that are drawn; more are alike, and the note says how many there are."""


@dataclass(frozen=True)
class Scene:
    """Bytes of some processes and kinds over the intervals of one grid, predicted and measured."""

    title: str
    """For people."""
    edges: clock.Bytes
    """Seconds at which intervals begin and end, [n + 1]."""
    stacks: Mapping[str, clock.Bytes]
    """Predicted bytes by kind, from the bottom to the top, each [n]."""
    measured: clock.Bytes | None = None
    """Bytes, [n]; None where only points were measured."""
    points: tuple[clock.Bytes, clock.Bytes] | None = None
    """Measured points: (seconds, bytes), each [points]."""
    capacity: int | None = None
    """Bytes that there are; None where no line is drawn."""
    band: tuple[clock.Bytes, clock.Bytes] | None = None
    """Bytes at the low and at the high end of the prediction, each [n]."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Of each kind where its bytes come from, in words."""
    is_hidden: bool = False
    """Whether it is drawn only when it is asked for."""

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
    """The chart. timing: of a steady step, where it is predicted. first: the window that is shown at first."""
    phases, actions = _Names(), _Names()
    known = {action.id: str(action.phase) for _, part in traced.schedule.parts for action in part}
    lanes = lanes_of(traced)
    blocks = [
        [phases.index(block.phase), block.step, _clock(block.start_s), _clock(block.end_s)]
        for block in clock.phase_blocks(traced)
    ]
    bars = [_bars(lane, actions) for lane in lanes[:MAX_LANES]]
    costs = {one.action_id: one.cost for one in timing.actions} if timing else {}
    is_measured = traced.trace.origin == "measured"
    told = [_told(name, phases.index(known.get(name, "")), costs.get(name), is_measured) for name in actions.names]
    edges = scenes[0].edges if scenes else sorted({end for lane in lanes for bar in lane.bars for end in bar[1:]})
    return {
        "type": "timeline",
        "origin": traced.trace.origin,
        "numbers_steps": len({block[1] for block in blocks if block[1] > 0}) > 2,
        "edges": [_clock(edge) for edge in edges],
        "windows": [
            {"title": one.title, "start": _clock(one.start_s), "end": _clock(one.end_s), "timed": one.is_timed}
            for one in windows
        ],
        "first": first,
        "scenes": [_scene(scene) for scene in scenes],
        "lanes": bars,
        "actions": told,
        "phases": [{"name": name or "other", "color": style.phase_color(name)} for name in phases.names],
        "blocks": blocks,
        "note": f"{MAX_LANES} of {len(lanes)} processes are drawn." if len(lanes) > MAX_LANES else "",
    }


class _Names:
    """Names by the order in which they come up."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}

    def index(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))


def _bars(lane: "Lane", actions: _Names) -> dict[str, Any]:
    bars = [[actions.index(name), _clock(start), _clock(end)] for name, start, end in lane.bars]
    return {"process": lane.process, "group": lane.group, "bars": bars}


def _told(name: str, phase: int, cost: Cost | None, is_measured: bool) -> dict[str, Any]:
    """What the page says of an action; beside a measured one its predicted seconds."""
    told: dict[str, Any] = {"name": words_of(name), "phase": phase}
    if is_measured and cost:
        told["predicted"] = _clock(cost.seconds)
    if cost and cost.seconds and cost.bound_by is not Resource.IDLE:
        told["note"] = f"{words_of(cost.bound_by.value)}-bound"
    return told


def _clock(seconds: float) -> float:
    """To the microsecond: no clock of ours says more."""
    return round(float(seconds), 6)


def _scene(scene: Scene) -> dict[str, Any]:
    peak = int(scene.total.argmax()) if len(scene.total) else 0
    kinds = [
        {
            "kind": kind,
            "name": words_of(kind),
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
    """What the largest moments are."""
    words = [f"predicted peak {format_bytes(scene.total.max())}"] if scene.stacks else []
    if scene.band is not None and scene.band[1].max() > scene.band[0].max():
        words.append(f"between {format_bytes(scene.band[0].max())} and {format_bytes(scene.band[1].max())}")
    if scene.measured is not None:
        words.append(f"measured peak {format_bytes(scene.measured.max())}")
    if scene.capacity:
        words.append(f"capacity {format_bytes(scene.capacity)}")
    return words


def changes(values: clock.Bytes) -> list[int]:
    """Where values change, and to what.

    >>> changes(np.array([5.0, 5.0, 7.0]))
    [0, 5, 2, 7]
    """
    at = [0, *(np.flatnonzero(np.diff(values)) + 1)] if len(values) else []
    return [int(one) for index in at for one in (index, values[index])]


@dataclass(frozen=True)
class Lane:
    """A process and its bars; or several that do the same at the same time."""

    process: str
    """For people."""
    group: str
    """Of the devices that it is on."""
    bars: tuple[tuple[str, float, float], ...]
    """(action, start, end) in seconds."""


def lanes_of(traced: clock.TracedSchedule) -> list[Lane]:
    """Who does anything, those of one device group together, in the order of the schedule's groups."""
    groups = {process: layout.group for layout in traced.schedule.layouts for process, _ in layout.processes}
    order = [group.name for group in traced.schedule.groups]
    bars: dict[str, list[tuple[str, float, float]]] = {}
    for span in traced.trace.spans:
        bars.setdefault(span.process, []).append((span.action_id, span.start_s, span.end_s))
    alike: dict[tuple[str, str, tuple[tuple[str, float, float], ...]], list[str]] = {}
    for process, mine in bars.items():
        worker, _, rank = process.rpartition("/")
        alike.setdefault((groups.get(process, "host"), worker, tuple(mine)), []).append(rank)
    lanes = [Lane(_ranks(worker, ranks), group, mine) for (group, worker, mine), ranks in alike.items()]
    return sorted(lanes, key=lambda lane: order.index(lane.group) if lane.group in order else len(order))


def _ranks(worker: str, ranks: Sequence[str]) -> str:
    """A process, or processes that do the same at the same time.

    >>> _ranks("policy_trainer", ["0"]), _ranks("policy_trainer", ["0", "1", "2"]), _ranks("", ["ray_system"])
    ('policy_trainer/0', 'policy_trainer/0 to 2', 'ray_system')
    """
    name = f"{worker}/{ranks[0]}" if worker else ranks[0]
    return name if len(ranks) == 1 else f"{name} to {ranks[-1]}"
