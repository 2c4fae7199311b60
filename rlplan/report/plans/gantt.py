"""The Gantt chart of a step: who works when, in which phase, and what the seconds wait for.

In: a Course and the windows to draw; costs of the actions where they are known. Out: a matplotlib figure.
Left out: memory (charts.py). A lane is a process; processes of one device group lie together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.patches import Patch

from rlplan.planner.answers.plan_results import phase_costs
from rlplan.report import style
from rlplan.report import timeline as clock
from rlplan.report.panels import WIDTH, text_figure, widths_of
from rlplan.timing.cost import Cost, Resource
from rlplan.timing.step import StepTiming
from rlplan.units import format_seconds
from rlplan.vocabulary import Phase

MAX_LANES = 24
LANE, FOOT, HEAD, GAP, ROW = 0.42, 0.42, 0.6, 0.62, 0.25
LETTER_POINTS = 3.8
"""Points of a letter of the labels in bars."""

RESOURCE_COLORS = {
    Resource.COMPUTE: "#c4563f",
    Resource.MEMORY: "#e0a24a",
    Resource.LATENCY: "#8b6f9e",
    Resource.DEVICE_LINK: "#4f9d8b",
    Resource.NETWORK: "#33508f",
    Resource.HOST_LINK: "#7fb0dd",
    Resource.HOST: "#9a9b52",
    Resource.DISK: "#7a5a4b",
    Resource.IDLE: "#d5dae0",
}


@dataclass(frozen=True)
class Lane:
    """A process and its bars."""

    process: str
    """Its name."""
    group: str
    """Of the devices that it is on."""
    bars: tuple[tuple[str, float, float], ...]
    """(action, start, end) in seconds."""


def gantt(traced: clock.TracedSchedule, windows: tuple[clock.Window, ...], timing: StepTiming | None = None) -> Figure:
    """Bars of every process in those windows; below them what each phase of a steady step waits for."""
    lanes = lanes_of(traced, windows)
    with mpl.rc_context(style.RC):
        if not lanes:
            return text_figure("No action has a time.")
        shown, phases = lanes[:MAX_LANES], phase_costs(timing) if timing else {}
        upper = LANE * len(shown)
        lower = ROW * len(phases) + GAP if phases else 0
        height = HEAD + upper + FOOT + lower
        figure = style.new_figure(WIDTH, height)
        counts = {w: len(clock.ticks_of(traced, w)[0]) for w in windows if not w.is_timed}
        widths = widths_of(windows, counts)
        grid = GridSpec(1, len(windows), figure=figure, left=0.17, right=0.985, wspace=0.05, width_ratios=widths,
                        top=1 - HEAD / height, bottom=(FOOT + lower) / height)  # fmt: skip
        for column, window in enumerate(windows):
            axes = figure.add_subplot(grid[0, column])
            inches = WIDTH * 0.815 * widths[column] / sum(widths)
            _draw_lanes(axes, traced, shown, window, (timing, inches))
            if column:
                axes.tick_params(labelleft=False)
        figure.legend(handles=_phase_legend(traced, shown), loc="upper left", bbox_to_anchor=(0.163, 1.0), ncols=8,
                      handlelength=1.2, columnspacing=1.2, fontsize=7.4)  # fmt: skip
        if len(shown) < len(lanes):
            figure.text(0.985, 0.01, f"{len(shown)} of {len(lanes)} processes", ha="right", color=style.MUTED)
        if phases:
            box = (0.17, 0.34 / height, 0.815, ROW * len(phases) / height)
            _draw_waits(figure.add_axes(box), phases)
        return figure


def lanes_of(traced: clock.TracedSchedule, windows: tuple[clock.Window, ...]) -> list[Lane]:
    """The processes that do anything in those windows, in the order of the schedule's groups."""
    groups = {process: layout.group for layout in traced.schedule.layouts for process, _ in layout.processes}
    order = [group.name for group in traced.schedule.groups]
    bars: dict[str, list[tuple[str, float, float]]] = {}
    for span in traced.trace.spans:
        if any(w.start_s <= span.start_s and span.end_s <= w.end_s for w in windows):
            bars.setdefault(span.process, []).append((span.action_id, span.start_s, span.end_s))
    lanes = [Lane(process, groups.get(process, "host"), tuple(mine)) for process, mine in bars.items()]
    workers = list(dict.fromkeys(lane.process.rpartition("/")[0] for lane in lanes))
    places = {lane.process: workers.index(lane.process.rpartition("/")[0]) for lane in lanes}
    return sorted(
        lanes,
        key=lambda lane: (order.index(lane.group) if lane.group in order else len(order), places[lane.process]),
    )


