"""Findings: all results of a report, computed once, and their machine-readable summary.

In: the run folder of the report and those to compare. Out: dataframes, and a JSON-able summary.
Left out: drawing and wording.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from rlplan.report import dataframes
from rlplan.report.evaluations import evaluations, outcome
from rlplan.report.run_folder import RunFolder, read_run_folder, unique_labels
from rlplan.report.timeline import measured_levels
from rlplan.spec.parts.rewards import Evaluation
from rlplan.timing.measured import FIRST, collect_durations, join_seconds
from rlplan.version import __version__
from rlplan.vocabulary import MemoryKind

REPORT_SCHEMA_VERSION = 2


@dataclass(frozen=True)
class Findings:
    """Results that a report is made of."""

    run: RunFolder
    """The run that the report is about."""
    others: tuple[RunFolder, ...]
    """Runs to compare."""
    labels: tuple[str, ...]
    """One label per run, the report's own run first."""
    joined: pd.DataFrame
    """`dataframes.joined_memory`: a row for each measured sample."""
    peaks: pd.DataFrame
    """`dataframes.process_peaks`: a row for each process."""
    exactness: pd.DataFrame
    """`dataframes.exactness`: a row for each persistent kind of each process and role."""
    metrics: pd.DataFrame
    """Learning metrics, one row per step."""
    timings: pd.DataFrame
    """Durations, one row per step."""

    @property
    def runs(self) -> tuple[RunFolder, ...]:
        """The run of the report, then the others."""
        return (self.run, *self.others)


def find(run_dir: Path, compare: Sequence[Path] = ()) -> Findings:
    """Read the folders and join predictions with measurements. Raises: SpecError for another folder."""
    run, *others = (read_run_folder(folder) for folder in (run_dir, *compare))
    joined = dataframes.joined_memory(run)
    return Findings(
        run=run,
        others=tuple(others),
        labels=unique_labels((run, *others)),
        joined=joined,
        peaks=dataframes.process_peaks(run, joined),
        exactness=dataframes.exactness(run, joined),
        metrics=dataframes.metrics(run),
        timings=dataframes.timings(run),
    )


def summarize(findings: Findings) -> dict[str, Any]:
    """The report as data: the job, its outcome, evaluations of every run, and errors of the predictions.

    Fractions are 0-1, bytes integers, seconds floats; an error is predicted minus measured; unknown values are null.
    """
    run = findings.run
    job = run.plan.job
    return {
        "schema_version": REPORT_SCHEMA_VERSION,
        "rlplan_version": __version__,
        "run": run.name,
        "job": {
            "name": job.name,
            "seed": job.seed,
            "algorithm": job.algorithm.name,
            "learning_rate": job.algorithm.learning_rate,
            "policy": Path(job.policy.path).name,
            "num_steps": job.workload.num_steps,
            "num_rollouts_per_step": job.workload.num_rollouts_per_step,
            "placement": str(run.plan.schedule.placement),
        },
        "status": {
            "state": run.status.state,
            "exit_code": run.status.exit_code,
            "message": run.status.message,
            "started_at": run.status.started_at,
            "seconds": run.status.seconds,
            "num_steps_done": num_steps_done(run),
        },
        "learning": _learning(findings),
        "memory": {
            "persistent_kinds": _persistent_kinds(findings.exactness),
            "packed_weights": _packed_weights(findings.joined),
            "process_peaks": [_peak(row) for _, row in findings.peaks.iterrows()],
            "host_peak": _host_peak(run),
        },
        "seconds_per_action": seconds_per_action(findings),
    }


def _learning(findings: Findings) -> list[dict[str, Any]]:
    known = evaluations(findings.runs)
    return [summarize_learning(run, label, known) for run, label in zip(findings.runs, findings.labels, strict=True)]


def summarize_learning(run: RunFolder, label: str, known: Sequence[Evaluation]) -> dict[str, Any]:
    """Learning of one run: each metric before the first and after the last evaluated step."""
    job, frame = run.plan.job, dataframes.metrics(run)
    return {
        "label": label,
        "run": run.name,
        "state": run.status.state,
        "seed": job.seed,
        "learning_rate": job.algorithm.learning_rate,
        "shuffles_rewards": job.controls.shuffle_rewards,
        "skips_sync_after_step": job.controls.skip_sync_after_step,
        "is_control": run.is_control,
        "num_steps_done": num_steps_done(run),
        "evaluations": [outcome(run, evaluation) for evaluation in known],
        "logprob_difference_max": _largest(frame, "sync/logprob_difference_max"),
    }


