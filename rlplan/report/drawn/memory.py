"""Memory over time: the whole host and every process, or one GPU of each group, below a timeline by role.

In: a TracedSchedule: a measured run folder, or a predicted plan or simulation. Out: charts as data.
Left out: conversion of a scene to data (scenes.py), the other charts (curves.py), memory levels (timeline.py).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlplan.dataflow.schedule import DeviceGroup, Schedule
from rlplan.memory.ledger import Bound, LedgerRow, MemoryLedger
from rlplan.report import style
from rlplan.report import timeline as clock
from rlplan.report.dataframes import order_processes
from rlplan.report.drawn.scenes import Scene, timeline_chart
from rlplan.timing.step import StepTiming
from rlplan.trace import Trace
from rlplan.vocabulary import MemoryKind

BOUNDS: tuple[Bound, Bound, Bound] = ("expected", "low", "high")
MAX_PROCESSES = 12
MAX_SPANS = 8000
"""A run with more is cut to its first and last steps: the page stays under 1.5 MB."""
_STACK = tuple(str(kind) for kind in style.KIND_COLORS)
_MODELLED = tuple(kind for kind in _STACK if kind != MemoryKind.PROCESS)


@dataclass(frozen=True)
class _Part:
    """A part of a traced schedule."""

    ledger: MemoryLedger
    schedule: Schedule
    trace: Trace


def memory_of_host(traced: clock.TracedSchedule, timing: StepTiming | None = None) -> dict[str, Any]:
    """Chart of the whole host, with its processes initially hidden. Empty where no action was measured.

    Where process baselines dominate, another scene shows only the modelled kinds. Its measured values exclude the
    measured baseline of each process.
    """
    windows = clock.choose_windows(clock.phase_blocks(traced))
    if not windows:
        return {}
    traced, is_cut = _cut(traced, windows)
    ledger = traced.ledger
    predicted = clock.predicted_levels(traced)
    measured = clock.measured_levels(traced)
    names = tuple(dict.fromkeys([*predicted.processes, *measured.processes]))
    scenes = [_processes("Whole host", traced, names, predicted, measured)]
    scenes[0] = replace(scenes[0], capacity=ledger.host_capacity)
    if scenes[0].stacks.get(str(MemoryKind.PROCESS), np.zeros(1)).max() > scenes[0].top / 2:
        scenes.append(_remove_baselines(traced, predicted, measured))
    by_process = [_processes(name, traced, (name,), predicted, measured) for name in order_processes(names)]
    largest = sorted(by_process, key=lambda scene: -scene.top)[:MAX_PROCESSES]
    scenes += [replace(scene, is_hidden=True) for scene in by_process if scene in largest]
    chart = timeline_chart(traced, scenes, windows, timing, first=min(1, len(windows) - 1))
    count = len(by_process)
    notes = [
        chart["note"],
        "Steps between the first and the last two are left out." if is_cut else "",
        f"The {len(largest)} largest of {count} processes can be shown." if len(largest) < count else "",
    ]
    return chart | {"note": " ".join(filter(None, notes))}


def memory_by_device(
    traced: clock.TracedSchedule, windows: tuple[clock.Window, ...], timing: StepTiming | None = None, first: int = 0
) -> dict[str, Any]:
    """Chart of one GPU per group, which represents its group, and of the hosts; on a CPU, of the host only."""
    ledger = traced.ledger
    groups = [group for group in traced.schedule.groups if group.devices[0] in ledger.devices]
    if ledger.shares_host_memory:
        groups = []
    scenes = [
        replace(_place(traced, "device", group.devices[0]), title=_title(group, len(groups)),
                capacity=ledger.get_device_capacity(group.devices[0]) or None)
        for group in groups
    ]  # fmt: skip
    if ledger.shares_host_memory:
        predicted, measured = clock.predicted_levels(traced), clock.measured_levels(traced)
        scenes = [_processes("The host", traced, predicted.processes, predicted, measured)]
        scenes[0] = replace(scenes[0], capacity=ledger.host_capacity or None)
    for host in ledger.hosts if not ledger.shares_host_memory else ():
        name = groups[ledger.hosts.index(host) % len(groups)].name
        title = "Each host" if len(ledger.hosts) == 1 else f"A host of {name}"
        scenes.append(replace(_place(traced, "host", host), title=title, capacity=ledger.host_capacity or None))
    return timeline_chart(traced, [scene for scene in scenes if scene.stacks], windows, timing, first)


def _title(group: DeviceGroup, num_groups: int) -> str:
    alike = f"One GPU of {len(group.devices)}" if len(group.devices) > 1 else "The GPU"
    return alike if num_groups == 1 else f"{alike}, {group.name}"


def _cut(traced: clock.TracedSchedule, windows: tuple[clock.Window, ...]) -> tuple[clock.TracedSchedule, bool]:
    """Restrict a long trace to the windows. Returns: the traced schedule, and whether it was cut."""
    trace = traced.trace
    if len(trace.spans) <= MAX_SPANS:
        return traced, False
    slack = 0.05
    spans = [
        s for s in trace.spans if any(w.start_s - slack <= s.start_s and s.end_s <= w.end_s + slack for w in windows)
    ]
    samples = [s for s in trace.samples if any(w.start_s - slack <= s.at_s <= w.end_s + slack for w in windows)]
    return _Part(traced.ledger, traced.schedule, Trace(trace.origin, spans, samples)), True


def _place(traced: clock.TracedSchedule, space: str, device: str) -> Scene:
    """Memory of one device or host."""
    expected, low, high = (clock.predicted_levels(traced, (space,), bound, device) for bound in BOUNDS)
    measured = clock.measured_levels(traced)
    here = [name for name, place in traced.schedule.processes if place == device and name in measured.processes]
    names = expected.processes
    ends = low.total(names), high.total(high.processes)
    rows = [row for row in traced.ledger.rows if row.space == space and row.device == device]
    return Scene(
        title="",
        edges=expected.edges,
        stacks=_stacks(expected, names, _STACK),
        measured=measured.total(here) if here and space == "device" else None,
        points=clock.measured_points(traced, here) if space == "device" else None,
        band=None if (ends[0] == ends[1]).all() else ends,
        sources=_sources(rows),
    )


def _processes(
    title: str,
    traced: clock.TracedSchedule,
    names: tuple[str, ...],
    predicted: clock.Levels,
    measured: clock.Levels,
) -> Scene:
    """Memory of some processes."""
    seen = [name for name in names if name in measured.processes]
    return Scene(
        title=title,
        edges=predicted.edges,
        stacks=_stacks(predicted, names, _STACK),
        measured=measured.total(seen) if seen else None,
        points=clock.measured_points(traced, names),
        sources=_sources(row for row in traced.ledger.rows if row.process in names),
    )


def _remove_baselines(traced: clock.TracedSchedule, predicted: clock.Levels, measured: clock.Levels) -> Scene:
    """Memory of processes with models, less the baseline of each before it loaded one."""
    baselines = {s.process: s.num_bytes for s in traced.trace.samples if s.kind == MemoryKind.PROCESS}
    names, offset = tuple(baselines), sum(baselines.values())
    seconds, sizes = clock.measured_points(traced, names)
    return Scene(
        title="Without process baselines",
        edges=predicted.edges,
        stacks=_stacks(predicted, names or predicted.processes, _MODELLED),
        measured=np.maximum(measured.total(names) - offset, 0) if names else None,
        points=(seconds, np.maximum(sizes - offset, 0)),
        sources=_sources(traced.ledger.rows),
    )


def _stacks(levels: clock.Levels, processes: tuple[str, ...], kinds: tuple[str, ...]) -> dict[str, clock.Bytes]:
    by_kind = levels.sum_by_kind(processes)
    return {kind: by_kind[kind] for kind in kinds if kind in by_kind}


def _sources(rows: Iterable[LedgerRow]) -> Mapping[str, str]:
    """Provenances of each kind's rows, in words."""
    provenances: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        if row.peak_bytes:
            provenances[str(row.kind)].add(str(row.provenance))
    return {kind: ", ".join(sorted(words)) for kind, words in provenances.items()}
