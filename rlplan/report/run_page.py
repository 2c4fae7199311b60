"""The report page of a run.

In: Findings and their summary. Out: HTML text. Left out: computation (summary.py, dataframes.py); this module only
formats numbers.
"""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from rlplan.report import html, style
from rlplan.report.dataframes import PEAK_TOLERANCE, predicted_memory
from rlplan.report.drawn import bars
from rlplan.report.drawn.curves import learning
from rlplan.report.drawn.memory import memory_of_host
from rlplan.report.evaluations import change_text, missing, value_text
from rlplan.report.plans.page import Tile
from rlplan.report.plans.plan_page import list_alternatives
from rlplan.report.summary import Findings
from rlplan.units import format_bytes, format_rate, format_seconds
from rlplan.vocabulary import format_name

TEMPLATE = "report.html.j2"
FLAT_POINTS = 0.05
"""A control run counts as flat while its share of held-out prompts changes by less than this."""

_STATES = {
    "finished": ("good", "The run finished."),
    "running": ("bad", "The run was still active when this report was written; all results are preliminary."),
    "interrupted": ("bad", "The run was interrupted; the results end there."),
    "failed": ("bad", "The run failed; the results end there."),
    "unknown": ("bad", "The run left no readable status, as after a kill; the results end with its last output."),
}


def render_page(findings: Findings, summary: Mapping[str, Any]) -> str:
    """Render the page."""
    run, state = findings.run, summary["status"]["state"]
    return html.render(
        TEMPLATE,
        summary=summary,
        state=_STATES.get(state, ("bad", f"The run's state is '{state}'.")),
        tiles=_tiles(findings, summary),
        learning=learning(findings.runs, findings.labels),
        memory=memory_of_host(run, run.plan.timing.step if run.plan.timing else None),
        predictions=[bars.prediction(run, findings.peaks, with_baselines=with_base) for with_base in (True, False)],
        peaks=summary["memory"]["process_peaks"],
        kinds_at_peak=_kinds_at_peak(findings),
        exactness=findings.exactness.astype(object).where(findings.exactness.notna(), None).to_dict("records"),
        workload=_workload(findings),
        schedule=run.plan.schedule,
        others=list_alternatives(run.plan),
        commands=_commands(findings),
        evaluations=summary["learning"][0]["evaluations"],
        no_evaluation=missing(run),
        has_rewards=run.plan.job.has_rollouts,
        flat_points=FLAT_POINTS,
        tolerance=PEAK_TOLERANCE,
    )


def _tiles(findings: Findings, summary: Mapping[str, Any]) -> list[Tile]:
    """The main results: learning, memory, time, and whether they are as expected."""
    return [
        *_evaluation_tiles(summary),
        _exactness_tile(summary["memory"]["persistent_kinds"]),
        _peak_tile(summary["memory"]["process_peaks"]),
        _host_tile(summary["memory"]["host_peak"]),
        _time_tile(findings, summary),
    ]


def _evaluation_tiles(summary: Mapping[str, Any]) -> list[Tile]:
    """A tile of the first metric on held-out prompts; none without a recorded evaluation, which a sentence explains."""
    run = summary["learning"][0]
    if not run["evaluations"]:
        return []
    main = run["evaluations"][0]
    before, after, is_share = main["before"], main["after"], main["is_share"]
    title = f"{style.sentence(main['title'])}, held out"
    steps = f"{run['num_steps_done']} of {summary['job']['num_steps']} steps"
    start = "" if before is None else value_text(before, is_share=is_share)
    if after is None:
        begins = f"{start} before; " if start else ""
        return [Tile(title, "unknown", f"{begins}no later evaluation, {steps}")]
    value = value_text(after, is_share=is_share)
    gained = "" if before is None else f"{change_text(main['change'], is_share=is_share)} in "
    grows = before is not None and (after > before) != run["is_control"]
    return [Tile(title, f"{start} \u2192\u00a0{value}" if start else value, gained + steps,
                  "good" if grows else "quiet")]  # fmt: skip


def _exactness_tile(kinds: list[dict[str, Any]]) -> Tile:
    samples, exact = sum(kind["num_samples"] for kind in kinds), sum(kind["is_exact"] for kind in kinds)
    if not samples:
        return Tile("Persistent kinds exact", "unknown", "none was measured")
    wrong = ", ".join(format_name(kind["kind"]) for kind in kinds if not kind["is_exact"])
    note = f"not exact or not measured: {wrong}" if wrong else f"to the byte, in all of {samples:,} samples"
    return Tile("Persistent kinds exact", f"{exact} of {len(kinds)}", note, "bad" if wrong else "good")


