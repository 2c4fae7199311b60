"""Pieces of HTML for a notebook, without scripts: the timeline of a step, and numbers for people.

In: a StepTiming, values of rows. Out: HTML. Left out: pages (html.py), charts that can be zoomed (assets/).
"""

import html
from typing import Any

from rlplan.report.style import phase_color
from rlplan.timing.step import StepTiming
from rlplan.units import format_bytes, format_seconds

WIDTH, LANE, LABELS = 640, 18, 70
"""Pixels of the drawing, of a lane, and of the phases' names."""


def draw_timeline(step: StepTiming) -> str:
    """Draw the actions of a step as an SVG: a lane for each phase, seconds from left to right."""
    lanes = list(dict.fromkeys(action.phase for action in step.actions if action.cost.seconds))
    end = max((action.start_s + action.cost.seconds for action in step.actions), default=0.0)
    if not end:
        return ""
    scale, height = (WIDTH - LABELS) / end, LANE * len(lanes)
    bars = []
    for action in step.actions:
        if not action.cost.seconds:
            continue
        words = html.escape(f"{action.action_id}: {format_seconds(action.cost.seconds)}")
        left, wide = LABELS + action.start_s * scale, max(1.0, action.cost.seconds * scale)
        bars.append(
            f'<rect x="{left:.1f}" y="{LANE * lanes.index(action.phase) + 2}" width="{wide:.1f}" height="{LANE - 4}" '
            f'fill="{phase_color(action.phase)}"><title>{words}</title></rect>'
        )
    names = "".join(
        f'<text x="0" y="{LANE * place + LANE - 5}">{phase.value}</text>' for place, phase in enumerate(lanes)
    )
    axis = f'<text x="{LABELS}" y="{height + LANE - 4}">0 s</text>'
    axis += f'<text x="{WIDTH}" y="{height + LANE - 4}" text-anchor="end">{format_seconds(end)}</text>'
    style = "max-width:100%;font:11px sans-serif;fill:currentColor"
    return (
        f'<svg viewBox="0 0 {WIDTH} {height + LANE}" width="{WIDTH}" style="{style}" role="img">'
        f"<title>Steady step by phase, in seconds</title>{names}{''.join(bars)}{axis}</svg>"
    )


def format_value(key: str, value: Any) -> str:
    """A value of a row for people; its key tells the unit.

    >>> format_value("peak_bytes", 3 << 30), format_value("step_s", 75.0), format_value("ratio", 0.12345)
    ('3.00 GiB', '1 min 15 s', '0.123')
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    if key == "bytes" or key.endswith("_bytes"):
        return format_bytes(value)
    if key == "seconds" or key.endswith("_s"):
        return format_seconds(value) if value >= 0 else f"{value:.3g} s"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