def _draw_lanes(
    axes: Axes,
    traced: clock.TracedSchedule,
    lanes: list[Lane],
    window: clock.Window,
    known: tuple[StepTiming | None, float],
) -> None:
    """known: the timing of a steady step, and the inches of this panel."""
    timing, inches = known
    phases = {action.id: action.phase for _, part in traced.schedule.parts for action in part}
    costs: Mapping[str, Cost] = {a.action_id: a.cost for a in timing.actions} if timing and window.is_timed else {}
    per_second = inches * 72 / max(window.end_s - window.start_s, 1e-9)
    axes.set_title(window.title, fontsize=9.5)
    axes.set_xlim(window.start_s, window.end_s)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    for y, lane in enumerate(lanes):
        axes.axhspan(y - 0.36, y + 0.36, color="#f2f4f6", lw=0)
        for action, start, end in lane.bars:
            if window.start_s <= start and end <= window.end_s:
                color = STRONG[phases[action]] if action in phases else style.FAINT
                axes.barh(y, end - start, left=start, height=0.72, color=color, lw=0.4, edgecolor=style.PAPER)
                _label(axes, (start, end, y), _words(action, costs.get(action)), per_second)
    for y in range(1, len(lanes)):
        if lanes[y].group != lanes[y - 1].group:
            axes.axhline(y - 0.5, color=style.MUTED, lw=0.7)
    axes.set_yticks(range(len(lanes)), [f"{lane.process}\n{lane.group}" for lane in lanes], fontsize=7, linespacing=1.1)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    if window.is_timed:
        style.seconds_axis(axes, window.start_s, window.end_s, 8)
    else:
        axes.set_xticks([])
        axes.set_xlabel("in order, not in seconds", fontsize=7.2)


def _phase_legend(traced: clock.TracedSchedule, lanes: list[Lane]) -> list[Patch]:
    """The phases whose bars are drawn, in the order of a step: a bar may be too short for its own name."""
    drawn = {action for lane in lanes for action, _, _ in lane.bars}
    phases = {action.phase for _, part in traced.schedule.parts for action in part if action.id in drawn}
    return [Patch(facecolor=STRONG[phase], label=str(phase)) for phase in STRONG if phase in phases]


def _words(action: str, cost: Cost | None) -> list[str]:
    """A bar's labels, the longest first."""
    name = style.name_of(action)
    if cost is None:
        return [name, *(name.replace(" ", "\n", times) for times in (1, 2))]
    seconds = format_seconds(cost.seconds)
    bound = f"{style.name_of(cost.bound_by.value)}-bound" if cost.bound_by is not Resource.IDLE else "mostly waiting"
    return [f"{name}\n{seconds}, {bound}", f"{name}\n{seconds}", seconds]


def _label(axes: Axes, bar: tuple[float, float, float], texts: list[str], per_second: float) -> None:
    start, end, y = bar
    for text in texts:
        letters = max(map(len, text.split("\n")))
        if (end - start) * per_second > LETTER_POINTS * letters + 4:
            place: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7, "linespacing": 1.15}
            axes.text((start + end) / 2, y, text, color=style.INK, **place)
            return


def _draw_waits(axes: Axes, phases: Mapping[Phase, Cost]) -> None:
    """A bar a phase, cut by what its seconds wait for."""
    total = sum(cost.seconds for cost in phases.values())
    axes.set_title("What limits a steady step", fontsize=9)
    used: list[Resource] = []
    for y, cost in enumerate(phases.values()):
        left = 0.0
        for resource in Resource:
            seconds = cost.parts.get(resource, 0.0)
            if seconds:
                axes.barh(y, seconds, left=left, height=0.74, color=RESOURCE_COLORS[resource], lw=0)
                left += seconds
                used.append(resource)
        text = f"  {format_seconds(cost.seconds)}, {_share(cost.seconds / total)}"
        axes.text(left, y, text, va="center", fontsize=7.4)
    axes.set_xlim(0, 1.22 * max(cost.seconds for cost in phases.values()))
    axes.set_ylim(len(phases) - 0.5, -0.5)
    axes.set_yticks(range(len(phases)), [str(phase) for phase in phases])
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    handles: list[Any] = [
        Patch(facecolor=RESOURCE_COLORS[one], label=style.name_of(one.value)) for one in Resource if one in used
    ]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(-0.01, 0.0), ncols=9, columnspacing=1.2,
                handlelength=1.2, fontsize=7.4)  # fmt: skip


def _share(part: float) -> str:
    return style.percent(part, 0) if part >= 0.01 else "below 1 %"


STRONG = {
    Phase.START: "#c9ced5",
    Phase.ROLLOUT: "#8fbbe8",
    Phase.SCORE: "#e6cf6d",
    Phase.TRAIN: "#f0a983",
    Phase.SYNC: "#84c9a5",
    Phase.SWITCH: "#bda6dd",
    Phase.EVALUATE: "#a7bb93",
    Phase.CHECKPOINT: "#cbb19b",
}
"""The phases' hues, dark enough for a bar."""
