"""A measured step in a terminal: the answer, its phases beside what the hardware allows, what could be behind it.

In: a StepReport. Out: stdout.
"""

from rich.text import Text

from rlplan.planner.answers.measured_step import PhaseGap, StepReport
from rlplan.units import format_seconds
from rlplan_cli.render.terminal import NARROW, new_table, say, stdout


def show_step(report: StepReport) -> None:
    """The answer first."""
    plan, measured = report.plan, report.measured
    style = "bold green" if report.is_normal else "bold red"
    head, _, rest = report.words.partition(": ")
    stdout.print(
        Text.assemble((head, style), f"  {plan.model_name}, {plan.job.algorithm.name}, {plan.devices}: {rest}")
    )
    steps = f"{measured.num_steps} steps" if measured.num_steps > 1 else "one step, which warms up"
    words = f"  measured by {measured.stack}, median of {steps}; predicted: the best layout of the job"
    stdout.print(words + (", with the measured lengths" if report.overrides else ""), style="dim")
    table = new_table("phase", "measured", "hardware allows", "gap", "times", "", title="A step", left=("",))
    for one in report.gaps:
        table.add_row(one.phase, *_cells(one, is_largest=one is report.largest))
    stdout.print(table)
    _show_causes(report)
    for remark in report.remarks:
        say("Also", remark)
    if report.overrides:
        stdout.print("Counted with " + " ".join(map(_quoted, report.overrides)), style="dim", soft_wrap=True)
    if measured.unread:
        shown = ", ".join(measured.unread[:8])
        stdout.print(
            f"Not read, as no table names them: {shown}{' ...' * (len(measured.unread) > 8)}; "
            "--field MEANING=NAME:UNIT says what one means.",
            style="dim",
        )


def _cells(one: PhaseGap, *, is_largest: bool) -> list[str | Text]:
    ratio = "-" if one.ratio is None else f"{one.ratio:.2f}"
    mark = Text("largest gap", "bold red") if is_largest else Text("" if one.is_normal else "long", "yellow")
    sign = "-" if one.gap_s < 0 else ""
    gap = sign + format_seconds(abs(one.gap_s))
    return [format_seconds(one.measured_s), format_seconds(one.predicted_s), gap, ratio, mark]


def _show_causes(report: StepReport) -> None:
    largest = report.largest
    if largest is None:
        stdout.print(f"{report.normal_words[:1].upper()}{report.normal_words[1:]}.", style="dim")
        return
    if largest.phase == "between":
        words = "what no timer of the log covers: data, reward functions, logging, evaluation, checkpoints, idle ranks"
        say("Likely cause", words)
        return
    if not largest.predicted_s:
        say("Likely cause", f"the job has no {largest.phase} at all: another job wrote this, or does more than it says")
        return
    if not report.causes:
        say("Likely cause", "none that a setting of the job says: look at the host, the disk, other processes, kernels")
        return
    is_narrow = stdout.width < NARROW
    table = new_table(
        "likely cause", f"{largest.phase} then", *([] if is_narrow else ["as it is typed"]), left=("as it is typed",)
    )
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    for one in report.causes:
        table.add_row(one.words, format_seconds(one.predicted_s), *([] if is_narrow else [one.overrides]))
    stdout.print(table)
    if is_narrow:
        for one in report.causes:
            stdout.print(f"  {one.overrides}", style="dim", soft_wrap=True)
    stdout.print(
        "Each is predicted with that setting laid over the best layout, everything else as it is.", style="dim"
    )


def _quoted(override: str) -> str:
    return f"'{override}'" if " " in override else override
