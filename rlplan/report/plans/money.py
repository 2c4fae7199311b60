"""Time against money, drawn: a point for each cluster, those on the Pareto front joined.

In: the rows of a comparison (rlplan/comparison.py). Out: a PNG or SVG. Left out: what does not fit or has no price.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from rlplan.report import style
from rlplan.spec.base import writing
from rlplan.units import format_seconds

WIDTH, HEIGHT = 7.2, 4.2
TICKS_S = (*(size * unit for unit in (1, 60, 3600) for size in (1, 2, 5, 10, 20, 30)), 2e5, 5e5, 1e6)
MOST_TICKS = 6
Row = Mapping[str, Any]


def draw_comparison(rows: Sequence[Row], path: Path) -> None:
    """Draw it into a file whose suffix says how. Raises: SpecError where it cannot be written."""
    figure = time_against_money(rows)
    with writing(path), mpl.rc_context(style.RC):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".svg":
            figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
        else:
            style.save_png(figure, path)


def time_against_money(rows: Sequence[Row]) -> Figure:
    """Seconds of a step to the right, its dollars upwards: lower left is better."""
    with mpl.rc_context(style.RC):
        figure = style.new_figure(WIDTH, HEIGHT)
        axes = figure.add_subplot()
        priced = [row for row in rows if row["step_s"] and row["dollars_per_step"] and not row["why"]]
        if not priced:
            style.say(axes, "Nothing fits that has a price.")
            return figure
        _draw_points(axes, sorted(priced, key=lambda row: float(row["step_s"])))
        names = list({row["name"] for row in priced})
        axes.set_title(("What" if len(names) > 1 else f"{names[0]}: what") + " a step takes and what it costs")
        _time_axis(axes, [float(row["step_s"]) for row in priced])
        axes.set_ylabel("dollars a step")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"${value:,.3g}"))
        axes.set_ylim(0, 1.15 * max(float(row["dollars_per_step"]) for row in priced))
        axes.grid(axis="y")
        figure.tight_layout()
        return figure


def _time_axis(axes: Axes, seconds: Sequence[float]) -> None:
    """A log axis with round ticks; room to the right for the last name."""
    low, high = min(seconds) / 1.3, max(seconds) * 1.9
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    inside = [tick for tick in TICKS_S if low <= tick <= high]
    axes.set_xticks(inside[:: max(1, len(inside) // MOST_TICKS)] or [seconds[0]])
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: format_seconds(value).removesuffix(" 0 s").removesuffix(" 0 min"))
    )
    axes.set_xlabel("a step, log scale")


def _draw_points(axes: Axes, rows: Sequence[Row]) -> None:
    """Each with its name; the front in the accent's colour, the rest grey."""
    front = [row for row in rows if row["is_on_front"]]
    if len(front) > 1:
        points = [[float(row[key]) for row in front] for key in ("step_s", "dollars_per_step")]
        axes.plot(*points, color=style.ACCENT, linewidth=1.1, drawstyle="steps-post", alpha=0.7)
    has_names = len({row["name"] for row in rows}) > 1
    for row in rows:
        color = style.ACCENT if row["is_on_front"] else style.MUTED
        x, y = float(row["step_s"]), float(row["dollars_per_step"])
        axes.plot([x], [y], "o", color=color, markersize=6 if row["is_on_front"] else 4.5)
        label = f"{row['name']}, {row['devices']}" if has_names else row["devices"]
        beside = (5, -13) if row["is_on_front"] else (6, 5)  # nothing lies to the lower left of the front
        axes.annotate(label, (x, y), xytext=beside, textcoords="offset points", color=color, fontsize=8)
