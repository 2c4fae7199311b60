"""A comparison in a terminal: a row for each cluster, plan, simulation or run, then the sources of the prices.

In: a CompareResult. Out: stdout. Left out: the page (rlplan/report/plans/comparison.py).
"""

import datetime as dt
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from rich.text import Text

from rlplan.comparison import CompareResult
from rlplan.planner.answers.clusters import compute_bill
from rlplan.planner.measured_errors import find_step_error, predict_step_interval
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Verdict
from rlplan.results import PlannedResult
from rlplan.spec.hardware.prices import OLD_DAYS, WAY_OUT, read_prices
from rlplan.units import format_bytes, format_seconds
from rlplan_cli.render.plan import format_verdict
from rlplan_cli.render.terminal import NARROW, new_table, show_fact, show_left_out, show_text, stdout

UNKNOWN = "-"
ON_FRONT = "*"


def show_comparison(comparison: CompareResult) -> None:
    """Show the table, the reasons of rows that do not fit, the Pareto-optimal layouts, and the prices."""
    rows = comparison.rows()
    _show_table(comparison, rows)
    reasons = [(row["devices"], row["why"]) for row in rows if row["why"]]
    reasons += [(failed.cluster, f"cannot be built: {failed.error.what}") for failed in comparison.not_built]
    reasons += [(cluster, f"left out: {why}") for cluster, why in comparison.clusters.left_out.items()]
    for name, reason in reasons:
        show_text(Text.assemble((f"  {name}: ", "bold"), (reason, "dim")))
    _show_front(rows)
    for words in describe_groups(rows):
        show_text(Text(words))
    _show_intervals(comparison, rows)
    _show_prices(rows)


def describe_workload(comparison: CompareResult) -> str:
    """Describe the workload, if all rows share it."""
    jobs = [result.plan.asked for result in comparison.results]
    work = jobs[0].workload
    if any(job.workload != work for job in jobs):
        return "workloads differ"
    return f"{work.num_steps} steps of {work.num_prompts_per_step} prompts x {work.num_samples_per_prompt}"


def describe_groups(rows: list[dict[str, Any]]) -> list[str]:
    """Name the rows whose ranges overlap the best row's, by time and by cost."""
    lines = []
    for key, words in (("time_group", "time"), ("cost_group", "dollars")):
        best = [row["devices"] for row in rows if row[key] == 1]
        if len(best) > 1:
            lines.append(f"By {words}, {', '.join(best)} cannot be told apart: their ranges overlap. Measure a step.")
    return lines


def _show_intervals(comparison: CompareResult, rows: list[dict[str, Any]]) -> None:
    """Show the range of each step time, and its source."""
    ranges: dict[str, list[str]] = {}
    for row, result in zip(rows, comparison.results, strict=True):
        if row["step_interval_s"] is not None and result.plan.verdict.may_fit:
            low, high = map(format_seconds, row["step_interval_s"])
            ranges.setdefault(find_step_error(result.plan).words, []).append(f"{row['devices']} {low} to {high}")
    for words, clusters in ranges.items():
        show_fact("Step time", f"{', '.join(clusters)} ({words})")


def _show_table(comparison: CompareResult, rows: list[dict[str, Any]]) -> None:
    """Show the table. A name shared by all rows goes into the title; columns without room are dropped by LEFT_OUT."""
    names = {row["name"] for row in rows}
    lead = [key for key in ("name", "kind") if len({row[key] for row in rows}) > 1]
    title = f"{rows[0]['name']}: time and cost" if len(names) == 1 else "Time and cost"
    title += f"; {describe_workload(comparison)}"
    # rich would squeeze columns to fit the width; columns are dropped instead until the table fits as it is
    wide = stdout.options.update(width=10 * stdout.width)
    for num_left_out in range(len(LEFT_OUT) + 1):
        columns = [name for name in (*COLUMNS, "verdict") if name not in LEFT_OUT[:num_left_out]]
        if all(result.plan.verdict is Verdict.FITS for result in comparison.results) and num_left_out:
            columns.remove("verdict")
        table = new_table(*lead, "devices", *columns, title=title, left=("verdict", "kind"))
        for row, result in zip(rows, comparison.results, strict=True):
            devices = row["devices"] + f" {ON_FRONT}" * row["is_on_front"]
            table.add_row(*(row[key] for key in lead), devices, *(_cell(name, row, result) for name in columns))
        if stdout.measure(table, options=wide).maximum <= stdout.width:
            break
    stdout.print(table)
    show_left_out(name for name in COLUMNS if name not in columns)


def _cell(name: str, row: Mapping[str, Any], result: PlannedResult) -> str | Text:
    if name == "verdict":
        return format_verdict(result.plan.verdict)
    return COLUMNS[name](row) if result.plan.verdict.may_fit else UNKNOWN


def _show_front(rows: list[dict[str, Any]]) -> None:
    """Show the settings of the Pareto-optimal rows: no other row is as fast and cheaper, or as cheap and faster."""
    front = [row for row in rows if row["is_on_front"]]
    if front:
        stdout.print(f"{ON_FRONT} Pareto-optimal. Settings:")
    for row in front:
        hardware = shlex.quote(f"hardware={row['hardware']}")
        stdout.print(f"  {hardware} {row['overrides']}", style="dim", soft_wrap=True)


