"""An out-of-memory error in a terminal: the phase, the allocation, who held the rest, and changes that make it fit.

In: a MemoryAnswer. Out: stdout.
"""

from rich.text import Text

from rlplan.foreign.tracebacks.explain import MemoryAnswer
from rlplan.units import format_bytes
from rlplan.vocabulary import format_name
from rlplan_cli.render.terminal import show_change, show_fact, show_text

MOST_ROWS = 5


def show_answer(answer: MemoryAnswer, log: str) -> None:
    """Show the answer; without a job, also how to state one."""
    head, _, details = answer.headline.partition(", ")
    show_text(Text.assemble((head.replace("the ", "The ", 1), "bold red"), f"{', ' * bool(details)}{details}"))
    if answer.allocation:
        show_fact("Allocation", answer.allocation)
    for remark in answer.remarks:
        show_fact("Also", remark)
    if (peak := answer.predicted) is not None:
        fullness = f"{format_bytes(peak.num_bytes)} of {format_bytes(answer.capacity_bytes)}"
        show_fact("Predicted", f"{fullness} in {peak.action_id} on {peak.scope}, by process")
        for process, _, kind, size in peak.rows[:MOST_ROWS]:
            show_text(Text(f"  {format_bytes(size):>10}  {format_name(kind)} of {process}"))
    if answer.changes:
        print("Each of these changes alone makes it fit, the mildest first:")
        for words, size in answer.changes:
            show_change(words, f"{format_bytes(size)} at the peak")
    elif answer.way_out:
        show_fact("Changes", answer.way_out)
    else:
        way_out = f"rlplan explain {log} --with SCRIPT --gpus 8xH100"
        show_fact("With its job", f"{way_out} tells who held the rest, and what makes it fit")
