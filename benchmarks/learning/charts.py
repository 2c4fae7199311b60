"""The charts of reports/learning: a panel an algorithm, and GRPO's bands beside TRL's.

In: curves. Out: PNG files.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MultipleLocator, PercentFormatter

from benchmarks.figures import ACCENT, BAD, INK, MUTED, RC, new_figure, save_png
from benchmarks.learning.record import CONTROLS, TARGET, Beside, Curve

CONTROL_COLORS = dict(zip(CONTROLS, (MUTED, BAD), strict=True))
NUM_COLUMNS = 4
TRL_COLOR = "#c8702a"


def draw_curves(curves: Sequence[Curve], path: Path) -> None:
    """A panel an algorithm: its seeds in blue, its controls in grey and red."""
    names = list(dict.fromkeys(curve.algorithm for curve in curves))
    num_rows = -(-len(names) // NUM_COLUMNS)
    with mpl.rc_context(RC):
        figure = new_figure(9.6, 1.95 * num_rows + 0.75)
        figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - 0.36 / figure.get_figheight()))
        for place, name in enumerate(names):
            axes = figure.add_subplot(num_rows, NUM_COLUMNS, place + 1)
            own_curves = [curve for curve in curves if curve.algorithm == name]
            _percents(axes, max(curve.steps[-1] for curve in own_curves))
            axes.axhline(TARGET, color=INK, linewidth=0.7, linestyle=(0, (2, 2)))
            for curve in own_curves:
                is_control = curve.case in CONTROLS
                color = CONTROL_COLORS.get(curve.case, ACCENT)
                axes.plot(curve.steps, curve.accuracy, color=color, linewidth=1.1 if is_control else 1.5,
                          alpha=0.9 if is_control else 0.75, zorder=2 if is_control else 3)  # fmt: skip
            axes.set_title(name)
            axes.tick_params(labelleft=place % NUM_COLUMNS == 0)
            if place >= len(names) - NUM_COLUMNS:
                axes.set_xlabel("steps")
        _legend(figure, [name for name in names if any(c.algorithm == name and c.case in CONTROLS for c in curves)])
        save_png(figure, path)


def _legend(figure: Figure, controlled: Sequence[str]) -> None:
    """controlled: the algorithms whose controls were run."""
    alone = f", {controlled[0]}" if len(controlled) == 1 else ""
    lines = [Line2D([], [], color=ACCENT, linewidth=1.5, label="each seed")]
    lines += [Line2D([], [], color=color, linewidth=1.1, label=case + alone) for case, color in CONTROL_COLORS.items()]
    lines.append(Line2D([], [], color=INK, linewidth=0.7, linestyle=(0, (2, 2)), label=f"target, {TARGET:.0%}"))
    title = "Greedy accuracy on held-out prompts"
    top = 1 - 0.1 / figure.get_figheight()
    figure.text(0.012, top, title, fontsize=10.5, fontweight="bold", color=INK, va="top")
    figure.legend(handles=lines, loc="upper right", bbox_to_anchor=(0.995, top + 0.012), ncols=4, handlelength=1.6)


def draw_comparison(beside: Beside, path: Path) -> None:
    """Both sides' bands over seeds, their means, and each seed."""
    points = beside.points
    steps = [point.step for point in points]
    with mpl.rc_context(RC):
        figure = new_figure(7.2, 3.6)
        figure.set_layout_engine("constrained")
        axes = figure.add_subplot()
        _percents(axes, steps[-1])
        handles = []
        for name, color, sides in (
            ("rlplan", ACCENT, [point.rlplan for point in points]),
            ("TRL 1.16", TRL_COLOR, [point.trl for point in points]),
        ):
            axes.fill_between(steps, [min(side) for side in sides], [max(side) for side in sides], color=color,
                              alpha=0.18, linewidth=0)  # fmt: skip
            axes.plot(steps, [fmean(side) for side in sides], color=color, linewidth=1.8, marker="o", markersize=3)
            handles.append(Line2D([], [], color=color, linewidth=1.8, marker="o", markersize=3, label=f"{name}, mean"))
        handles.append(
            Patch(color=MUTED, alpha=0.3, linewidth=0, label=f"lowest to highest of {len(beside.trl)} seeds")
        )
        axes.set_title("GRPO: greedy accuracy on held-out prompts")
        axes.set_xlabel("steps")
        axes.legend(handles=handles, loc="lower right")
        save_png(figure, path)


def _percents(axes: Axes, last: int) -> None:
    axes.set_ylim(0, 1.02)
    axes.set_xlim(0, last)
    axes.yaxis.set_major_locator(MultipleLocator(0.25))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.xaxis.set_major_locator(MultipleLocator(10 if last > 20 else 5))
    axes.grid(axis="y")
