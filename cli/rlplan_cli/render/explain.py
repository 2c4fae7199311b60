"""An explanation in a terminal: the bottleneck, why others were not chosen, what would change it.

In: a Plan and its Explanation. Out: stdout.
"""

from collections.abc import Sequence

from rich.text import Text

from rlplan.planner.answers.changes import Outcome
from rlplan.planner.answers.explain import Explanation, PhaseBottleneck
from rlplan.planner.plan import Plan
from rlplan.timing.cost import Resource
from rlplan.units import format_bytes, format_seconds
from rlplan_cli.render.plan import COLORS, show_speed
from rlplan_cli.render.terminal import NARROW, fill, name_of, new_table, say, show_typed, stdout

NUM_RUNNERS_UP = 5
LEFT = ("meaning", "verdict")


def show_explanation(plan: Plan, explanation: Explanation) -> None:
    """The answers in the order in which one asks: what limits it, what else there was, what if."""
    show_speed(plan)
    _show_phases(plan, explanation.phases)
    _show_memory(plan, explanation)
    _show_runners_up(explanation)
    _show_outcomes(explanation, explanation.families, "Choices that the search rejected: the best layout with each")
    _show_outcomes(explanation, explanation.what_ifs, "What if")
    _show_outcomes(explanation, explanation.asked, "What was asked")


def _show_phases(plan: Plan, phases: Sequence[PhaseBottleneck]) -> None:
    if not phases:
        return

    def word(resource: str) -> str:
        return name_of(Resource(resource), is_on_host=plan.is_on_host)

    names = ("phase", "seconds", "share", "bound by", "slack of the rest")
    table = new_table(*names, title="What binds in each phase", left=("bound by", "slack of the rest"))
    room = stdout.width - 50
    for phase in phases:
        slack = [f"{word(one.resource)} {one.grows:.3g}x" for one in phase.slack if one.grows < 100]
        bound = f"{word(phase.bound_by)} {format_seconds(phase.bound_s)}"
        cells = (format_seconds(phase.seconds), f"{phase.share:.0%}", bound, fill(slack, room) or "-")
        table.add_row(phase.phase, *cells)
    stdout.print(table)
    stdout.print("slack: by what factor a resource could slow down before it became the bottleneck.", style="dim")


def _show_memory(plan: Plan, explanation: Explanation) -> None:
    memory = explanation.memory
    words = (
        f"{format_bytes(memory.num_bytes)} of {format_bytes(memory.capacity_bytes)} on the fullest "
        f"{'host' if plan.is_on_host else 'GPU'}, in "
        f"{memory.action_id}; the largest part is {memory.largest}, {format_bytes(memory.largest_bytes)}; "
        f"{format_bytes(memory.headroom_bytes)} are left at the high end"
    )
    if memory.host_headroom_bytes is not None:
        words += f", {format_bytes(memory.host_headroom_bytes)} on the fullest host"
    say("Memory", words)
    if explanation.why_not:
        stdout.print(Text.assemble(("Does not fit because: ", "bold red"), explanation.why_not))


def _show_runners_up(explanation: Explanation) -> None:
    rows = explanation.runners_up[:NUM_RUNNERS_UP]
    if not rows:
        return
    is_narrow = stdout.width < NARROW
    names = ["a step", "headroom", "why not chosen"]
    names = ["#", *names] if is_narrow else [*names, "differs in"]
    table = new_table(*names, title="Next best", left=("why not chosen", "differs in"))
    for number, one in enumerate(rows, 1):
        cells = (format_seconds(one.seconds), format_bytes(one.headroom_bytes), one.why)
        table.add_row(*((str(number), *cells) if is_narrow else (*cells, one.differs.replace(" ", "\n"))))
    stdout.print(table)
    if is_narrow:
        show_typed((str(number), one.differs) for number, one in enumerate(rows, 1))


def _show_outcomes(explanation: Explanation, outcomes: Sequence[Outcome], title: str) -> None:
    """A row a change; what stands in the way of those that do not surely fit is said below."""
    if not outcomes:
        return
    is_narrow = stdout.width < NARROW
    table = new_table(
        "#" if is_narrow else "change", "meaning", "a step", "", "headroom", "verdict", title=title, left=LEFT
    )
    table.columns[0].overflow, table.columns[0].no_wrap = "fold", False
    for number, one in enumerate(outcomes, 1):
        name = str(number) if is_narrow else one.change.typed
        table.add_row(name, one.change.words, *_cells(one, explanation.seconds))
    stdout.print(table)
    if is_narrow:
        show_typed((str(number), one.change.typed) for number, one in enumerate(outcomes, 1))
    for number, one in enumerate(outcomes, 1):
        if one.why:
            name, way_out = str(number) if is_narrow else one.change.typed, f"; fits with {one.way_out}"
            stdout.print(Text.assemble((f"  {name}: ", "bold"), (one.why + way_out * bool(one.way_out), "dim")))


def _cells(one: Outcome, chosen_s: float) -> list[str | Text]:
    if one.verdict is None or one.seconds is None or one.headroom_bytes is None:
        return ["-", "-", "-", Text("cannot be built", "dim")]
    verdict = Text(one.verdict.value, COLORS[one.verdict].removeprefix("bold "))
    seconds = format_seconds(one.seconds) if one.may_fit else "-"
    share = f"{one.seconds / chosen_s - 1:+.0%}" if one.may_fit and chosen_s else "-"
    return [seconds, share, format_bytes(one.headroom_bytes), verdict]
