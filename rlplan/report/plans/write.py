"""A plan or a simulation in, a folder with a page and pictures out. Nothing has to run for it.

In: a Plan, or what `rlplan simulate -o` wrote; a place to write. Out: the files of
PlanFiles. Left out: runs (report/write.py). No output names a path of this machine.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from rlplan import __version__
from rlplan.planner.plan import Plan
from rlplan.report import charts, html, style
from rlplan.report.perfetto import write_trace
from rlplan.report.plans.forecast import Forecast, forecast
from rlplan.report.plans.gantt import gantt
from rlplan.report.plans.page import Page
from rlplan.report.plans.plan_page import plan_page
from rlplan.report.plans.simulated import (
    SimulatedPlan,
    is_simulation,
    read_simulated_plan,
    simulation_page,
    staleness_chart,
)
from rlplan.report.timeline import TracedSchedule
from rlplan.spec.base import read_json, writing

TEMPLATE = "plan.html.j2"
MAX_BYTES = 1 << 29


@dataclass(frozen=True)
class PlanFiles:
    """Where the parts of a plan's report lie, all in one folder."""

    page: Path
    """The report as HTML."""
    timeline: Path
    """Memory over time."""
    actions: Path
    """Memory by action, where seconds are known."""
    gantt: Path
    """What runs when."""
    staleness: Path
    """Of a simulation, how old rollouts were."""
    summary: Path
    """The page as JSON."""
    trace: Path
    """What is predicted, for Perfetto."""

    @staticmethod
    def within(folder: Path) -> "PlanFiles":
        """The names that every report of a plan uses."""
        pictures = ("timeline.png", "actions.png", "gantt.png", "staleness.png")
        names = ("report.html", *pictures, "report.json", "trace.pftrace")
        return PlanFiles(*(folder / name for name in names))


def write_simulation_report(path: Path, out_dir: Path) -> PlanFiles | None:
    """Write the report of what `rlplan simulate` wrote; nothing, and None, where the file is something else.

    Raises: SpecError where it is no JSON, or where nothing can be written.
    """
    data = read_json(path, "the plan", limit=MAX_BYTES)
    if not is_simulation(data):
        return None
    simulated = read_simulated_plan(data, path)
    return _write(simulated, draw_simulated_plan(simulated), simulation_page(simulated), path.name, out_dir)


def write_report_of(plan: Plan, name: str, out_dir: Path) -> PlanFiles:
    """Write the report of a plan. name: what it was read from. Raises: SpecError where nothing can be written."""
    predicted = forecast(plan, name)
    return _write(predicted, draw(predicted), plan_page(plan), name, out_dir)


def _write(traced: TracedSchedule, figures: Mapping[str, Figure], page: Page, name: str, out_dir: Path) -> PlanFiles:
    files = PlanFiles.within(out_dir)
    with writing(files.page):
        out_dir.mkdir(parents=True, exist_ok=True)
        for stale in (files.actions, files.staleness):
            stale.unlink(missing_ok=True)
        for part, figure in figures.items():
            style.save_png(figure, getattr(files, part))
        write_trace(traced, files.trace)
        files.summary.write_text(json.dumps(asdict(page), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        files.page.write_text(render(page, figures, name), encoding="utf-8")
    return files


def draw(predicted: Forecast) -> dict[str, Figure]:
    """`timeline`, `gantt`, and `actions` where the timeline has seconds, in which short actions are too thin to see."""
    memory = charts.memory_timeline if predicted.ledger.shares_host_memory else charts.memory_by_device
    figures = {"timeline": memory(predicted, predicted.windows)}
    if predicted.timing is not None:
        others = predicted.in_order()
        figures["actions"] = memory(others, others.windows)
    timed = tuple(window for window in predicted.windows if window.is_timed)
    figures["gantt"] = gantt(predicted, timed[-1:] or predicted.windows, predicted.timing)
    return figures


def draw_simulated_plan(simulated: SimulatedPlan) -> dict[str, Figure]:
    """`timeline` and `gantt` of a simulation, and `staleness` where anything is older than what trains it."""
    figures = {
        "timeline": charts.memory_by_device(simulated, simulated.steady_windows),
        "gantt": gantt(simulated, simulated.windows),
    }
    if any(simulated.result.rollout_staleness):
        figures["staleness"] = staleness_chart(simulated.result)
    return figures


def render(page: Page, figures: Mapping[str, Figure], name: str) -> str:
    """The page as self-contained HTML."""
    text: str = (
        html.environment()
        .get_template(TEMPLATE)
        .render(
            page=page,
            pictures={key: style.data_uri(figure) for key, figure in figures.items()},
            sections=_sections(figures, bool(page.phases)),
            version=__version__,
            name=name,
        )
    )
    return text


_TIME = {
    "name": "gantt",
    "alt": "Gantt chart of a step: a lane for each process, bars coloured by phase",
    "caption": "One lane per process; all ranks of a role do the same. Bars too short for a label are named in the "
    "tables below.",
}
_MEMORY = {
    "name": "timeline",
    "alt": "Predicted memory over a step, stacked by kind, with the capacity",
    "caption": "Inside an action each process counts with its peak, between actions with what stays resident. One "
    "GPU stands for "
    "all of its group. On the right: what the largest moment that is expected holds; in grey, kinds of other moments.",
}
_ACTIONS = {
    "name": "actions",
    "alt": "Predicted memory, an equal width for each action",
    "caption": "The same with an equal width for each action, so that short ones can be seen.",
}
_STALENESS = {
    "name": "staleness",
    "alt": "Staleness of rollouts when they were trained",
    "caption": "Zero: on-policy, generated by the version being trained.",
}


def _sections(figures: Mapping[str, Figure], is_timed: bool) -> list[dict[str, Any]]:
    memory, time = ([one for one in all_of if one["name"] in figures] for all_of in _PICTURES)
    return [
        {"name": "time", "title": "Time" if is_timed else "Order", "pictures": time},
        {"name": "memory", "title": "Memory", "pictures": memory},
    ]


_PICTURES = ((_MEMORY, _ACTIONS), (_TIME, _STALENESS))
