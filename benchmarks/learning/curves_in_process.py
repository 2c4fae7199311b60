"""The same curves in one process, without vLLM, DeepSpeed and Ray: whether it is the algorithm that learns.

In: examples/algorithms/*.yaml. Out: reports/learning/in_process.json and the page, written anew after every run.
`python -m benchmarks.learning.curves_in_process [--algorithms grpo ppo] [--seeds 0 1 2] [--no-control]`: about a minute
a run on one core; what is not asked for stays as it is. At learning rate 0 nothing can move here: left out.
"""

import argparse
import sys

import torch

from benchmarks.learning.in_process import InProcess
from benchmarks.learning.page import write_page
from benchmarks.learning.record import (
    EVERY,
    IN_PROCESS,
    JOBS,
    LEARNING_RATE_0,
    SEEDS,
    Curve,
    add_curve,
    find_controls,
)
from rlplan.spec.files.job_file import load_job
from rlplan.spec.resolved import resolve_on_cpu


def main() -> int:
    """Run what is asked for, on one core."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--no-control", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    cases: dict[str, tuple[str, ...]] = {f"seed {seed}": (f"seed={seed}",) for seed in asked.seeds}
    curves = []
    for name in asked.algorithms:
        controls = {} if asked.no_control else find_controls(name)
        for case, overrides in (cases | controls).items():
            curve = run(name, case, overrides)
            print(name, case, *(f"{accuracy:.1%}" for accuracy in curve.accuracy), flush=True)
            curves.append(curve)
            add_curve(curve, IN_PROCESS)
            write_page()
    return 0 if all(curve.has_passed for curve in curves) else 1


def run(name: str, case: str, overrides: tuple[str, ...]) -> Curve:
    """A job's own number of steps; a few at learning rate 0, where one step is as all of them."""
    job = resolve_on_cpu(load_job(JOBS[name], overrides))
    num_steps = EVERY if case == LEARNING_RATE_0 else job.workload.num_steps
    trained = InProcess(job)
    accuracy = [trained.accuracy()]
    accuracy += [trained.train(EVERY) for _ in range(num_steps // EVERY)]
    return Curve(name, case, EVERY, tuple(accuracy))


if __name__ == "__main__":
    sys.exit(main())
