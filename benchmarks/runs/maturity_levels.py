"""The five maturity levels side by side: one model, the same prompts and lengths, five ways to place them.

In: examples/maturity/*.yaml. Out: reports/runtime/maturity.md and .csv: seconds of a step and its parts, tokens/s,
memory, accuracy, and what was predicted. `python -m benchmarks.runs.maturity_levels [STEPS]`; eight minutes on two
cores.
"""

import csv
import sys
from pathlib import Path
from typing import Any

from benchmarks.runs.timed_runs import ROOT, run_job
from rlplan.planner.answers.simulated_plan import simulate_plan
from rlplan.planner.search import find_plan
from rlplan.spec.files.job_file import load_job
from rlplan.units import format_bytes

REPORTS = ROOT / "reports" / "runtime"
SWITCHES = ("stop_engine", "start_engine", "save_weights", "sync_weights")
INTRODUCTION = (
    "One policy of 0.8 M parameters, {num_steps} steps of 128 rollouts whose lengths are log-normal (median 30, sigma "
    "0.9, at most 240 tokens), two cores. The first two steps and evaluation do not count. Memory is the sum over all "
    "processes at the end of a step. Seconds were predicted by the simulator before the runs."
)


def main() -> int:
    """Predict and run each level, then write the report."""
    num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    rows = [_measure(path, num_steps) for path in sorted((ROOT / "examples" / "maturity").glob("*.yaml"))]
    REPORTS.mkdir(parents=True, exist_ok=True)
    with (REPORTS / "maturity.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    (REPORTS / "maturity.md").write_text(_page(rows, num_steps), encoding="utf-8")
    return 0


def _measure(path: Path, num_steps: int) -> dict[str, Any]:
    overrides = (f"workload.num_steps={num_steps}", f"workload.evaluate_every={num_steps}")
    plan = find_plan(load_job(path, overrides))
    predicted_s = simulate_plan(plan, num_steps=num_steps, seed=1).mean_step_s
    run = run_job(f"maturity-{path.stem}", str(path.relative_to(ROOT)), *overrides)
    return {
        "level": path.stem,
        "step_s": round(run.mean_step_s, 4),
        "predicted_step_s": round(predicted_s, 4),
        "tokens_per_s": round(run.tokens / run.mean_step_s, 1),
        "waits_for_rollouts_s": round(run.parts.get("generate", run.parts.get("take_rollouts", 0.0)), 4),
        "trains_s": round(run.parts["train_forward_backward"] + run.parts["optimizer_step"], 4),
        "switches_s": round(sum(run.parts.get(name, 0.0) for name in SWITCHES), 4),
        "memory_bytes": run.peak_bytes,
        "predicted_peak_bytes": plan.ledger.host_peak().num_bytes,
        "accuracy_before": run.accuracy[0],
        "accuracy_after": run.accuracy[-1],
    }


def _page(rows: list[dict[str, Any]], num_steps: int) -> str:
    lines = [
        "# Five maturity levels",
        "",
        INTRODUCTION.format(num_steps=num_steps),
        "",
        "| level | s a step | predicted | tokens/s | waits for rollouts | trains | switches | memory | accuracy |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| [{row['level']}](../../examples/maturity/{row['level']}.yaml) | {row['step_s']:.2f} "
            f"| {row['predicted_step_s']:.2f} | {row['tokens_per_s']:,.0f} | {row['waits_for_rollouts_s']:.2f} s "
            f"| {row['trains_s']:.2f} s | {row['switches_s']:.2f} s | {format_bytes(row['memory_bytes'])} "
            f"| {row['accuracy_before']:.1%} to {row['accuracy_after']:.1%} |"
        )
    return "\n".join([*lines, "", "`python -m benchmarks.runs.maturity_levels` makes it anew.", ""])


if __name__ == "__main__":
    sys.exit(main())