def num_steps_done(run: RunFolder) -> int:
    """Last RL step with recorded metrics."""
    return max((int(row["step"]) for row in run.metrics), default=0)


def seconds_per_action(findings: Findings) -> list[dict[str, Any]]:
    """Measured and predicted seconds of every timed action, in the order of the schedule.

    median_s: over its executions, without the first step. ratio: predicted over measured. share: of those steps'
    seconds; shares of overlapping actions may sum to more than 1.
    """
    run = findings.run
    measured = collect_durations(run.plan.schedule, run.trace.spans, run.timings)
    steps = findings.timings
    later = steps[steps["step"] > FIRST]
    total_s = (later if len(later) else steps)["step_s"].sum() if "step_s" in steps else 0.0
    rows = []
    for row in join_seconds(run.plan.schedule, run.plan.timing, measured):
        durations = measured[(row.part, row.action_id)]
        share = sum(durations) / total_s if row.part == "step" and total_s else None
        rows.append({**asdict(row), "phase": str(row.phase), "mean_s": sum(durations) / len(durations),
                     "ratio": row.ratio, "share": share})  # fmt: skip
    return rows


def _persistent_kinds(exactness: pd.DataFrame) -> list[dict[str, Any]]:
    rows = []
    for kind in dataframes.PERSISTENT:
        rows_of_kind = exactness[exactness["kind"] == kind]
        if len(rows_of_kind):
            off = (rows_of_kind["predicted_bytes"] - rows_of_kind["measured_bytes"]).abs().max()
            compared, exact = int(rows_of_kind["num_compared"].sum()), int(rows_of_kind["num_exact"].sum())
            rows.append(
                {
                    "kind": kind,
                    "is_exact": bool((rows_of_kind["num_compared"] > 0).all() and exact == compared),
                    "num_samples": compared,
                    "num_exact_samples": exact,
                    "worst_error_bytes": _integer(off),
                }
            )
    return rows


def _packed_weights(joined: pd.DataFrame) -> dict[str, Any] | None:
    """The worst prediction of the engine's packed copies; None where nothing was packed."""
    samples = joined[(joined["kind"] == MemoryKind.PACKED_WEIGHTS) & (joined["measured_bytes"] > 0)]
    samples = samples[samples["error_fraction"].notna()]
    if samples.empty:
        return None
    worst = samples.loc[samples["error_fraction"].abs().idxmax()]
    return {
        "predicted_bytes": _integer(worst["predicted_bytes"]),
        "measured_bytes": _integer(worst["measured_bytes"]),
        "error_fraction": _number(worst["error_fraction"]),
        "is_within_tolerance": bool(abs(worst["error_fraction"]) <= dataframes.PACKED_TOLERANCE),
    }


def _peak(row: pd.Series) -> dict[str, Any]:
    """One process's peak as data."""
    texts = ("process", "device", "run_phase", "action_id", "measured_action_id")
    values: dict[str, Any] = {name: None if pd.isna(row[name]) else str(row[name]) for name in texts}
    values["measured_step"] = _integer(row["measured_step"])
    for name in row.index:
        if name.endswith("_bytes"):
            values[name] = _integer(row[name])
        elif name.endswith(("_fraction", "_share")):
            values[name] = _number(row[name])
    values["is_within_tolerance"] = dataframes.is_fine_peak(values["error_fraction"], 1.0)
    values["net_is_within_tolerance"] = dataframes.is_fine_peak(values["net_error_fraction"], values["modelled_share"])
    return values


def _host_peak(run: RunFolder) -> dict[str, Any]:
    """Peak of the whole host: the ledger's, and the largest sum of measured process peaks."""
    ledger, levels = run.plan.ledger, measured_levels(run)
    total = levels.total(levels.processes)
    return {
        "predicted_bytes": ledger.host_peak().num_bytes if ledger.rows else None,
        "measured_bytes": int(total.max()) if len(total) and total.max() > 0 else None,
        "capacity_bytes": ledger.host_capacity,
    }


def _largest(frame: pd.DataFrame, column: str) -> float | None:
    return _number(frame[column].max()) if column in frame else None


def _integer(value: Any) -> int | None:
    return None if pd.isna(value) else int(value)


def _number(value: Any) -> float | None:
    return float(value) if pd.notna(value) and math.isfinite(value) else None
