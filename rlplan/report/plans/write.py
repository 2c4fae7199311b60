"""Writes the report of a plan or a simulation into a folder; no run is needed.

In: a Plan, or the file that `rlplan simulate -o` wrote; an output folder. Out: the files of PlanFiles.
Left out: runs (report/write.py). No output names an absolute path.
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
from rlplan.report.plans.page import Page
from rlplan.report.plans.plan_page import plan_page
from rlplan.report.plans.simulated import SimulatedPlan, is_simulation, read_simulated_plan, simulation_page
from rlplan.report.timeline import TracedSchedule, Window
from rlplan.spec.base import explain_write_errors, read_json

TEMPLATE = "plan.html.j2"
MAX_BYTES = 1 << 29


@dataclass(frozen=True)
class PlanFiles:
    """Files of a plan's report, all in one folder."""

    page: Path
    """The report as HTML."""
    summary: Path
    """The page as JSON."""
    trace: Path
    """Predicted actions and memory, for Perfetto."""

    @staticmethod
    def within(folder: Path) -> "PlanFiles":
        """The file names that every report of a plan uses."""
        return PlanFiles(*(folder / name for name in ("report.html", "report.json", "trace.json")))


@dataclass(frozen=True)
class Drawing:
    """Charts of a page about a plan."""

    timeline: Mapping[str, Any]
    """Memory and the timeline by role, as data; empty where nothing has a time."""
    waits: bars.Bars
    """Limiting resource of each phase."""
    staleness: bars.Bars
    """Staleness of rollouts, for simulations."""


def write_simulation_report(path: Path, out_dir: Path) -> PlanFiles | None:
    """Write the report of a simulation file. Returns None and writes nothing where the file is something else.

    Raises: SpecError where the file is not JSON, or where writing fails.
    """
    simulated = read_simulation(path)
    if simulated is None:
        return None
    return _write(simulated, draw_simulated_plan(simulated), simulation_page(simulated), path.name, out_dir)


def read_simulation(path: Path) -> SimulatedPlan | None:
    """Read a simulation file; None where it is something else. Raises: SpecError where it is not JSON."""
    data = read_json(path, "the plan", limit=MAX_BYTES)
    return read_simulated_plan(data, path) if is_simulation(data) else None


def write_plan_report(plan: Plan, name: str, out_dir: Path) -> PlanFiles:
    """Write the report of a plan. name: the file it was read from. Raises: SpecError where writing fails."""
    predicted = forecast(plan, name)
    return _write(predicted, draw(predicted), plan_page(plan), name, out_dir)


def _write(traced: TracedSchedule, drawing: Drawing, page: Page, name: str, out_dir: Path) -> PlanFiles:
    files = PlanFiles.within(out_dir)
    with explain_write_errors(files.page):
        out_dir.mkdir(parents=True, exist_ok=True)
        write_trace(traced, files.trace)
        files.summary.write_text(json.dumps(asdict(page), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        files.page.write_text(html.render(TEMPLATE, page=page, drawing=drawing, name=name), encoding="utf-8")
    return files


def draw(predicted: Forecast) -> Drawing:
    """Draw a plan twice: in seconds, and in order with equal widths, which makes short actions visible."""
    timing = predicted.timing
    views = {"in seconds" if timing else "in order": predicted}
    if timing is not None:
        views["an equal width for each action"] = predicted.drop_seconds()
    charts = [
        memory_by_device(view, view.windows, timing, first=_first(view.windows)) | {"name": name}
        for name, view in views.items()
    ]
    note = f"{charts[0]['note']} One GPU represents all of its group; all ranks of a role do the same.".strip()
    waits = bars.waits(timing)
    return Drawing({"type": "timeline", "others": charts, "note": note}, waits, bars.Bars("", ()))


def _first(windows: tuple[Window, ...]) -> int:
    return next((index for index, window in enumerate(windows) if window.title == STEADY_TITLE), 0)


def draw_simulated_plan(simulated: SimulatedPlan) -> Drawing:
    """Draw a simulation: its timeline, and its staleness where any rollout is older than the trained version."""
    result = simulated.result
    is_stale = any(result.rollout_staleness)
    staleness = bars.staleness(result.token_staleness, result.rollout_staleness) if is_stale else bars.Bars("", ())
    timeline: Mapping[str, Any] = {}
    if simulated.trace.spans:
        windows = simulated.windows + simulated.steady_windows  # processes appear with their first action
        timeline = memory_by_device(simulated, windows, first=len(simulated.windows))
    return Drawing(timeline, bars.waits(None), staleness)
