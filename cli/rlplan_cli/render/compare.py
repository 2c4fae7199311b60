"""A comparison in a terminal: a row for each cluster, plan, simulation or run, then what the prices are worth.

In: a CompareResult. Out: stdout. Left out: the page (rlplan/report/plans/comparison.py).
"""

import shlex
from collections.abc import Callable, Mapping
from typing import Any

from rich.text import Text

from rlplan.comparison import CompareResult
from rlplan.planner.measured_errors import step_error
from rlplan.planner.plan_parts import Verdict
from rlplan.results import OfPlan
from rlplan.spec.hardware.prices import OLD_DAYS, WAY_OUT
from rlplan.units import format_bytes, format_seconds
from rlplan_cli.render.plan import COLORS
from rlplan_cli.render.terminal import NARROW, new_table, say_left_out, stdout

UNKNOWN = "-"
ON_FRONT = "*"


def show_comparison(found: CompareResult) -> None:
    """The table, what stands in the way of rows that do not fit, the layouts on the front, the prices."""
    rows = found.rows()
    _show_table(found, rows)
    for row in rows:
        if row["why"]:
            stdout.print(Text.assemble((f"  {row['devices']}: ", "bold"), (row["why"], "dim")))
    for one in found.not_built:
        stdout.print(Text.assemble((f"  {one.cluster}: ", "bold"), (f"cannot be built: {one.error.what}", "dim")))
    for cluster, why in found.clusters.left_out.items():
        stdout.print(Text.assemble((f"  {cluster}: ", "bold"), (f"left out: {why}", "dim")))
    _show_front(rows)
    _show_intervals(found, rows)
    _show_prices(rows)


def _show_intervals(found: CompareResult, rows: list[dict[str, Any]]) -> None:
    """Between which seconds each step lies, and where that comes from."""
    ranges: dict[str, list[str]] = {}
    for row, one in zip(rows, found.results, strict=True):
        if row["step_interval_s"] is not None and one.plan.verdict.may_fit:
            low, high = map(format_seconds, row["step_interval_s"])
            ranges.setdefault(step_error(one.plan).words, []).append(f"{row['devices']} {low} to {high}")
    for words, named in ranges.items():
        stdout.print(f"A step: {', '.join(named)} ({words}).", style="dim")


def _show_table(found: CompareResult, rows: list[dict[str, Any]]) -> None:
    """A name that all rows have is said once, above; what has no room is left out, in the order of LEFT_OUT."""
    names = {row["name"] for row in rows}
    lead = [key for key in ("name", "kind") if len({row[key] for row in rows}) > 1]
    title = f"{rows[0]['name']}: time against money" if len(names) == 1 else "Time against money"
    wide = stdout.options.update(width=10 * stdout.width)
    for num_left_out in range(len(LEFT_OUT) + 1):
        columns = [name for name in (*COLUMNS, "verdict") if name not in LEFT_OUT[:num_left_out]]
        if all(one.plan.verdict is Verdict.FITS for one in found.results) and num_left_out:
            columns.remove("verdict")
        table = new_table(*lead, "devices", *columns, title=title, left=("verdict", "kind"))
        for row, one in zip(rows, found.results, strict=True):
            devices = row["devices"] + f" {ON_FRONT}" * row["is_on_front"]
            table.add_row(*(row[key] for key in lead), devices, *(_cell(name, row, one) for name in columns))
        if stdout.measure(table, options=wide).maximum <= stdout.width:
            break
    stdout.print(table)
    say_left_out(name for name in COLUMNS if name not in columns)


def _cell(name: str, row: Mapping[str, Any], one: OfPlan) -> str | Text:
    verdict = one.plan.verdict
    if name == "verdict":
        return Text(verdict.value, COLORS[verdict].removeprefix("bold "))
    return COLUMNS[name](row) if verdict.may_fit else UNKNOWN


def _show_front(rows: list[dict[str, Any]]) -> None:
    """What is marked, and how it is typed."""
    front = [row for row in rows if row["is_on_front"]]
    if front:
        stdout.print(f"{ON_FRONT}: nothing else is as fast and cheaper, or as cheap and faster. As it is typed:")
    for row in front:
        hardware = shlex.quote(f"hardware={row['hardware']}")
        stdout.print(f"  {hardware} {row['overrides']}", style="dim", soft_wrap=True)


def _show_prices(rows: list[dict[str, Any]]) -> None:
    """Whose they are and how old, and what is not known."""
    quotes = {quote["gpu"]: quote for row in rows for quote in row["quotes"]}
    sources: dict[str, list[str]] = {}
    for gpu, one in quotes.items():
        read = f", read on {one['date']}" if one["date"] else ""
        read += "" if one["age_days"] is None else f", {one['age_days']} days ago"
        sources.setdefault(one["source"] + read, []).append(f"{gpu} ${one['dollars']:g}")
    for source, named in sources.items():
        stdout.print(f"A GPU-hour: {', '.join(named)} ({source}).", style="dim")
    if old := [gpu for gpu, one in quotes.items() if one["is_old"]]:
        words = f"Older than {OLD_DAYS} days: {', '.join(old)}. They may well be others by now: {WAY_OUT}."
        stdout.print(words, style="bold yellow")
    if unknown := dict.fromkeys(gpu for row in rows for gpu in row["unpriced"]):
        stdout.print(f"No price is known for {', '.join(unknown)}: {WAY_OUT}.", style="bold")
    if stdout.width < NARROW:
        return
    if any(row["kwh_per_run"] is not None for row in rows):
        stdout.print("kWh: at most, every GPU at its board's full power; hosts and cooling not counted.", style="dim")
    if unmetered := dict.fromkeys(gpu for row in rows for gpu in row["unmetered"]):
        stdout.print(f"No profile says the power of {', '.join(unmetered)}.", style="dim")


def _memory(row: Mapping[str, Any]) -> str:
    return f"{format_bytes(row['peak_bytes'])} of {format_bytes(row['capacity_bytes'])}"


def _seconds(value: float | None) -> str:
    return UNKNOWN if value is None else format_seconds(value)


def _dollars(value: float | None) -> str:
    """Dollars with three significant figures, whole from 100 on.

    >>> _dollars(149.41), _dollars(0.8), _dollars(31.92), _dollars(None)
    ('$149', '$0.800', '$31.9', '-')
    """
    return UNKNOWN if value is None else f"${value:,.0f}" if value >= 100 else f"${value:#.3g}"


def _number(value: float | None) -> str:
    """A count for people.

    >>> _number(2_229_474.0), _number(26.2), _number(None)
    ('2.23 M', '26.2', '-')
    """
    if value is None:
        return UNKNOWN
    if value >= 1e9:
        return f"{value / 1e9:.3g} G"
    return f"{value / 1e6:.3g} M" if value >= 1e6 else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "a step": lambda row: _seconds(row["step_s"]),
    "memory": _memory,
    "$ an hour": lambda row: _dollars(row["dollars_per_hour"]),
    "$ a step": lambda row: _dollars(row["dollars_per_step"]),
    "a run": lambda row: _seconds(row["run_s"]),
    "$ a run": lambda row: _dollars(row["dollars_per_run"]),
    "kWh a run": lambda row: _number(row["kwh_per_run"]),
    "tokens a $": lambda row: _number(row["tokens_per_dollar"]),
}
"""What is said of a row, by the column's name."""
LEFT_OUT = ("memory", "$ an hour", "kWh a run", "tokens a $", "a run", "$ a step")
"""In this order where there is no room: tokens a dollar are the other way round what a step costs."""
