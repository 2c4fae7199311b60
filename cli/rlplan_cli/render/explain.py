"""An explanation in a terminal: the bottlenecks, the next best layouts, and the effect of changes.

In: a Plan and its Explanation. Out: stdout.
"""

from collections.abc import Sequence

from rich.text import Text

from rlplan.planner.answers.changes import Outcome
from rlplan.planner.answers.explain import Explanation, PhaseBottleneck
from rlplan.planner.plan import Plan
from rlplan.timing.cost import Resource
from rlplan.units import format_bytes, format_seconds
from rlplan_cli.render.plan import format_verdict, show_speed
from rlplan_cli.render.terminal import (
    NARROW,
    join_parts,
    name_resource,
    new_table,
    show_fact,
    show_table,
    show_text,
    show_typed,
    stdout,
)

NUM_RUNNERS_UP = 5
LEFT = ("meaning", "verdict")


def show_explanation(plan: Plan, explanation: Explanation) -> None:
    """Show the bottlenecks, then the alternatives, then what-ifs."""
    show_speed(plan)
    _show_phases(plan, explanation.phases)
    _show_memory(plan, explanation)
    _show_runners_up(explanation)
    _show_outcomes(explanation, explanation.families, "Rejected choices: the best layout with each")
    _show_outcomes(explanation, explanation.what_ifs, "What if")
    _show_outcomes(explanation, explanation.asked, "Your changes")


def _show_phases(plan: Plan, phases: Sequence[PhaseBottleneck]) -> None:
    def word(resource: str) -> str:
        return name_resource(Resource(resource), is_on_host=plan.is_on_host)

    names = ("phase", "seconds", "share", "bound by", "slack of others")
    rows, room = [], stdout.width - 50
    for phase in phases:
        slack = [f"{word(other.resource)} {other.grows:.3g}x" for other in phase.slack if other.grows < 100]
        bound = f"{word(phase.bound_by)} {format_seconds(phase.bound_s)}"
        cells = (format_seconds(phase.seconds), f"{phase.share:.0%}", bound, join_parts(slack, room) or "-")
        rows.append((phase.phase, *cells))
    if rows:
        show_table(names, rows, "Bottleneck of each phase", ("bound by", "slack of others"))
        words = "Slack: factor by which a resource could slow down before it becomes the bottleneck."
        show_text(Text(words, style="dim"))


def _show_memory(plan: Plan, explanation: Explanation) -> None:
    memory = explanation.memory
    words = (
        f"peak {format_bytes(memory.num_bytes)} of {format_bytes(memory.capacity_bytes)} on the fullest "
        f"{'host' if plan.is_on_host else 'GPU'}, in {memory.action_id}; "
        f"largest part: {memory.largest}, {format_bytes(memory.largest_bytes)}; "
        f"worst-case headroom {format_bytes(memory.headroom_bytes)}"
    )
    if memory.host_headroom_bytes is not None:
        words += f", {format_bytes(memory.host_headroom_bytes)} on the fullest host"
    show_fact("Memory", words)
    if explanation.why_not:
        show_text(Text.assemble(("Does not fit because: ", "bold red"), explanation.why_not))


def _show_runners_up(explanation: Explanation) -> None:
    layouts, is_narrow = explanation.runners_up[:NUM_RUNNERS_UP], stdout.width < NARROW
    names = ["step time", "headroom", "why not chosen"]
    names = ["#", *names] if is_narrow else [*names, "differs in"]
    rows = []
    for number, layout in enumerate(layouts, 1):
        cells = (format_seconds(layout.seconds), format_bytes(layout.headroom_bytes), layout.why)
        rows.append((str(number), *cells) if is_narrow else (*cells, layout.differs.replace(" ", "\n")))
    show_table(names, rows, "Next best", ("why not chosen", "differs in"))
    if is_narrow:
        show_typed((str(number), layout.differs) for number, layout in enumerate(layouts, 1))


def _show_outcomes(explanation: Explanation, outcomes: Sequence[Outcome], title: str) -> None:
    """Show one row per change, and below the table why some do not fit."""
    if not outcomes:
        return
    is_narrow = stdout.width < NARROW
    table = new_table(
        "#" if is_narrow else "change",
        "meaning",
        "step time",
        "vs chosen",
        "headroom",
        "verdict",
        title=title,
        left=LEFT,
    )
    table.columns[0].overflow, table.columns[0].no_wrap = "fold", False
    for number, outcome in enumerate(outcomes, 1):
        name = str(number) if is_narrow else outcome.change.typed
        table.add_row(name, outcome.change.words, *_cells(outcome, explanation.seconds))
    stdout.print(table)
    if is_narrow:
        show_typed((str(number), outcome.change.typed) for number, outcome in enumerate(outcomes, 1))
    for number, outcome in enumerate(outcomes, 1):
        if outcome.why:
            name = str(number) if is_narrow else outcome.change.typed
            reason = outcome.why + (f"; fits with {outcome.way_out}" if outcome.way_out else "")
            show_text(Text.assemble((f"  {name}: ", "bold"), (reason, "dim")))


def _cells(outcome: Outcome, chosen_s: float) -> list[str | Text]:
    if outcome.verdict is None or outcome.seconds is None or outcome.headroom_bytes is None:
        return ["-", "-", "-", Text("cannot be built", "dim")]
    seconds = format_seconds(outcome.seconds) if outcome.may_fit else "-"
    share = f"{outcome.seconds / chosen_s - 1:+.0%}" if outcome.may_fit and chosen_s else "-"
    return [seconds, share, format_bytes(outcome.headroom_bytes), format_verdict(outcome.verdict)]
