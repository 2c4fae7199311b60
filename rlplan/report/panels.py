"""Scenes: bytes over time, drawn as panels: a row for each scene, a column for each window of time.

In: a Course, Scenes, Windows. Out: a matplotlib figure: a ribbon of phases on top, each row's kinds in words on the
right: what the peak is made of, then what is drawn elsewhere in the row.
Left out: which scenes there are (charts.py), colours and axes (style.py), what was held when (timeline.py).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from rlplan.report import style
from rlplan.report import timeline as clock
from rlplan.units import format_bytes
from rlplan.vocabulary import MemoryKind, Phase

WIDTH, RIBBON = 10.8, 0.43
BAND: dict[str, Any] = {"facecolor": "#1c263018", "edgecolor": "#1c263060", "hatch": "//////", "lw": 0}


@dataclass(frozen=True)
class Scene:
    """One row of panels: bytes of some processes and kinds over n intervals, predicted and measured."""

    title: str
    """For people."""
    edges: clock.Bytes
    """Seconds at which intervals begin and end, [n + 1]."""
    stacks: dict[str, clock.Bytes]
    """Predicted bytes by kind, from the bottom to the top, each [n]."""
    measured: clock.Bytes | None
    """Bytes, [n]; None where only points were measured."""
    points: tuple[clock.Bytes, clock.Bytes]
    """Measured points: (seconds, bytes), each [points]."""
    height: float
    """Of the row in inches."""
    capacity: int | None = None
    """Bytes that there are; None where no line is drawn."""
    band: tuple[clock.Bytes, clock.Bytes] | None = None
    """Bytes at the low and at the high end of the prediction, each [n]."""

    @property
    def total(self) -> clock.Bytes:
        """Predicted bytes of all kinds."""
        return sum(self.stacks.values(), np.zeros(len(self.edges) - 1))

    @property
    def top(self) -> float:
        """The largest value to show."""
        curves = [self.total, self.points[1], *(self.band or ())]
        return float(
            max(max(curve, default=0) for curve in [*curves, *([] if self.measured is None else [self.measured])])
        )


def text_figure(text: str) -> Figure:
    """A figure of words, where there is nothing to draw."""
    figure = style.new_figure(WIDTH, 1.6)
    style.say(figure.subplots(), text)
    return figure


def draw_scenes(traced: clock.TracedSchedule, scenes: list[Scene], windows: tuple[clock.Window, ...]) -> Figure:
    """A grid: a ribbon of phases on top, a row for each scene, a column for each window and one for the words."""
    blocks = clock.phase_blocks(traced)
    ticks = {window: clock.ticks_of(traced, window) for window in windows if not window.is_timed}
    foot = 0.55 + (
        0.052 * max(len(line) for _, names in ticks.values() for name in names for line in name.split("\n"))
        if ticks
        else 0
    )
    height = 0.57 + foot + RIBBON + sum(scene.height for scene in scenes)
    figure = style.new_figure(WIDTH, height)
    widths = widths_of(windows, {window: len(names) for window, (_, names) in ticks.items()})
    widest = max(range(len(widths)), key=lambda column: (widths[column], column))
    grid = GridSpec(
        len(scenes) + 1, len(windows) + 1, figure=figure, left=0.06, right=0.995,
        top=1 - 0.5 / height, bottom=foot / height, wspace=0.07, hspace=0.28 * len(scenes) / height + 0.02,
        width_ratios=[*widths, 0.27 * sum(widths)], height_ratios=[RIBBON, *(scene.height for scene in scenes)],
    )  # fmt: skip
    named: set[str] = set()
    for column, window in enumerate(windows):
        inches = WIDTH * 0.92 * widths[column] / (1.27 * sum(widths))
        named |= _draw_ribbon(figure.add_subplot(grid[0, column]), window, blocks, inches)
    for row, scene in enumerate(scenes, 1):
        for column, window in enumerate(windows):
            axes = figure.add_subplot(grid[row, column])
            _draw_panel(axes, scene, window, blocks)
            _draw_limits(axes, scene, says_capacity=column == widest)
            if window.is_timed:
                style.seconds_axis(axes, window.start_s, window.end_s, 4 if len(windows) > 2 else 8)
            else:
                style.names_axis(axes, *ticks[window])
            axes.tick_params(labelleft=column == 0, labelbottom=row == len(scenes))
            axes.spines["left"].set_visible(column == 0)
        _draw_words(figure.add_subplot(grid[row, -1]), scene, windows)
    unnamed = {block.phase for window in windows for block in _inside(blocks, window)} - named
    figure.legend(handles=_legend(scenes, unnamed), loc="lower left", ncols=5, bbox_to_anchor=(0.052, 0.0),
                  handletextpad=0.6, columnspacing=1.2)  # fmt: skip
    return figure


def widths_of(windows: tuple[clock.Window, ...], num_actions: dict[clock.Window, int]) -> list[float]:
    """Of each column: by the number of actions where all are drawn in order, else starting is narrower."""
    if len(num_actions) == len(windows):
        return [float(max(3, num_actions[window])) for window in windows]
    narrow = {"Start": 1.0, "Finish": 0.35}
    return [narrow.get(window.title, 1.7) if len(windows) > 1 else 1.7 for window in windows]


def _legend(scenes: list[Scene], unnamed: set[str]) -> list[Any]:
    """What the marks mean, of those that are there, and the phases whose name had no room in the ribbon."""
    line: dict[str, Any] = {"color": style.MEASURED}
    handles: list[Any] = [Patch(facecolor="#b9c3cd", label="predicted, stacked by kind")]
    if any(scene.band for scene in scenes):
        handles.append(Patch(**BAND, label="up to its high end; dotted: low and high end"))
    if any(scene.measured is not None for scene in scenes):
        handles.append(Line2D([], [], lw=1.2, label="measured peak inside each action", **line))
    if any(len(scene.points[0]) for scene in scenes):
        handles.append(Line2D([], [], lw=0, marker="o", ms=3.4, label="measured after each action", **line))
    return handles + [
        Patch(facecolor=style.phase_color(phase), label=phase) for phase in map(str, Phase) if phase in unnamed
    ]


def _draw_ribbon(axes: Axes, window: clock.Window, blocks: tuple[clock.Block, ...], inches: float) -> set[str]:
    """The phases by name, and above them the number of each step; returns the phases that had room for their name."""
    axes.set_xlim(window.start_s, window.end_s)
    axes.set_ylim(0, 1)
    axes.set_axis_off()
    axes.set_title(window.title, fontsize=9.5, pad=16)
    per_second = inches * 72 / max(window.end_s - window.start_s, 1e-9)
    rows = _rows(_inside(blocks, window), 0.02 * (window.end_s - window.start_s))
    named: set[str] = set()
    for block, row in rows.items():
        low, high = row / (1 + max(rows.values())), (row + 1) / (1 + max(rows.values()))
        axes.axvspan(block.start_s, block.end_s, 1 - high, 1 - low, color=style.phase_color(block.phase), lw=0)
        middle, points = (block.start_s + block.end_s) / 2, (block.end_s - block.start_s) * per_second
        letters = len(block.phase)
        upright = (7.5, 5.2, 90) if letters <= 8 and high - low == 1 else (np.inf, 0, 0)
        for least, size, rotation in ((4.7 * letters, 7.4, 0), (3.9 * letters, 6.2, 0), upright):
            if points > least:
                text: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": size, "rotation": rotation}
                axes.text(middle, 1 - (low + high) / 2 - 0.02, block.phase, **text)
                named.add(block.phase)
                break
    steps = sorted({block.step for block in _inside(blocks, window)})
    for step in steps if len(steps) > 1 else ():
        mine = [block for block in blocks if block.step == step]
        if step and (max(block.end_s for block in mine) - mine[0].start_s) * per_second > 26:
            name = f"step {step}" if step > 0 else "finish"
            axes.text(mine[0].start_s, 1.1, name, ha="left", va="bottom", fontsize=7.2, color=style.MUTED)
    return named


def _rows(blocks: list[clock.Block], tolerance: float) -> dict[clock.Block, int]:
    """Of each block the first row in which nothing else runs at the time, but for a moment; longest first."""
    rows: dict[clock.Block, int] = {}
    for block in blocks:
        taken = {
            row for other, row in rows.items()
            if min(block.end_s, other.end_s) - max(block.start_s, other.start_s) > tolerance
        }  # fmt: skip
        rows[block] = min(set(range(len(rows) + 1)) - taken)
    return rows


def _inside(blocks: tuple[clock.Block, ...], window: clock.Window) -> list[clock.Block]:
    """The blocks of a window, longest first: what runs beside a longer block is drawn over it."""
    mine = [block for block in blocks if block.start_s >= window.start_s and block.end_s <= window.end_s]
    return sorted(mine, key=lambda block: block.start_s - block.end_s)


def _draw_panel(axes: Axes, scene: Scene, window: clock.Window, blocks: tuple[clock.Block, ...]) -> None:
    for block in _inside(blocks, window):
        axes.axvspan(block.start_s, block.end_s, color=style.phase_color(block.phase), alpha=0.42, lw=0)
    part = clock.Levels(scene.edges, {}).slice_of(window.start_s, window.end_s)
    edges, floor = scene.edges[part.start : part.stop + 1], np.zeros(part.stop - part.start)
    for kind, values in scene.stacks.items():
        ceiling = floor + values[part]
        axes.stairs(ceiling, edges, baseline=floor, fill=True, lw=0, color=style.KIND_COLORS[MemoryKind(kind)])
        if values.max() > 0.012 * scene.top:
            axes.stairs(ceiling, edges, baseline=None, lw=0.5, color=style.PAPER)
        floor = ceiling
    if scene.band is not None:
        low, high = (curve[part] for curve in scene.band)
        axes.stairs(high, edges, baseline=floor, fill=True, **BAND)
        for curve in (low, high):
            axes.stairs(curve, edges, baseline=None, lw=0.7, ls=(0, (1.5, 1)), color=style.INK)
    if scene.measured is not None:
        line = axes.stairs(scene.measured[part], edges, baseline=None, color=style.MEASURED, lw=1.2)
        line.set_path_effects([withStroke(linewidth=2.6, foreground=style.PAPER, alpha=0.75)])
    seconds, sizes = scene.points
    seen = (seconds >= window.start_s) & (seconds <= window.end_s)
    axes.plot(seconds[seen], sizes[seen], "o", ms=3.1, color=style.MEASURED, mec=style.PAPER, mew=0.5, zorder=4)
    axes.set_xlim(window.start_s, window.end_s)


def _draw_limits(axes: Axes, scene: Scene, *, says_capacity: bool) -> None:
    """The scale, and the capacity: where it lies, or at the upper edge and marked so when it lies far above."""
    capacity = scene.capacity
    if capacity is None:
        style.bytes_axis(axes, 1.12 * scene.top, 5 if scene.height > 1 else 3)
        return
    is_far = capacity > 1.6 * scene.top
    top = 1.27 * scene.top if is_far else 1.1 * max(capacity, scene.top)
    style.bytes_axis(axes, top)
    height = 0.95 * top if is_far else capacity
    axes.axhline(height, color=style.BAD, lw=1.0, ls=(0, (5, 2)))
    if says_capacity:
        times = f" \u2191 {capacity / scene.top:.1f} times the peak, not to scale" if is_far else ""
        text: dict[str, Any] = {"ha": "right", "va": "top", "color": style.BAD, "fontsize": 7.2}
        axes.annotate(f"capacity {format_bytes(capacity)}{times}", (1, height), (-3, -2.5),
                      xycoords=axes.get_yaxis_transform(), textcoords="offset points", **text)  # fmt: skip


def _draw_words(axes: Axes, scene: Scene, windows: tuple[clock.Window, ...]) -> None:
    """The legend of a row: what its largest predicted moment is made of, then the kinds that are drawn elsewhere."""
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    text = [f"predicted peak {format_bytes(scene.total.max())}"]
    if scene.band is not None and scene.band[1].max() > scene.band[0].max():
        text.append(f"between {format_bytes(scene.band[0].max())} and {format_bytes(scene.band[1].max())}")
    if scene.measured is not None:
        text.append(f"measured peak {format_bytes(scene.measured.max())}")
    axes.text(0.02, 1.0, scene.title, fontweight="bold", va="top", fontsize=8.2)
    points = 72 * scene.height
    top = 1.0 - 12.5 / points
    axes.text(0.02, top, "\n".join(text), va="top", fontsize=7.2, color=style.MUTED, linespacing=1.25)
    top -= (1 + 10 * len(text) + 2 * (len(text) - 1)) / points
    _draw_kinds(axes, kinds_of(scene, windows), top, points)


def _draw_kinds(axes: Axes, kinds: list[tuple[str, float, float]], top: float, points: float) -> None:
    """A line for each of (kind, bytes at the peak, most bytes), the second where the first is 0."""
    height = min(11.0, (top * points - 4) / max(len(kinds), 1))
    size = min(7.6, height - 1.2)
    for row, (kind, at_peak, most) in enumerate(kinds):
        y = top - (row + 0.5) * height / points
        words = format_bytes(at_peak) if at_peak else f"up to {format_bytes(most)}"
        text: dict[str, Any] = {"va": "center", "fontsize": size, "color": style.INK if at_peak else style.MUTED}
        axes.plot([0.045], [y], "s", ms=min(5.4, height - 2.5), color=style.KIND_COLORS[MemoryKind(kind)])
        axes.text(0.11, y, style.name_of(kind), **text)
        axes.text(0.98, y, words, ha="right", **text)


def kinds_of(scene: Scene, windows: tuple[clock.Window, ...]) -> list[tuple[str, float, float]]:
    """(kind, bytes at the predicted peak, most bytes) of every kind that those windows show.

    In the order of the stack from its top; the kinds that the peak does not hold come last.
    """
    levels = clock.Levels(scene.edges, {})
    parts = [levels.slice_of(window.start_s, window.end_s) for window in windows]
    peak = int(scene.total.argmax()) if len(scene.total) else 0
    found = [
        (kind, float(values[peak]), max((float(values[part].max(initial=0)) for part in parts), default=0.0))
        for kind, values in reversed(scene.stacks.items())
    ]
    return sorted((row for row in found if row[1] or row[2]), key=lambda row: not row[1])