def show_cost(plan: Plan) -> None:
    """Show the dollars of a run with their range, and where the prices are from."""
    bill, count = compute_bill(plan, read_prices(today=dt.datetime.now(dt.UTC).date())), plan.job.workload.num_steps
    if bill.dollars_per_run is not None:
        interval = predict_step_interval(plan)
        low, high = interval or (plan.seconds, plan.seconds)
        dollars = bill.dollars_per_run / plan.seconds
        total = format_range((low * dollars, high * dollars) if interval else None, bill.dollars_per_run, _dollars)
        show_fact("Cost", f"{count} steps cost {total}, at {_dollars(bill.dollars_per_hour)} per hour")
    _show_prices([bill.as_json()])


def _show_prices(rows: list[dict[str, Any]]) -> None:
    """Show the sources and dates of the prices, old prices, and GPUs without a price."""
    quotes = {quote["gpu"]: quote for row in rows for quote in row["quotes"]}
    sources: dict[str, list[str]] = {}
    for gpu, quote in quotes.items():
        read = f", read on {quote['date']}" if quote["date"] else ""
        read += "" if quote["age_days"] is None else f", {quote['age_days']} days ago"
        sources.setdefault(quote["source"] + read, []).append(f"{gpu} ${quote['dollars']:g}")
    for source, prices in sources.items():
        show_fact("Price per GPU-hour", f"{', '.join(prices)} ({source})")
    if old := [gpu for gpu, quote in quotes.items() if quote["is_old"]]:
        words = f"Prices of {', '.join(old)} are older than {OLD_DAYS} days and may have changed: {WAY_OUT}."
        show_text(Text(words, style="bold yellow"))
    if unknown := dict.fromkeys(gpu for row in rows for gpu in row["unpriced"]):
        show_text(Text(f"No price for {', '.join(unknown)}: {WAY_OUT}.", style="bold"))
    if stdout.width < NARROW:
        return
    if any(row["kwh_per_run"] is not None for row in rows):
        show_fact("kWh", "upper bound, every GPU at its board's full power; without hosts and cooling")
    if unmetered := dict.fromkeys(gpu for row in rows for gpu in row["unmetered"]):
        show_fact("Power", f"no profile has the power of {', '.join(unmetered)}")


def format_range(interval: tuple[float, float] | None, value: float | None, show: Callable[[float | None], str]) -> str:
    """Format a range as `$163-653`; the value alone if it has no range."""
    if interval is None:
        return show(value)
    low, high = map(show, interval)
    return f"{low.removesuffix(' h') if high.endswith(' h') else low}-{high.removeprefix('$')}"


def _hours(value: float | None) -> str:
    """Format seconds as hours.

    >>> _hours(9000.0), _hours(90000.0)
    ('2.5 h', '25 h')
    """
    return UNKNOWN if value is None else f"{value / 3600:.1f} h" if value < 36_000 else f"{value / 3600:,.0f} h"


def _memory(row: Mapping[str, Any]) -> str:
    return f"{format_bytes(row['peak_bytes'])} of {format_bytes(row['capacity_bytes'])}"


def _seconds(value: float | None) -> str:
    return UNKNOWN if value is None else format_seconds(value)


def _dollars(value: float | None) -> str:
    """Format dollars with three significant digits; amounts from 100 on without cents.

    >>> _dollars(149.41), _dollars(0.8), _dollars(31.92), _dollars(None)
    ('$149', '$0.800', '$31.9', '-')
    """
    return UNKNOWN if value is None else f"${value:,.0f}" if value >= 100 else f"${value:#.3g}"


def _number(value: float | None) -> str:
    """Format a count for people.

    >>> _number(2_229_474.0), _number(26.2), _number(None)
    ('2.23 M', '26.2', '-')
    """
    if value is None:
        return UNKNOWN
    if value >= 1e9:
        return f"{value / 1e9:.3g} G"
    return f"{value / 1e6:.3g} M" if value >= 1e6 else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "step time": lambda row: _seconds(row["step_s"]),
    "memory": _memory,
    "$/hour": lambda row: _dollars(row["dollars_per_hour"]),
    "$/step": lambda row: _dollars(row["dollars_per_step"]),
    "run time": lambda row: format_range(row["run_interval_s"], row["run_s"], _hours),
    "$/run": lambda row: format_range(row["dollars_per_run_interval"], row["dollars_per_run"], _dollars),
    "kWh/run": lambda row: format_range(row["kwh_per_run_interval"], row["kwh_per_run"], _number),
    "tokens/$": lambda row: _number(row["tokens_per_dollar"]),
}
"""Formatters of the columns."""
LEFT_OUT = ("memory", "$/hour", "kWh/run", "tokens/$", "run time", "$/step")
"""Columns in the order in which they are dropped from a narrow table. Tokens/$ go before $/step, their reciprocal."""
