"""RunFolder: the files of a run, read once and as data only.

In: a folder with plan.json and the files that the run wrote so far. Out: a frozen RunFolder, or a SpecError.
Left out: any judgement about the run. A killed run with a truncated last line is as readable as a finished one.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rlplan.containment import measure_budget, read_contained
from rlplan.dataflow.schedule import Schedule
from rlplan.errors import SpecError
from rlplan.memory.ledger import MemoryLedger
from rlplan.planner.answers.measured_step import MeasuredStep
from rlplan.planner.plan import Plan, read_run_plan
from rlplan.reading import MAX_RUN_BYTES, check_numbers, read_number, read_records, read_text
from rlplan.timing.measured import collect_durations, join_seconds
from rlplan.trace import Trace
from rlplan.vocabulary import Phase

# at least one folder and a last part; neither a URL nor a relative path
_ABSOLUTE_PATH = re.compile(r"(?<![\w.:/~-])/(?:[^\s/'\":,;()<>]+/)+([^\s/'\":,;()<>]*)")


@dataclass(frozen=True)
class RunStatus:
    """How a run ended."""

    state: str
    """`finished`, `interrupted`, `failed`, `running`, or `unknown` when it was not recorded."""
    exit_code: int | None = None
    """Exit code of `rlplan run`; None before its end."""
    message: str = ""
    """Free text of the run, without absolute paths."""
    started_at: str = ""
    """Start time as the run wrote it."""
    seconds: float | None = None
    """Wall-clock seconds; None before its end."""


@dataclass(frozen=True)
class RunFolder:
    """One run."""

    name: str
    """The folder's own name, never its path."""
    plan: Plan
    """The plan with its predictions."""
    trace: Trace
    """Measurements: spans of actions and samples of memory."""
    metrics: tuple[dict[str, Any], ...]
    """Learning metrics: rows as written, one per step."""
    timings: tuple[dict[str, Any], ...]
    """Durations: rows as written, one per step."""
    status: RunStatus
    """Outcome of the run."""

    @property
    def ledger(self) -> MemoryLedger:
        """Predicted memory of each process."""
        return self.plan.ledger

    @property
    def schedule(self) -> Schedule:
        """The plan's actions."""
        return self.plan.schedule

    @property
    def measured_step(self) -> MeasuredStep:
        """Medians of the measured steps, without the first one where there are others."""
        plan = self.plan
        always = {action.action_id for action in plan.timing.step.actions} if plan.timing else set()
        seconds = collect_durations(self.schedule, self.trace.spans, self.timings)
        phases: dict[Phase, float] = {}
        for row in join_seconds(self.schedule, plan.timing, seconds):
            if row.part == "step" and row.action_id in always:
                phases[row.phase] = phases.get(row.phase, 0.0) + row.median_s
        names = {
            "mean_response_len": "response_len/mean",
            "longest_response_len": "response_len/max",
            "cut_share": "response_len/truncated_fraction",
        }
        lengths = {name: _usual(self.metrics, metric) for name, metric in names.items()}
        return MeasuredStep(
            stack="rlplan",
            num_steps=sum(1 for row in self.timings if row["step"] >= 1),
            step_s=_usual(self.timings, "step_s"),
            phases=phases,
            lengths={name: value for name, value in lengths.items() if value is not None},
        )

    @property
    def is_control(self) -> bool:
        """Whether the run is a control experiment, which must not learn or must show an error."""
        job = self.plan.job
        return bool(
            job.algorithm.learning_rate == 0
            or job.controls.shuffle_rewards
            or job.controls.skip_sync_after_step is not None
        )

    @property
    def label(self) -> str:
        """Label that distinguishes the run from similar ones: its control, or else its seed."""
        job = self.plan.job
        if job.controls.shuffle_rewards:
            return "shuffled rewards"
        if job.algorithm.learning_rate == 0:
            return "learning rate 0"
        if job.controls.skip_sync_after_step is not None:
            return "skipped sync"
        return f"seed {job.seed}"


def read_run_folder(folder: Path) -> RunFolder:
    """Read a run folder in a limited process. Raises: SpecError for another folder, or when a file in it is damaged."""
    budget = measure_budget(*(folder / name for name in ("plan.json", "trace.jsonl", "metrics.jsonl", "timings.jsonl")))
    return read_contained(lambda: _read_files(folder), folder, RunFolder, budget)


def _read_files(folder: Path) -> RunFolder:
    plan, trace = read_run_plan(folder), folder / "trace.jsonl"
    return RunFolder(
        name=folder.resolve().name,
        plan=plan,
        trace=Trace.read(trace) if trace.exists() else Trace(origin="measured"),
        metrics=_read_rows(folder / "metrics.jsonl"),
        timings=_read_rows(folder / "timings.jsonl"),
        status=_read_status(folder / "status.json"),
    )


def unique_labels(runs: tuple[RunFolder, ...]) -> tuple[str, ...]:
    """Make one label per run; where two would be equal, the folder's name is added.

    With runs of several jobs, the job's name is added as well.
    """
    labels = [run.label for run in runs]
    if len({run.plan.job.name for run in runs}) > 1:
        labels = [f"{run.plan.job.name}, {label}" for run, label in zip(runs, labels, strict=True)]
    return tuple(
        f"{label} ({run.name})" if labels.count(label) > 1 else label for run, label in zip(runs, labels, strict=True)
    )


def shorten_paths(text: str) -> str:
    """Shorten each absolute path in a text to its last part.

    >>> shorten_paths("lost '/srv/me/runs/7/plan.json' at 9 tokens/s")
    "lost '…/plan.json' at 9 tokens/s"
    """
    return _ABSOLUTE_PATH.sub(r"…/\1", text)


def _usual(rows: tuple[dict[str, Any], ...], key: str) -> float | None:
    """Median over steps, without the first one where there are others; None where it was not recorded."""
    values = [float(row[key]) for row in rows if row["step"] >= 1 and row.get(key) is not None]
    return median(values[1:] or values) if values else None


def _read_rows(path: Path) -> tuple[dict[str, Any], ...]:
    """Read rows of a JSONL file; a truncated last line is skipped, a missing file is empty. Raises: SpecError."""
    if not path.exists():
        return ()
    return tuple(read_records(path, path.name, check_numbers, limit=MAX_RUN_BYTES))


def _read_status(path: Path) -> RunStatus:
    """Read the status; a killed run has none, or a truncated one."""
    try:
        row = json.loads(read_text(path, "the status"))
        return RunStatus(
            state=str(row["state"]),
            exit_code=None if row.get("exit_code") is None else int(read_number(row["exit_code"])),
            message=shorten_paths(str(row.get("message") or "")),
            started_at=str(row.get("started_at") or ""),
            seconds=None if row.get("seconds") is None else read_number(row["seconds"]),
        )
    except (SpecError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return RunStatus("unknown")
