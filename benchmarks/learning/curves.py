"""Learning curves: each algorithm in three seeds, beside two controls that must not learn.

In: examples/algorithms/*.yaml. Out: reports/learning/: curves.json, curves.png and a page that says who passed, written
anew after every run. `python -m benchmarks.learning.curves [--algorithms grpo ppo] [--seeds 0 1 2] [--no-controls]
[--keep]`: runs of algorithms that are not asked for stay in the report as they are; --keep also takes runs that ended
well before and were of the same job. A run takes one to two minutes on two cores, all sixty of them an hour and a half.
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.learning.page import write_page
from benchmarks.learning.record import CURVES, EVERY, JOBS, SEEDS, Curve, add_curve, find_controls
from benchmarks.runs.timed_runs import ROOT, RUNS, read_run, run_job
from rlplan.errors import RlplanError
from rlplan.planner.plan import read_plan
from rlplan.planner.search import find_plan
from rlplan.spec.files.job_file import load_job


def main() -> int:
    """Run what is asked for; the report has everything that there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--no-controls", action="store_true")
    parser.add_argument("--keep", action="store_true")
    asked = parser.parse_args()
    cases: dict[str, tuple[str, ...]] = {f"seed {seed}": (f"seed={seed}",) for seed in asked.seeds}
    curves = []
    for name in asked.algorithms:
        controls = {} if asked.no_controls else find_controls(name)
        for case, overrides in (cases | controls).items():
            curves.append(_curve(name, case, overrides, asked.keep))
            add_curve(curves[-1], CURVES)
            write_page()
    return 0 if all(curve.has_passed for curve in curves) else 1


def run_or_keep(folder: str, job: Path, overrides: tuple[str, ...], keep: bool) -> tuple[float, ...]:
    """Greedy accuracy of a run in this folder; of the one that is there, where it may be kept and is of this job."""
    if keep and _matches_job(RUNS / folder, job, overrides):
        return read_run(folder, RUNS / folder).accuracy
    return run_job(folder, str(job.relative_to(ROOT)), *overrides).accuracy


def _curve(name: str, case: str, overrides: tuple[str, ...], keep: bool) -> Curve:
    folder = f"learning-{name}-{case.replace(' ', '-')}"
    accuracy = run_or_keep(folder, JOBS[name], (f"workload.evaluate_every={EVERY}", *overrides), keep)
    return Curve(name, case, EVERY, accuracy)


def _matches_job(folder: Path, job: Path, overrides: tuple[str, ...]) -> bool:
    status = folder / "status.json"
    if not status.exists() or json.loads(status.read_text("utf-8")).get("state") != "finished":
        return False
    try:
        return read_plan(folder / "plan.json").job == find_plan(load_job(job, overrides)).job
    except RlplanError:  # a plan of another version
        return False


if __name__ == "__main__":
    sys.exit(main())
