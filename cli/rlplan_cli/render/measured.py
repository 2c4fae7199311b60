"""Evidence of a run in a terminal: a measured step with its likely causes, an out-of-memory error with its ways out.

In: a StepReport or a MemoryAnswer. Out: stdout.
"""

from rich.text import Text

from rlplan.foreign.tracebacks.explain import MemoryAnswer
from rlplan.planner.answers.measured_step import PhaseGap, StepReport
from rlplan.units import format_bytes, format_seconds
from rlplan.vocabulary import format_name
from rlplan_cli.render.terminal import NARROW, new_table, show_change, show_fact, show_text, stdout

MOST_ROWS = 5
"""Number of rows of an answer that tell who held the memory."""


def show_step(report: StepReport) -> None:
    """Show the verdict, the phases and the causes."""
    plan, measured = report.plan, report.measured
    style = "bold green" if report.is_normal else "bold red"
    head, _, details = report.words.partition(": ")
    show_text(
        Text.assemble((head, style), f"  {plan.model_name}, {plan.job.algorithm.name}, {plan.devices}: {details}")
    )
    steps = f"{measured.num_steps} steps" if measured.num_steps > 1 else "one step, which includes warm-up"
    words = f"  measured by {measured.stack}, median of {steps}; predicted for the best layout of the job"
    show_text(Text(words + (", with the measured lengths" if report.overrides else ""), style="dim"))
    table = new_table("phase", "measured", "predicted", "gap", "ratio", "", title="Step by phase", left=("",))
    for phase_gap in report.gaps:
        table.add_row(phase_gap.phase, *_cells(phase_gap, is_largest=phase_gap is report.largest))
    stdout.print(table)
    _show_causes(report)
    for remark in report.remarks:
        show_fact("Also", remark)
    if report.overrides:
        stdout.print("Predicted with " + " ".join(map(_quote, report.overrides)), style="dim", soft_wrap=True)
    if measured.unread:
        shown = ", ".join(measured.unread[:8]) + " ..." * (len(measured.unread) > 8)
        words = f"Unknown fields, not read: {shown}; use --field MEANING=NAME:UNIT to name one."
        show_text(Text(words, style="dim"))


def _cells(phase_gap: PhaseGap, *, is_largest: bool) -> list[str | Text]:
    ratio = "-" if phase_gap.ratio is None else f"{phase_gap.ratio:.2f}"
    mark = Text("largest gap", "bold red") if is_largest else Text("" if phase_gap.is_normal else "slow", "yellow")
    gap = "-" * (phase_gap.gap_s < 0) + format_seconds(abs(phase_gap.gap_s))
    return [format_seconds(phase_gap.measured_s), format_seconds(phase_gap.predicted_s), gap, ratio, mark]


def _show_causes(report: StepReport) -> None:
    largest = report.largest
    if largest is None:
        show_text(Text(f"{report.normal_words[:1].upper()}{report.normal_words[1:]}.", style="dim"))
        return
    if largest.phase == "between":
        words = "no timer of the log covers this: data, reward functions, logging, evaluation, checkpoints, idle ranks"
        show_fact("Likely cause", words)
        return
    if not largest.predicted_s:
        show_fact("Likely cause", f"the job has no {largest.phase}: another job wrote this log, or the job does more")
        return
    if not report.causes:
        show_fact(
            "Likely cause", "no setting of the job explains it: check the host, the disk, other processes, kernels"
        )
        return
    is_narrow = stdout.width < NARROW
    table = new_table("likely cause", f"{largest.phase} then", *([] if is_narrow else ["setting"]), left=("setting",))
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    for cause in report.causes:
        table.add_row(cause.words, format_seconds(cause.predicted_s), *([] if is_narrow else [cause.overrides]))
    stdout.print(table)
    if is_narrow:
        for cause in report.causes:
            stdout.print(f"  {cause.overrides}", style="dim", soft_wrap=True)
    words = "Each row is predicted with this setting and the best layout; all else is unchanged."
    show_text(Text(words, style="dim"))


def _quote(override: str) -> str:
    return f"'{override}'" if " " in override else override


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
