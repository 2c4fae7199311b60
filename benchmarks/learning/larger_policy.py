"""The report of a policy of 62 M parameters that learns from random weights: its timeline, predicted and measured.

In: the run that `python -m benchmarks.learning.example_runs --examples from-random-weights` leaves. Out:
reports/from-random-weights: a page a stage, and README.md. `python -m benchmarks.learning.larger_policy [RUN]`.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.quickstart_evidence import photograph
from benchmarks.runs.timed_runs import ROOT, RUNS
from benchmarks.texts import read_texts
from rlplan.planner.plan import read_plan
from rlplan.units import format_bytes, format_seconds

EXAMPLE = "from-random-weights"
REPORT = ROOT / "reports" / EXAMPLE
STAGES = ("sft", "grpo")


def main() -> int:
    """A page a stage, and what they say as one table."""
    run = Path(sys.argv[1]) if len(sys.argv) > 1 else RUNS / f"learning-{EXAMPLE}-seed-0"
    shutil.rmtree(REPORT, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "rlplan_cli", "report", str(run), "--out", str(REPORT)], cwd=ROOT, check=True)
    photograph(REPORT / "grpo", {"memory.png": "Memory of the host over time"})
    (REPORT / "README.md").write_text(write_text(run), "utf-8")
    return 0


def write_text(run: Path) -> str:
    """Accuracy and duration of the two stages."""
    stages = {stage: json.loads((REPORT / stage / "report.json").read_text("utf-8")) for stage in STAGES}
    model = read_plan(run / "grpo" / "plan.json").job.load_model()
    whole = [_whole(run / stage, stage, report) for stage, report in stages.items()]
    actions = [_action(stage, row) for stage, report in stages.items() for row in report["seconds_per_action"]]
    return read_texts(__file__)["page"].format(
        num_parameters=f"{model.num_parameters / 1e6:.1f}",
        minutes=f"{sum(report['status']['seconds'] for report in stages.values()) / 60:.1f}",
        whole="\n".join(whole),
        actions="\n".join(actions),
    )


def _whole(folder: Path, stage: str, report: dict[str, Any]) -> str:
    """A row: steps, accuracy before and after, seconds and bytes of the whole stage."""
    plan = read_plan(folder / "plan.json")
    assert plan.timing is not None
    num_steps = plan.job.workload.num_steps
    (evaluation,) = [
        each for each in report["learning"][0]["evaluations"] if each["metric"] == "evaluate/greedy_accuracy"
    ]
    timings = [json.loads(line) for line in (folder / "timings.jsonl").read_text("utf-8").splitlines()]
    steps_s = sum(row["step_s"] for row in timings if row["step"] >= 1)
    peak = report["memory"]["host_peak"]
    cells = (
        f"[{stage}]({stage}/index.html)",
        str(num_steps),
        f"{evaluation['before']:.1%} to {evaluation['after']:.1%}",
        format_seconds(plan.timing.run_s(plan.schedule, num_steps)),
        f"{format_seconds(report['status']['seconds'])}, of which steps {format_seconds(steps_s)}",
        f"{format_bytes(peak['predicted_bytes'])} and {format_bytes(peak['measured_bytes'])}",
    )
    return f"| {' | '.join(cells)} |"


def _action(stage: str, row: dict[str, Any]) -> str:
    """A row: an action's seconds, predicted and measured."""
    predicted = "-" if row["predicted_s"] is None else f"{row['predicted_s']:.2f}"
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
    cells = (stage, row["part"], f"`{row['action_id']}`", predicted, f"{row['median_s']:.2f}", str(row["count"]), ratio)
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
