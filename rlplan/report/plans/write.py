"""A plan in, a folder with a page out. Nothing has to run for it.

In: a Plan, a place to write. Out: the files of PlanFiles.
Left out: runs (report/write.py). No output names a path of this machine.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlplan.planner.plan import Plan
from rlplan.report import html
from rlplan.report.drawn import bars
from rlplan.report.drawn.memory import memory_by_device
from rlplan.report.perfetto import write_trace
from rlplan.report.plans.forecast import STEADY_TITLE, Forecast, forecast
from rlplan.report.plans.plan_page import plan_page
from rlplan.report.timeline import Window
from rlplan.spec.base import writing

TEMPLATE = "plan.html.j2"


@dataclass(frozen=True)
class PlanFiles:
    """Where the parts of a plan's report lie, all in one folder."""

    page: Path
    """The report as HTML."""
    summary: Path
    """The page as JSON."""
    trace: Path
    """What is predicted, for Perfetto."""

    @staticmethod
    def within(folder: Path) -> "PlanFiles":
        """The names that every report of a plan uses."""
        return PlanFiles(*(folder / name for name in ("report.html", "report.json", "trace.pftrace")))


@dataclass(frozen=True)
class Drawing:
    """What is drawn on a page about a plan."""

    timeline: Mapping[str, Any]
    """Memory and who works when, as data; empty where nothing has a time."""
    waits: bars.Bars
    """What limits each phase."""


def write_report_of(plan: Plan, name: str, out_dir: Path) -> PlanFiles:
    """Write the report of a plan. name: what it was read from. Raises: SpecError where nothing can be written."""
    predicted, page, files = forecast(plan, name), plan_page(plan), PlanFiles.within(out_dir)
    with writing(files.page):
        out_dir.mkdir(parents=True, exist_ok=True)
        write_trace(predicted, files.trace)
        files.summary.write_text(json.dumps(asdict(page), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        text = html.render(TEMPLATE, page=page, drawing=draw(predicted), name=name)
        files.page.write_text(text, encoding="utf-8")
    return files


def draw(predicted: Forecast) -> Drawing:
    """Of a plan: its timeline in seconds, and in order, in which short actions are as wide as long ones."""
    timing = predicted.timing
    views = {"in seconds" if timing else "in order": predicted}
    if timing is not None:
        views["an equal width for each action"] = predicted.in_order()
    charts = [
        memory_by_device(view, view.windows, timing, first=_first(view.windows)) | {"name": name}
        for name, view in views.items()
    ]
    note = f"{charts[0]['note']} One GPU represents all of its group; all ranks of a role do the same.".strip()
    return Drawing({"type": "timeline", "others": charts, "note": note}, bars.waits(timing))


def _first(windows: tuple[Window, ...]) -> int:
    return next((index for index, one in enumerate(windows) if one.title == STEADY_TITLE), 0)
