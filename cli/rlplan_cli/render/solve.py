"""The largest value that fits in a terminal: the override, the values around it, and why the next one fails.

In: a Solution. Out: stdout.
"""

from rich.text import Text

from rlplan.planner.answers.solve import Solution
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
    rows = {int(tried.change.typed.rpartition("=")[2]): tried for tried in solution.asked if tried.plan is not None}
    fitting = sorted(value for value in rows if value <= solution.value)[-NUM_SHOWN:]
    broken = solution.next
    for value in [*fitting, *([broken.value] if broken and broken.value in rows else [])]:
        tried = rows[value]
        assert tried.plan is not None
        step = format_seconds(tried.seconds) if tried.seconds else "-"
        cells = (format_verdict(tried.plan.verdict), step, format_bytes(tried.headroom_bytes or 0))
        table.add_row(f"{value:,}", *cells)
    stdout.print(table)
    if broken is None:
        show_fact("No limit", f"all rollouts of a step run at once; values above {solution.value:,} change nothing")
    else:
        show_fact(
            f"At {broken.value:,}", (f"{broken.phase}, on {broken.device}: " if broken.device else "") + broken.why
        )
