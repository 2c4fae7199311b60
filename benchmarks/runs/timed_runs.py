"""Runs of jobs, one after the other, and what their folders say of seconds and accuracy.

In: a job file with overrides. Out: a TimedRun. For benchmarks that lay several jobs side by side.
"""

import json
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "runs" / "benchmarks"
NUM_WARM_UP_STEPS = 2
"""First steps that do not count: Adam's states and oneDNN's kernels are made then."""


@dataclass(frozen=True)
class TimedRun:
    """One run. step_s: of every step but the first ones, evaluation taken off; parts: medians of its actions' seconds.

    tokens: of a step, in the mean. staleness: (mean, largest) age of trained tokens in versions.
    """

    name: str
    folder: Path
    step_s: tuple[float, ...]
    parts: dict[str, float]
    accuracy: tuple[float, ...]
    tokens: float
    peak_bytes: int
    staleness: tuple[float, float]

    @property
    def mean_step_s(self) -> float:
        """Seconds of a step, in the mean."""
        return statistics.fmean(self.step_s)


def run_job(name: str, job: str, *overrides: str) -> TimedRun:
    """Run a job in a folder of its own, and read it. Raises: CalledProcessError."""
    return read_run(name, start_job(name, job, *overrides))


def start_job(name: str, job: str, *overrides: str) -> Path:
    """Run a job in a folder of its own, which may have stages. Raises: CalledProcessError."""
    folder = RUNS / name
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "rlplan_cli", "run", job, *overrides, "--out", str(folder)]
    print(f"--- {name}", flush=True)
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder


def read_run(name: str, folder: Path) -> TimedRun:
    """The times in a run folder."""
    timings, metrics = _rows(folder / "timings.jsonl"), _rows(folder / "metrics.jsonl")
    counted = [row for row in timings if row["step"] > NUM_WARM_UP_STEPS]
    names = sorted({key for row in counted for key in row if key.startswith("seconds/")})
    trained = [row for row in metrics if row["step"] > NUM_WARM_UP_STEPS]
    tokens = [row["throughput/tokens_per_sec"] * row["step_s"] for row in counted]
    return TimedRun(
        name=name,
        folder=folder,
        step_s=tuple(row["step_s"] - row.get("seconds/evaluate", 0.0) for row in counted),
        parts={key.removeprefix("seconds/"): _median(row[key] for row in counted if key in row) for key in names},
        accuracy=tuple(row["evaluate/greedy_accuracy"] for row in metrics if "evaluate/greedy_accuracy" in row),
        tokens=statistics.fmean(tokens),
        peak_bytes=max(row["memory/host_total_bytes"] for row in timings),
        staleness=(
            statistics.fmean(row.get("staleness/mean", 0.0) for row in trained),
            max(row.get("staleness/max", 0.0) for row in trained),
        ),
    )


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def _median(values: Any) -> float:
    return float(statistics.median(values))
