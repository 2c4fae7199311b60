"""The answer in about ten lines: verdict, the fullest device as a bar, step time, remedies as commands, assumptions.

In: a Plan, the command that was typed, what was assumed. Out: stdout. Left out: tables, which `-v` adds (estimate.py,
plan.py).
"""

import shlex
import sys
from collections import Counter
from collections.abc import Sequence

import typer
from rich.text import Text

from rlplan.errors import RlplanError
from rlplan.planner.executable import check_fits
from rlplan.planner.plan import Plan
from rlplan.units import format_bytes, format_seconds
from rlplan.vocabulary import format_name
from rlplan_cli.render.plan import describe_remedy, format_fullness, format_peak_range, format_speed, show_headline
from rlplan_cli.render.terminal import show_change, show_fact, show_text, stdout

WIDTH = 40
"""Characters of the bar, for the capacity or the peak, whichever is larger."""
GLYPHS = "█▓▒░"
MOST_KINDS = 4
MOST_REMEDIES = 3


def read_command(*changes: str, typed: Sequence[str] = ()) -> str:
    """The typed command with changes, to be typed again; options for the output are left out.

    A change of a key replaces the typed one. typed: another command than that of this process.
    """
    keys = {change.partition("=")[0] for change in changes}
    words = [word for word in typed or sys.argv[1:] if word not in ("-v", "--verbose")]
    words = [word for word in words if word.partition("=")[0] not in keys]
    return shlex.join(["rlplan", *words, *changes])


def end_with_verdict(plan: Plan) -> None:
    """End with the verdict's exit code; only a pipe also gets the message, for a person has just read the answer.

    Raises: typer.Exit at a terminal, else as `check_fits`.
    """
    try:
        check_fits(plan)
    except RlplanError as error:
        if not stdout.is_terminal:
            raise
        raise typer.Exit(error.exit_code) from None


def show_answer(plan: Plan, assumed: Sequence[str] = (), *, leads_with_speed: bool = False) -> None:
    """Show the answer. leads_with_speed: whether the step's time stands in the first line, rather than the peak."""
    peak = (f"peak {format_fullness(plan)}", f" in {plan.binding.action_id}{format_peak_range(plan)}")
    speed = format_speed(plan)
    show_headline(plan, *(speed if leads_with_speed else peak))
    show_text(Text(f"  {draw_bar(plan)}"))
    if leads_with_speed:
        show_fact("Memory", "".join(peak))
    elif plan.timing is not None and plan.verdict.may_fit:
        show_fact("Step", "".join(speed))
    if plan.timing is not None and plan.verdict.may_fit:
        count = plan.job.workload.num_steps
        show_fact("Run", f"{count} steps take {format_seconds(plan.timing.run_s(plan.schedule, count))}")
    _show_remedies(plan)
    if assumed:
        show_fact("Assumed", "; ".join(assumed))


def _show_remedies(plan: Plan) -> None:
    """Show the first remedies as commands, or that there is none."""
    if plan.remedies:
        show_text(Text("Each of these changes alone helps, the smallest effect on learning first:", style="bold"))
    for remedy in plan.remedies[:MOST_REMEDIES]:
        show_change(read_command(*shlex.split(remedy.change)), describe_remedy(remedy))
    if not plan.remedies and not plan.fits and not plan.refusals:
        larger = "more memory" if plan.is_on_host else "larger GPUs"
        show_fact("No change", f"of those tried makes it fit; try a smaller model, shorter lengths or {larger}")


def draw_bar(plan: Plan) -> str:
    """Draw the fullest device by kind of memory: `[████▓▓▒░   ] weights 15.3 GiB, KV cache 9.1 GiB, free 2.0 GiB`."""
    sizes = Counter[str]()
    for _, _, kind, size in plan.binding.rows:
        sizes[format_name(kind)] += size
    capacity, total = plan.binding_capacity, sum(sizes.values())
    largest = sizes.most_common(MOST_KINDS)
    if (rest := total - sum(size for _, size in largest)) > 0:
        largest.append(("other", rest))
    whole = max(capacity, total)
    bar, reached = "", 0
    for place, (_, size) in enumerate(largest):
        reached += size
        bar += GLYPHS[min(place, len(GLYPHS) - 1)] * (round(WIDTH * reached / whole) - len(bar))
    bar = bar.ljust(WIDTH)
    if total > capacity:
        place = min(WIDTH - 1, round(WIDTH * capacity / whole))
        bar = f"{bar[:place]}|{bar[place:]}"
    words = [f"{GLYPHS[min(place, 3)]} {name} {format_bytes(size)}" for place, (name, size) in enumerate(largest)]
    words.append(f"free {format_bytes(capacity - total)}" if total <= capacity else f"| {format_bytes(capacity)}")
    return f"[{bar}] {', '.join(words)}"
