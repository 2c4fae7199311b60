"""A comparison as one page for a decision: answer, ranges, alternatives, assumptions, what to measure first.

In: a CompareResult. Out: Markdown. Left out: the table in a terminal (compare.py), the page (rlplan/report).
"""

from typing import Any

from rlplan.comparison import CompareResult
from rlplan.planner.machine import open_search
from rlplan.planner.measured_errors import find_step_error
from rlplan.units import format_bytes, format_seconds
from rlplan_cli.render.compare import COLUMNS, describe_groups, describe_workload
from rlplan_cli.render.plan import choice_line

MEASURED_STEPS = 3
"""Steps to measure before a decision: the first differs from the others, and two more show their spread."""
SHOWN = ("step time", "run time", "$/run", "kWh/run", "memory")


def format_memo(comparison: CompareResult) -> str:
    """Format the page."""
    rows = comparison.rows()
    order = sorted(range(len(rows)), key=lambda place: _order(rows[place], fits=comparison.results[place].fits))
    best = order[0]
    parts = [f"# Which GPUs for {rows[best]['name']}?", describe_workload(comparison) + "."]
    if not comparison.results[best].fits:
        return "\n\n".join(
            [*parts, "None of these clusters fits: " + "; ".join(filter(None, (r["why"] for r in rows)))]
        )
    parts += ["## Answer", *_describe_answer(comparison, rows, best)]
    parts += ["## Alternatives", _draw_table(comparison, [rows[place] for place in order])]
    parts += ["## Assumptions", _format_list(_list_assumptions(comparison, rows, best))]
    parts += ["## Measure first", _format_list(_list_measurements(rows, best))]
    if trade := _list_trade(comparison, best):
        parts += ["## Headroom against seconds", _format_list(trade)]
    return "\n\n".join(parts)


def _order(row: dict[str, Any], *, fits: bool) -> tuple[bool, bool, float]:
    """Sort key: what fits first, then by dollars per run, then by the run's time."""
    cost = row["dollars_per_run"]
    return not fits, cost is None, cost if cost is not None else row["run_s"] or 0.0


def _describe_answer(comparison: CompareResult, rows: list[dict[str, Any]], best: int) -> list[str]:
    row = rows[best]
    cells = {name: COLUMNS[name](row) for name in SHOWN}
    words = (
        f"**{row['devices']}**: {cells['run time']} and {cells['$/run']} for the run, {cells['kWh/run']} kWh at most."
    )
    return [words, *describe_groups(rows), f"Layout: {choice_line(comparison.results[best].plan)}."]


def _draw_table(comparison: CompareResult, rows: list[dict[str, Any]]) -> str:
    names = ("devices", *SHOWN, "verdict")
    lines = [f"| {' | '.join(names)} |", f"| {' | '.join('---' for _ in names)} |"]
    for row in rows:
        cells = [row["devices"], *(COLUMNS[name](row) for name in SHOWN), row["verdict"]]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"\n{failed.cluster} cannot be built: {failed.error.what}" for failed in comparison.not_built]
    return "\n".join(lines)


def _list_assumptions(comparison: CompareResult, rows: list[dict[str, Any]], best: int) -> list[str]:
    plan = comparison.results[best].plan
    quotes = {quote["gpu"]: quote for row in rows for quote in row["quotes"]}
    read_on = {gpu: f", read on {quote['date']}" * bool(quote["date"]) for gpu, quote in quotes.items()}
    prices = [
        f"{gpu}: ${quote['dollars']:g} per GPU-hour ({quote['source']}{read_on[gpu]})." for gpu, quote in quotes.items()
    ]
    unpriced = sorted({gpu for row in rows for gpu in row["unpriced"]})
    return [
        f"Lengths: {plan.job.workload.tokens_in_words}.",
        f"Range of step times: {find_step_error(plan).words}.",
        *prices,
        *(f"No price is known for {gpu}." for gpu in unpriced),
        "Energy: every GPU at its board's full power, without hosts and cooling.",
        *plan.notes,
    ]


def _list_measurements(rows: list[dict[str, Any]], best: int) -> list[str]:
    """Measurements that would decide among the rows that cannot be told apart, with their costs."""
    group = [row for row in rows if row["cost_group"] == 1] or [rows[best]]
    lines = []
    for row in group:
        price = f", about ${MEASURED_STEPS * row['dollars_per_step']:,.2f}" if row["dollars_per_step"] else ""
        time = format_seconds(MEASURED_STEPS * row["step_s"]) if row["step_s"] else "unknown time"
        lines.append(f"{MEASURED_STEPS} steps on {row['devices']}: {time}{price}.")
    lines.append("`rlplan calibrate` reads them; then compare again. Response lengths move every row alike: log them.")
    return lines


def _list_trade(comparison: CompareResult, best: int) -> list[str]:
    """The Pareto front of step time and headroom on the first choice."""
    plan = comparison.results[best].plan
    front = plan.pareto or open_search(plan.asked).restrict_to_plan(plan).find_pareto_front()
    return [
        f"{format_seconds(layout.seconds)} per step leaves {format_bytes(max(0, layout.headroom_bytes))}."
        for layout in front
        if layout.seconds
    ]


def _format_list(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
