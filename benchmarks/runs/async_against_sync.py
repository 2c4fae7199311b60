"""Asynchronous against synchronous on the same cores: one generates, one trains, lengths have a long tail.

In: examples/maturity/5-async.yaml, with staleness 0 too. Out: reports/runtime/async.md and .csv. What the simulator
says is printed before anything runs. `python -m benchmarks.runs.async_against_sync [STEPS]`; seven minutes on two
cores.
"""

import sys

from benchmarks.runs.timed_runs import ROOT, TimedRun, run_job
from benchmarks.texts import format_table, read_texts, write_rows
from rlplan.planner.answers.simulated_plan import simulate_plan
from rlplan.planner.search import find_plan
from rlplan.spec.files.job_file import load_job

JOB = "examples/maturity/5-async.yaml"
STALENESS = (0, 1, 2)
SEEDS = (0, 1)
REPORTS = ROOT / "reports" / "runtime"


def main() -> int:
    """Predict, run, write the report."""
    num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    predicted = {staleness: _predicted_step_s(staleness, num_steps) for staleness in STALENESS}
    for staleness, seconds in predicted.items():
        print(f"predicted, staleness {staleness}: {seconds:.3f} s a step", flush=True)
    runs = {
        (seed, staleness): run_job(f"staleness-{staleness}-seed-{seed}", JOB, *_overrides(staleness, num_steps, seed))
        for seed in SEEDS
        for staleness in STALENESS
    }
    _write(predicted, runs, num_steps)
    return 0


def _overrides(staleness: int, num_steps: int, seed: int) -> tuple[str, ...]:
    return (
        f"placement.max_staleness={staleness}",
        f"workload.num_steps={num_steps}",
        f"workload.evaluate_every={num_steps}",
        f"seed={seed}",
    )


def _predicted_step_s(staleness: int, num_steps: int) -> float:
    plan = find_plan(load_job(ROOT / JOB, _overrides(staleness, num_steps, 0)))
    return simulate_plan(plan, num_steps=num_steps, seed=1).mean_step_s


def _write(predicted: dict[int, float], runs: dict[tuple[int, int], TimedRun], num_steps: int) -> None:
    rows = []
    for (seed, staleness), run in runs.items():
        base = runs[(seed, 0)]
        rows.append(
            {
                "seed": seed,
                "max_staleness": staleness,
                "step_s": round(run.mean_step_s, 4),
                "predicted_step_s": round(predicted[staleness], 4),
                "speedup": round(base.mean_step_s / run.mean_step_s, 3),
                "predicted_speedup": round(predicted[0] / predicted[staleness], 3),
                "accuracy_before": run.accuracy[0],
                "accuracy_after": run.accuracy[-1],
                "staleness_mean": round(run.staleness[0], 3),
                "staleness_max": run.staleness[1],
            }
        )
    write_rows(REPORTS / "async.csv", rows)
    (REPORTS / "async.md").write_text(_page(rows, num_steps), encoding="utf-8")


def _page(rows: list[dict[str, float]], num_steps: int) -> str:
    head = (
        *("seed", "max. staleness", "s a step", "predicted", "speed-up", "predicted", "held-out accuracy"),
        "token age",
    )
    cells = (
        "{seed}|{max_staleness}|{step_s:.3f}|{predicted_step_s:.3f}|{speedup:.2f}|{predicted_speedup:.2f}"
        "|{accuracy_before:.1%} to {accuracy_after:.1%}|{staleness_mean:.2f}, at most {staleness_max:.0f}"
    )
    table = format_table(head, (cells.format(**row).split("|") for row in rows))
    return read_texts(__file__)["page"].format(num_steps=num_steps, table=table)


if __name__ == "__main__":
    sys.exit(main())
