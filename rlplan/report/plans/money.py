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
LETTER, LINE = 4.9, 9.0
"""Width of a letter and height of a line of the names, in points."""
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
        figure.draw_without_rendering()
        _name_points(axes, priced)
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
    """The front in the accent's colour and joined, the rest grey."""
    front = [row for row in rows if row["is_on_front"]]
    if len(front) > 1:
        points = [[float(row[key]) for row in front] for key in ("step_s", "dollars_per_step")]
        axes.plot(*points, color=style.ACCENT, linewidth=1.1, drawstyle="steps-post", alpha=0.7)
    for row in rows:
        is_on = row["is_on_front"]
        color = style.ACCENT if is_on else style.MUTED
        axes.plot([row["step_s"]], [row["dollars_per_step"]], "o", color=color, markersize=6 if is_on else 4.5)


def _name_points(axes: Axes, rows: Sequence[Row]) -> None:
    """A name beside each point, where no other name or point is; the front's first, for nothing lies to its lower left.

    The axes have their limits by now: what overlaps is counted in points of the page.
    """
    has_names = len({row["name"] for row in rows}) > 1
    scale = 72 / axes.get_figure(root=True).dpi  # type: ignore[union-attr]
    places = [axes.transData.transform((float(row["step_s"]), float(row["dollars_per_step"]))) * scale for row in rows]
    taken = [(x - 3, y - 3, x + 3, y + 3) for x, y in places]
    for row, (x, y) in sorted(zip(rows, places, strict=True), key=lambda pair: not pair[0]["is_on_front"]):
        label = f"{row['name']}, {row['devices']}" if has_names else row["devices"]
        width = LETTER * len(label)
        right, left = 6, -6 - width
        beside = [(right, 4), (left, 4), (right, -12), (left, -12), *((right, up) for up in range(12, 60, 8))]
        beside = [(5, -13), *beside] if row["is_on_front"] else beside
        boxes = [(x + dx, y + dy, x + dx + width, y + dy + LINE) for dx, dy in beside]
        free = (index for index, box in enumerate(boxes) if not any(_overlap(box, other) for other in taken))
        chosen = next(free, 0)
        taken.append(boxes[chosen])
        color = style.ACCENT if row["is_on_front"] else style.MUTED
        point = row["step_s"], row["dollars_per_step"]
        axes.annotate(label, point, xytext=beside[chosen], textcoords="offset points", color=color, fontsize=8)


Box = tuple[float, float, float, float]


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
