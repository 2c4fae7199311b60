"""The largest value that fits, in a terminal: the override, the values around it, what breaks at the next one.

In: a Solution. Out: stdout.
"""

from rich.text import Text

from rlplan.planner.answers.solve import Breaking, Solution
from rlplan.units import format_bytes, format_seconds
from rlplan_cli.render.plan import COLORS
from rlplan_cli.render.terminal import new_table, say, stdout

MOST_SHOWN = 4
"""Values that fit, the largest; all that were tried are in `--json`."""


def show_solution(found: Solution) -> None:
    """The answer as it is typed, then why no more."""
    plan, seconds = found.plan, found.plan.seconds
    said = Text.assemble((found.override, "bold green"), f"  {plan.model_name}, {plan.job.algorithm.name}, ")
    stdout.print(said.append(f"{plan.devices}: {format_seconds(seconds)} a step" if seconds else plan.devices))
    table = new_table(found.key, "verdict", "a step", "headroom", title="Values beside it", left=("verdict",))
    rows = {int(one.change.typed.rpartition("=")[2]): one for one in found.asked if one.plan is not None}
    fitting = sorted(value for value in rows if value <= found.value)[-MOST_SHOWN:]
    for value in [*fitting, *([found.next.value] if found.next and found.next.value in rows else [])]:
        one = rows[value]
        assert one.plan is not None
        verdict = Text(one.plan.verdict.value, COLORS[one.plan.verdict].removeprefix("bold "))
        step = format_seconds(one.seconds) if one.seconds else "-"
        table.add_row(f"{value:,}", verdict, step, format_bytes(one.headroom_bytes or 0))
    stdout.print(table)
    if found.next is None:
        say("No more", f"all rollouts of a step run at once; more than {found.value:,} change nothing")
    else:
        say(f"At {found.next.value:,}", _why(found.next))


def _why(broken: Breaking) -> str:
    where = f"{broken.phase}, on {broken.device}: " if broken.device else ""
    return where + broken.why
