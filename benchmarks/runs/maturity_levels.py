"""The five maturity levels side by side: one model, the same prompts and lengths, five ways to place them.

In: examples/maturity/*.yaml. Out: reports/runtime/maturity.md and .csv: seconds of a step and its parts, tokens/s,
memory, accuracy, and what was predicted. `python -m benchmarks.runs.maturity_levels [STEPS]`; eight minutes on two
cores.
"""

import sys
from pathlib import Path
from typing import Any

from benchmarks.runs.timed_runs import ROOT, run_job
from benchmarks.texts import format_table, read_texts, write_rows
from rlplan.planner.answers.simulated_plan import simulate_plan
from rlplan.planner.search import find_plan
from rlplan.spec.files.job_file import load_job
from rlplan.units import format_bytes

REPORTS = ROOT / "reports" / "runtime"
SWITCHES = ("stop_engine", "start_engine", "save_weights", "sync_weights")


def main() -> int:
    """Predict and run each level, then write the report."""
    num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    rows = [_measure(path, num_steps) for path in sorted((ROOT / "examples" / "maturity").glob("*.yaml"))]
    write_rows(REPORTS / "maturity.csv", rows)
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
    head = (
        *("level", "s a step", "predicted", "tokens/s", "waits for rollouts", "trains", "switches", "memory"),
        "accuracy",
    )
    cells = (
        "[{level}](../../examples/maturity/{level}.yaml)|{step_s:.2f}|{predicted_step_s:.2f}|{tokens_per_s:,.0f}"
        "|{waits_for_rollouts_s:.2f} s|{trains_s:.2f} s|{switches_s:.2f} s|{memory}"
        "|{accuracy_before:.1%} to {accuracy_after:.1%}"
    )
    filled = (cells.format(**row, memory=format_bytes(row["memory_bytes"])).split("|") for row in rows)
    return read_texts(__file__)["page"].format(num_steps=num_steps, table=format_table(head, filled))


if __name__ == "__main__":
    sys.exit(main())