def _peak_tile(peaks: list[dict[str, Any]]) -> Tile:
    known = [peak for peak in peaks if peak["error_fraction"] is not None]
    if not known:
        return Tile("Worst process peak", "unknown", "no process was measured")
    worst = min(known, key=lambda peak: (peak["error_fraction"] >= 0, -abs(peak["error_fraction"])))
    under = sum(peak["error_fraction"] < 0 for peak in known)
    side = f"{under} of {len(known)} predicted too small" if under else f"none of {len(known)} predicted too small"
    fine = all(peak["is_within_tolerance"] for peak in known)
    value = style.format_percent(worst["error_fraction"], signed=True)
    return Tile("Worst process peak", value, f"{worst['process']}; {side}", "good" if fine else "bad")


def _host_tile(host: Mapping[str, Any]) -> Tile:
    predicted, measured, capacity = host["predicted_bytes"], host["measured_bytes"], host["capacity_bytes"]
    value = "unknown" if measured is None else format_bytes(measured)
    note = "" if predicted is None else f"{format_bytes(predicted)} predicted; "
    return Tile("Host memory, peak", value, f"{note}capacity {format_bytes(capacity)}")


def _time_tile(findings: Findings, summary: Mapping[str, Any]) -> Tile:
    seconds, timings = summary["status"]["seconds"], findings.timings
    notes = []
    if "step_s" in timings and timings["step_s"].notna().any():
        notes.append(f"{format_seconds(timings['step_s'].mean())} per step")
    if "throughput/tokens_per_sec" in timings and timings["throughput/tokens_per_sec"].notna().any():
        notes.append(format_rate(timings["throughput/tokens_per_sec"].mean()))
    value = "unknown" if seconds is None else format_seconds(seconds)
    return Tile("Time", value, ", ".join(notes) or "no step was timed")


def _kinds_at_peak(findings: Findings) -> list[dict[str, Any]]:
    """Rows of each process at its predicted peak; measured: the largest sample of that kind after that action."""
    ledger_rows, joined = predicted_memory(findings.run.plan.ledger), findings.joined
    provenance = {
        (row.run_phase, row.action_id, row.process, str(row.role), str(row.kind)): str(row.provenance)
        for row in findings.run.plan.ledger.rows
    }
    groups = []
    for _, peak in findings.peaks.iterrows():
        where = ["run_phase", "action_id", "process"]
        predicted, measured = ledger_rows, joined[joined["statistic"] == "resident"]
        for column in where:
            predicted = predicted[predicted[column] == peak[column]]
            measured = measured[measured[column] == peak[column]]
        rows = []
        for _, row in predicted[(predicted["peak_bytes"] > 0) | (predicted["resident_bytes"] > 0)].iterrows():
            is_same = (measured["kind"] == row["kind"]) & (measured["role"] == row["role"])
            sample = measured[is_same]["measured_bytes"].max()
            rows.append(
                {
                    "role": row["role"],
                    "kind": row["kind"],
                    "color": style.KIND_COLORS.get(row["kind"], style.MUTED),
                    "peak_bytes": int(row["peak_bytes"]),
                    "resident_bytes": int(row["resident_bytes"]),
                    "measured_bytes": None if pd.isna(sample) else int(sample),
                    "provenance": provenance.get((*(peak[name] for name in where), row["role"], row["kind"]), ""),
                }
            )
        if rows:
            rows.sort(key=lambda row: -row["peak_bytes"])
            groups.append({name: peak[name] for name in where} | {"rows": rows})
    return groups


def _workload(findings: Findings) -> list[tuple[str, str]]:
    """Describe the job without absolute paths."""
    job = findings.run.plan.job
    work = job.workload
    rewards = ", ".join(f"{reward.label} (weight {reward.weight:g})" for reward in job.rewards)
    ladder = f"{work.num_prompts_per_step} prompts with {work.num_samples_per_prompt} samples each"
    return [
        ("Algorithm", f"{job.algorithm.name}, learning rate {job.algorithm.learning_rate:g}, seed {job.seed}"),
        ("Rollouts per step", f"{work.num_rollouts_per_step} ({ladder})"),
        ("Mini-batch, micro-batch", f"{work.mini_batch_size}, {work.micro_batch_size_per_gpu} rollouts"),
        ("Lengths", f"at most {work.max_prompt_len} prompt and {work.max_response_len} response tokens"),
        ("Rewards", rewards),
        ("Hardware", f"{job.hardware.profile}, {job.hardware.num_devices} devices"),
    ]


def _commands(findings: Findings) -> list[str]:
    """Commands that reproduce this report: the runs, then the report."""
    commands = [f"rlplan run {findings.run.name}/plan.json"]
    commands += [f"rlplan run {other.name}/plan.json" for other in findings.others]
    return [*commands, f"rlplan report {findings.run.name}"]
