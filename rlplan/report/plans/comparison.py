"""Comparison page of plans, simulations and runs: a table, seconds and bytes on one scale, curves, timelines.

In: Sides, each made of a plan, a simulation or a run, with its row from `rlplan compare`. Out: an HTML file.
Left out: the content of rows (rlplan/comparison.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlplan.memory.ledger import MemoryLedger
from rlplan.planner.answers.plan_results import sum_phase_costs
from rlplan.planner.plan import Plan
from rlplan.report import html, style
from rlplan.report.drawn import bars
from rlplan.report.drawn.curves import learning, time_against_money
from rlplan.report.drawn.memory import memory_of_host
from rlplan.report.plans.forecast import forecast
from rlplan.report.plans.simulated import SimulatedPlan
from rlplan.report.plans.write import draw, draw_simulated_plan
from rlplan.report.run_folder import RunFolder, unique_labels
from rlplan.spec.base import explain_write_errors
from rlplan.units import format_seconds

TEMPLATE = "comparison.html.j2"
MAX_BELOW_EACH_OTHER = 3
"""Most timelines below each other; with more, the reader selects one."""
MAX_TIMELINES = 12
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Side:
    """One side of a comparison."""

    row: Row
    """Keys: name, kind, devices, verdict, step_s, tokens_per_s, peak_bytes, capacity_bytes, and prices if known."""
    ledger: MemoryLedger
    """Predicted or simulated memory."""
    phases: Mapping[str, float]
    """Seconds of a usual step by phase."""
    timeline: Mapping[str, Any]
    """Timeline chart."""
    run: RunFolder | None = None
    """Measured run, where there is one."""


def make_side(source: Plan | SimulatedPlan | RunFolder, row: Row) -> Side:
    """Make one side. row: may be empty for a simulation, which supplies its own values."""
    if isinstance(source, RunFolder):
        phases = {str(phase): seconds for phase, seconds in source.measured_step.phases.items()}
        timing = source.plan.timing.step if source.plan.timing else None
        return Side(row, source.ledger, phases, memory_of_host(source, timing), source)
    if isinstance(source, SimulatedPlan):
        result = source.result
        phases = {str(phase): seconds / len(result.step_s) for phase, seconds in result.phase_s.items()}
        own = {
            "name": source.name, "kind": "simulated", "devices": f"{result.num_gpus} GPUs", "verdict": "",
            "step_s": result.mean_step_s, "tokens_per_s": result.num_tokens / result.seconds,
            "peak_bytes": bars.fullest(source.ledger).num_bytes, "capacity_bytes": None,
        }  # fmt: skip
        return Side(own | dict(row), source.ledger, phases, draw_simulated_plan(source).timeline)
    costs = sum_phase_costs(source.timing.step) if source.timing and source.seconds else {}
    (chart, *_) = draw(forecast(source, str(row["name"]))).timeline["others"]
    return Side(row, source.ledger, {str(phase): cost.seconds for phase, cost in costs.items()}, chart)


def write_comparison(sides: Sequence[Side], path: Path) -> None:
    """Write the page. Raises: SpecError where it cannot be written."""
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(comparison_page(sides), encoding="utf-8")


def comparison_page(sides: Sequence[Side]) -> str:
    """Render the page as HTML."""
    labels = _labels(sides)
    runs = [side.run for side in sides if side.run is not None]
    places = [
        (label, side.ledger, side.row["capacity_bytes"])
        for label, side in zip(labels, sides, strict=True)
        if side.ledger.rows
    ]
    timed = [(label, side) for label, side in zip(labels, sides, strict=True) if side.phases]
    return html.render(
        TEMPLATE,
        rows=[{"label": label} | dict(side.row) for label, side in zip(labels, sides, strict=True)],
        has_money=any(side.row.get("dollars_per_step") for side in sides),
        money=time_against_money([side.row for side in sides if "dollars_per_step" in side.row]),
        phases=_phases(timed),
        peaks=bars.compare_peaks(places),
        learning=learning(runs, unique_labels(tuple(runs))) if runs else {},
        timelines=_timelines(labels, sides),
    )


def _labels(sides: Sequence[Side]) -> list[str]:
    """Distinguish sides by name, devices or kind, and by a number where these are equal."""
    labels = [""] * len(sides)
    for keys in (("name",), ("devices",), ("name", "kind"), ("name", "devices"), ("name", "devices", "kind")):
        labels = [", ".join(str(side.row[key]) for key in keys) for side in sides]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{label} ({index})" if labels.count(label) > 1 else label for index, label in enumerate(labels, 1)]


def _phases(timed: Sequence[tuple[str, Side]]) -> bars.Bars:
    rows = []
    for label, side in timed:
        segments = tuple(
            bars.Segment(phase, color, side.phases[phase], f"{side.phases[phase]:.6g} s")
            for phase, color in ((str(phase), color) for phase, color in style.PHASE_COLORS.items())
            if side.phases.get(phase)
        )
        rows.append(bars.Bar(label, segments, f"{format_seconds(sum(side.phases.values()))}, {side.row['kind']}"))
    return bars.Bars("Seconds of a usual step by phase; concurrent phases count in full", tuple(rows))


def _timelines(labels: Sequence[str], sides: Sequence[Side]) -> list[dict[str, Any]]:
    charts = [{**side.timeline, "name": label} for label, side in zip(labels, sides, strict=True) if side.timeline]
    if len(charts) <= MAX_BELOW_EACH_OTHER:
        return charts
    note = f"{MAX_TIMELINES} of {len(charts)} are drawn." if len(charts) > MAX_TIMELINES else ""
    return [{"type": "timeline", "name": "", "note": note, "others": charts[:MAX_TIMELINES]}]
