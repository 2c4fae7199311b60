"""The largest value that fits in a terminal: the override, the values around it, and why the next one fails.

In: a Solution. Out: stdout.
"""

from collections.abc import Callable
from typing import Any

from rich.text import Text

from rlplan.planner.answers.solve import LADDER, Solution
from rlplan.units import format_bytes, format_seconds
from rlplan_cli.render.plan import format_verdict
from rlplan_cli.render.terminal import new_table, show_fact, show_text, stdout

NUM_SHOWN = 4
"""Number of fitting values in the table, the largest ones; `--json` has all that were tried."""


def show_solution(solution: Solution) -> None:
    """Show the override, then the values around it."""
    plan, seconds = solution.plan, solution.plan.seconds
    head = Text.assemble((solution.override, "bold green"), f"  {plan.model_name}, {plan.job.algorithm.name}, ")
    show_text(head.append(f"{plan.devices}: {format_seconds(seconds)} per step" if seconds else plan.devices))
    table = new_table(solution.key, "verdict", "step time", "headroom", title="Neighboring values", left=("verdict",))
    rows = {_read(tried.change.typed): tried for tried in solution.asked if tried.plan is not None}
    order: Callable[[Any], int] = LADDER.index if isinstance(solution.value, str) else int
    fitting = sorted((value for value in rows if order(value) <= order(solution.value)), key=order)[-NUM_SHOWN:]
    broken = solution.next
    for value in [*fitting, *([broken.value] if broken and broken.value in rows else [])]:
        tried = rows[value]
        assert tried.plan is not None
        step = format_seconds(tried.seconds) if tried.seconds else "-"
        cells = (format_verdict(tried.plan.verdict), step, format_bytes(tried.headroom_bytes or 0))
        table.add_row(_format(value), *cells)
    stdout.print(table)
    if broken is None:
        if isinstance(solution.value, str):
            show_fact(
                "No limit", f"{solution.value} is the largest model that is tried; name a larger one in `estimate`"
            )
        else:
            show_fact("No limit", f"all rollouts of a step run at once; values above {solution.value:,} change nothing")
    else:
        show_fact(
            f"At {_format(broken.value)}",
            (f"{broken.phase}, on {broken.device}: " if broken.device else "") + broken.why,
        )


def _read(override: str) -> Any:
    """The value of an override: a number, or a model's id."""
    value = override.rpartition("=")[2]
    return int(value) if value.isdigit() else value


def _format(value: int | str) -> str:
    return value if isinstance(value, str) else f"{value:,}"
