"""Memory over time: the whole host, every process by itself, and one GPU of each group.

In: a TracedSchedule: a run folder, or a plan or a simulation, of which nothing was measured. Out: matplotlib figures:
predicted bytes stacked by kind, phases shaded, the prediction's interval as a band, measured bytes on top where there
are any.
Left out: how a scene is drawn (panels.py), the other charts (result_charts.py), what was held when (timeline.py).
"""

from dataclasses import replace
from typing import TypeAlias

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from rlplan.dataflow.layouts import DeviceGroup
from rlplan.memory.ledger import Bound
from rlplan.report import style
from rlplan.report import timeline as clock
from rlplan.report.dataframes import in_order
from rlplan.report.panels import Scene, draw_scenes, text_figure
from rlplan.vocabulary import MemoryKind

BOUNDS: tuple[Bound, Bound, Bound] = ("expected", "low", "high")
Windows: TypeAlias = tuple[clock.Window, ...] | None
MAX_PROCESS_ROWS = 12
_STACK = tuple(str(kind) for kind in style.KIND_COLORS)
_MODELLED = tuple(kind for kind in _STACK if kind != MemoryKind.PROCESS)


def memory_timeline(traced: clock.TracedSchedule, windows: Windows = None) -> Figure:
    """The whole host over time. windows: the stretches to draw; chosen where none are named.

    Where the processes' own baseline hides everything that is modelled, a second row shows the modelled kinds alone,
    against what was measured less each process's measured baseline.
    """
    ledger = traced.ledger
    predicted = clock.predicted_levels(traced, ("device", "host") if ledger.shares_host_memory else ("host",))
    measured = clock.measured_levels(traced)
    with mpl.rc_context(style.RC):
        windows = windows or clock.choose_windows(clock.phase_blocks(traced))
        if not windows:
            return text_figure("No action of this run was measured, so there is no timeline.")
        names = tuple(dict.fromkeys([*predicted.processes, *measured.processes]))
        points, capacity = clock.measured_points(traced, names), ledger.host_capacity
        stacks, seen = _stacks(predicted, names, _STACK), measured.total(names) if measured.parts else None
        scenes = [Scene("Whole host", predicted.edges, stacks, seen, points, 3.3, capacity)]
        if stacks.get(str(MemoryKind.PROCESS), np.zeros(1)).max() > scenes[0].top / 2:
            scenes[0] = replace(scenes[0], height=2.5)
            scenes.append(_scene_without_baselines(traced, predicted, measured))
        return draw_scenes(traced, scenes, windows)


def memory_by_device(traced: clock.TracedSchedule, windows: Windows = None) -> Figure:
    """One GPU of each group, which stands for all alike, and the hosts that they sit in."""
    ledger = traced.ledger
    with mpl.rc_context(style.RC):
        windows = windows or clock.choose_windows(clock.phase_blocks(traced))
        groups = [group for group in traced.schedule.groups if group.devices[0] in ledger.devices]
        scenes = [
            replace(_place_scene(traced, "device", group.devices[0]), title=_title(group, len(groups)), height=2.9,
                    capacity=ledger.device_capacity or None)
            for group in groups
        ]  # fmt: skip
        hosts = ledger.hosts if not ledger.shares_host_memory else ()
        for host in hosts:
            title = "Each host" if len(hosts) == 1 else f"A host of {groups[hosts.index(host) % len(groups)].name}"
            scene = _place_scene(traced, "host", host)
            scenes.append(replace(scene, title=title, height=1.9, capacity=ledger.host_capacity or None))
        return (
            draw_scenes(traced, scenes, windows)
            if scenes and windows
            else text_figure("The plan holds no device's memory.")
        )


def _title(group: DeviceGroup, num_groups: int) -> str:
    alike = f"One GPU of {len(group.devices)}" if len(group.devices) > 1 else "The GPU"
    return alike if num_groups == 1 else f"{alike}, {group.name}"


def _place_scene(traced: clock.TracedSchedule, space: str, device: str) -> Scene:
    """The memory of one device or host."""
    expected, low, high = (clock.predicted_levels(traced, (space,), bound, device) for bound in BOUNDS)
    measured = clock.measured_levels(traced)
    here = [name for name, place in traced.schedule.processes if place == device and name in measured.processes]
    total = measured.total(here) if here and space == "device" else None
    names = expected.processes
    ends = low.total(names), high.total(high.processes)
    band = None if (ends[0] == ends[1]).all() else ends
    points = clock.measured_points(traced, here if space == "device" else ())
    return Scene("", expected.edges, _stacks(expected, names, _STACK), total, points, 1.0, band=band)


def _scene_without_baselines(traced: clock.TracedSchedule, predicted: clock.Levels, measured: clock.Levels) -> Scene:
    """The processes that hold models, less what each of them held before it held one."""
    baselines = {s.process: s.num_bytes for s in traced.trace.samples if s.kind == MemoryKind.PROCESS}
    names, offset = tuple(baselines), sum(baselines.values())
    seconds, sizes = clock.measured_points(traced, names)
    return Scene(
        title="Without process baselines",
        edges=predicted.edges,
        stacks=_stacks(predicted, names or predicted.processes, _MODELLED),
        measured=np.maximum(measured.total(names) - offset, 0) if names else None,
        points=(seconds, np.maximum(sizes - offset, 0)),
        height=2.6,
    )


def memory_by_process(traced: clock.TracedSchedule, windows: Windows = None) -> Figure:
    """The same for every process by itself, each on a scale of its own."""
    predicted, measured = clock.predicted_levels(traced), clock.measured_levels(traced)
    names = in_order([*traced.ledger.processes, *measured.processes])
    with mpl.rc_context(style.RC):
        windows = windows or clock.choose_windows(clock.phase_blocks(traced))
        if not windows or not names:
            return text_figure("No process of this run was measured.")
        scenes = [_process_scene(traced, name, predicted, measured) for name in names]
        shown = sorted(scenes, key=lambda scene: -scene.top)[:MAX_PROCESS_ROWS]
        figure = draw_scenes(traced, [scene for scene in scenes if scene in shown], windows)
        if len(shown) < len(scenes):
            note = f"the {len(shown)} largest of {len(scenes)} processes"
            figure.text(0.99, 0.004, note, ha="right", va="bottom", color=style.MUTED, fontsize=7.5)
        return figure


def _process_scene(traced: clock.TracedSchedule, name: str, predicted: clock.Levels, measured: clock.Levels) -> Scene:
    stacks = _stacks(predicted, (name,), _STACK)
    total = measured.total([name]) if name in measured.processes else None
    height = max(1.45, 0.62 + 0.135 * len(stacks)) if len(stacks) > 1 else 0.72
    return Scene(name, predicted.edges, stacks, total, clock.measured_points(traced, [name]), height)


def _stacks(levels: clock.Levels, processes: tuple[str, ...], kinds: tuple[str, ...]) -> dict[str, clock.Bytes]:
    by_kind = levels.by_kind(processes)
    return {kind: by_kind[kind] for kind in kinds if kind in by_kind}
