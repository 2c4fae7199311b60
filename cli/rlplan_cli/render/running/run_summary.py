"""Summary at the end of a run: evaluations, and predictions against measurements."""

from pathlib import Path

from rlplan.planner.plan import Plan, read_plan
from rlplan.reading import MAX_RUN_BYTES, check_numbers, read_records
from rlplan.timing.measured import collect_durations, join_seconds
from rlplan.trace import Trace
from rlplan.units import format_bytes, format_seconds
from rlplan_cli.render.terminal import new_table, stdout


def show_summary(folder: Path) -> None:
    """Show every evaluation, each process's peak and each action's seconds."""
    rows = [*read_records(folder / "metrics.jsonl", "metrics.jsonl", check_numbers, limit=MAX_RUN_BYTES)]
    plan, trace = read_plan(folder / "plan.json"), Trace.read(folder / "trace.jsonl")
    for evaluation in plan.job.evaluations:
        form = "{:.1%}" if evaluation.is_share else "{:.4g}"
        values = [(row["step"], form.format(row[evaluation.metric])) for row in rows if evaluation.metric in row]
        if values:
            steps = ", ".join(f"{value} {'at the end' if step < 0 else f'after {step}'}" for step, value in values)
            stdout.print(f"{evaluation.title} on held-out prompts: {steps}")
    losses = [(row["step"], row["policy/loss"]) for row in rows if row.get("policy/loss") is not None]
    if losses and not plan.job.has_rollouts:
        stdout.print(f"loss: {', '.join(f'{loss:.4g} in step {step}' for step, loss in (losses[0], losses[-1]))}")
    table = new_table("process", "predicted peak", "measured peak", "difference", title="Memory")
    for process in plan.ledger.processes:
        samples = [sample for sample in trace.samples if sample.process == process]
        # On a GPU only tensors are measured; the prediction also includes the CUDA context.
        on_gpu = [s.num_bytes for s in samples if (s.kind, s.statistic) == ("device_allocated", "peak")]
        measured = on_gpu or [s.num_bytes for s in samples if s.kind == "total"]
        if measured:
            predicted = plan.ledger.process_peak(process).num_bytes
            table.add_row(
                process, format_bytes(predicted), format_bytes(max(measured)), f"{predicted / max(measured) - 1:+.1%}"
            )
    stdout.print(table)
    _show_seconds(plan, trace, folder)


def _show_seconds(plan: Plan, trace: Trace, folder: Path) -> None:
    """Show predicted seconds of each action and the median of the measured ones, without the first step."""
    rows = [*read_records(folder / "timings.jsonl", "timings.jsonl", check_numbers, limit=MAX_RUN_BYTES)]
    measured = collect_durations(plan.schedule, trace.spans, rows)
    table = new_table("action", "part", "predicted", "measured median", "predicted / measured", title="Seconds")
    for row in join_seconds(plan.schedule, plan.timing, measured):
        predicted = "-" if row.predicted_s is None else format_seconds(row.predicted_s)
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.action_id, row.part, predicted, format_seconds(row.median_s), ratio)
    stdout.print(table)
