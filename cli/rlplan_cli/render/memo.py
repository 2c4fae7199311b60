"""A comparison as one page for a decision: answer, ranges, alternatives, assumptions, what to measure first.

In: a CompareResult. Out: Markdown. Left out: the table in a terminal (compare.py), the page (rlplan/report).
"""

from typing import Any

from rlplan.comparison import CompareResult
from rlplan.planner.machine import open_search
from rlplan.planner.measured_errors import find_step_error
from rlplan.planner.plan import Plan
from rlplan.units import format_bytes, format_seconds
from rlplan_cli.render.compare import COLUMNS, describe_groups, describe_workload
from rlplan_cli.render.plan import choice_line

MEASURED_STEPS = 3
"""Steps to measure before a decision: the first differs from the others, and two more show their spread."""
SHOWN = ("step time", "run time", "$/run", "kWh/run", "memory")


def format_memo(comparison: CompareResult) -> str:
    """Format the page."""
    fits = [result.fits for result in comparison.results]
    rows = [row | {"fits": is_fit} for row, is_fit in zip(comparison.rows(), fits, strict=True)]
    order = sorted(range(len(rows)), key=lambda place: _order(rows[place]))
    best, plan = rows[order[0]], comparison.results[order[0]].plan
    title = [f"# Which GPUs for {best['name']}?", describe_workload(comparison) + "."]
    if not best["fits"]:
        return "\n\n".join([*title, "None of these clusters fits: " + "; ".join(row["why"] for row in rows)])
    cells = {name: COLUMNS[name](best) for name in SHOWN}
    answer = (
        f"**{best['devices']}**: {cells['run time']} and {cells['$/run']} for the run, {cells['kWh/run']} kWh at most."
    )
    left = [f"{failed.cluster} cannot be built: {failed.error.what}" for failed in comparison.not_built]
    sections: dict[str, list[str]] = {
        "Answer": [answer, *describe_groups(rows), f"Layout: {choice_line(plan)}."],
        "Alternatives": [_draw_table([rows[place] for place in order]), *left],
        "Assumptions": [_format_list(_list_assumptions(plan, rows))],
        "Measure first": [_format_list(_list_measurements(rows, best))],
        "Headroom against seconds": [_format_list(_list_trade(plan))],
    }
    return "\n\n".join([*title, *(part for name, parts in sections.items() for part in (f"## {name}", *parts))])


def _order(row: dict[str, Any]) -> tuple[bool, bool, float]:
    """Sort key: rows that fit first, then by dollars per run, or by the run's time without a price."""
    cost = row["dollars_per_run"]
    return not row["fits"], cost is None, row["run_s"] or 0.0 if cost is None else cost


def _draw_table(rows: list[dict[str, Any]]) -> str:
    lines = [("devices", *SHOWN, "verdict"), ("---",) * (len(SHOWN) + 2)]
    lines += [(row["devices"], *(COLUMNS[name](row) for name in SHOWN), row["verdict"]) for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _list_assumptions(plan: Plan, rows: list[dict[str, Any]]) -> list[str]:
    quotes = {quote["gpu"]: quote for row in rows for quote in row["quotes"]}
    read_on = {gpu: f", read on {quote['date']}" * bool(quote["date"]) for gpu, quote in quotes.items()}
    return [
        f"Lengths: {plan.job.workload.tokens_in_words}.",
        f"Range of step times: {find_step_error(plan).words}.",
        *(
            f"{gpu}: ${quote['dollars']:g} per GPU-hour ({quote['source']}{read_on[gpu]})."
            for gpu, quote in quotes.items()
        ),
        *(f"No price is known for {gpu}." for gpu in sorted({gpu for row in rows for gpu in row["unpriced"]})),
        "Energy: every GPU at its board's full power, without hosts and cooling.",
        *plan.notes,
    ]


def _list_measurements(rows: list[dict[str, Any]], best: dict[str, Any]) -> list[str]:
    """Measurements that would decide among the rows that cannot be told apart, with their costs."""
    lines = []
    for row in [row for row in rows if row["cost_group"] == 1] or [best]:
        price = f", about ${MEASURED_STEPS * row['dollars_per_step']:,.2f}" if row["dollars_per_step"] else ""
        lines.append(
            f"{MEASURED_STEPS} steps on {row['devices']}: {format_seconds(MEASURED_STEPS * row['step_s'])}{price}."
        )
    return [
        *lines,
        "`rlplan calibrate` reads them; then compare again. Log response lengths: they move every row alike.",
    ]


def _list_trade(plan: Plan) -> list[str]:
    """The Pareto front of step time and headroom on the first choice."""
    front = plan.pareto or open_search(plan.asked).restrict_to_plan(plan).find_pareto_front()
    rooms = [(format_seconds(layout.seconds), format_bytes(max(0, layout.headroom_bytes))) for layout in front]
    return [f"{seconds} per step leaves {room}." for seconds, room in rooms]


def _format_list(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
