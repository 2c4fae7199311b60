"""Time against money, drawn: names beside their points, none over another, the front joined, nothing priced said so."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.text import Annotation

from rlplan.report.plans.money import time_against_money


def row(devices: str, step_s: float, dollars: float | None, *, is_on_front: bool = False) -> dict[str, Any]:
    return {"name": "job", "devices": devices, "step_s": step_s, "dollars_per_step": dollars,
            "is_on_front": is_on_front, "why": ""}  # fmt: skip


def drawn(rows: list[dict[str, Any]]) -> Axes:
    return time_against_money(rows).axes[0]


def test_names_lie_beside_their_points_and_over_no_other_name() -> None:
    near = [row(f"{n}x h100-sxm", 80 + n, 0.7 + n / 1000) for n in range(5)]
    axes = drawn([*near, row("8x b200", 48, 0.9, is_on_front=True), row("8x h200-sxm", 79, 0.6, is_on_front=True)])
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.texts if isinstance(text, Annotation)]
    assert len(boxes) == 7
    assert not [(one, other) for one in boxes for other in boxes if one is not other and one.overlaps(other)]


def test_what_has_no_price_or_does_not_fit_is_not_drawn() -> None:
    axes = drawn([row("8x h100-sxm", 80, 0.7), row("8x h20", 90, None), row("1x l4", 70, 0.1) | {"why": "too small"}])
    assert [text.get_text() for text in axes.texts] == ["8x h100-sxm"]
    assert axes.get_title(loc="left") == "job: what a step takes and what it costs"
    assert "Nothing fits that has a price." in [text.get_text() for text in drawn([row("8x h20", 9, None)]).texts]
