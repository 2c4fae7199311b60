"""Whole runs that learn from stale rollouts in bf16, beside runs with fresh ones.

Stale rollouts teach as well as fresh ones if held-out scores differ no more than seeds of the fresh run do. The scores
are the last one and the area under the curve, both as means over the seeds.
"""

from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from statistics import fmean, stdev

import pytest

from benchmarks.learning.record import RESOLUTION, SEEDS
from tests.runtime.conftest import FinishedRun, Runner

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

STALENESS = 4
FRESH = ("placement.placement=disaggregated", "algorithm.kl_coef=0", "preflight.rehearses=false")
"""fp32, where engine and trainer agree to 1e-6, and rollouts of the policy itself."""
STALE = (*FRESH, f"placement.max_staleness={STALENESS}", "training.dtype=bfloat16", "rollout.dtype=bfloat16")
STUDENT_T = 4.303
"""Two-sided 95 % quantile of Student's t with two degrees of freedom: those of three seeds."""


@dataclass(frozen=True)
class Task:
    """An example that is learned from, and the score of its held-out prompts."""

    score: str
    num_steps: int
    learning_rate: float
    """So small that a policy four steps ago is near that of today, as in training of larger policies."""

    @property
    def overrides(self) -> tuple[str, ...]:
        steps = (f"workload.num_steps={self.num_steps}", "workload.evaluate_every=4")
        return (*steps, f"algorithm.learning_rate={self.learning_rate}", "workload.num_heldout_prompts=256")


TASKS = {
    "quickstart": Task("evaluate/greedy_accuracy", 28, 5e-5),
}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TASKS)
def test_rollouts_four_versions_old_in_bf16_teach_as_well_as_fresh_ones(run_job: Runner, name: str) -> None:
    task = TASKS[name]
    fresh, stale = ([run_seed(run_job, name, seed, side) for seed in SEEDS] for side in (FRESH, STALE))
    for run in stale:
        check_staleness(run)
    curves = {"fresh": [read_curve(run, task.score) for run in fresh]}
    curves["stale"] = [read_curve(run, task.score) for run in stale]
    print(name, *(f"\n{side} {[round(value, 3) for value in curve]}" for side in curves for curve in curves[side]))
    for figure in (take_last, compute_area):
        figures = {side: [figure(curve) for curve in curves[side]] for side in curves}
        apart, noise = abs(fmean(figures["stale"]) - fmean(figures["fresh"])), measure_noise(figures["fresh"])
        print(f"{name} {figure.__name__}: {figures}, {apart:.4f} apart, noise {noise:.4f}")
        assert apart <= noise, (figure.__name__, figures)
    start = curves["fresh"][0][0]
    assert min(take_last(curve) for side in curves.values() for curve in side) > start + 0.1


def run_seed(run_job: Runner, name: str, seed: int, side: tuple[str, ...]) -> FinishedRun:
    run = run_job(f"examples/{name}.yaml", *TASKS[name].overrides, *side, f"seed={seed}")
    assert run.exit_code == 0, run.stderr
    return run


def check_staleness(run: FinishedRun) -> None:
    """Rollouts are as old as they may be, and the default correction weighs them."""
    job = run.plan.job
    assert (job.training.dtype, job.rollout.dtype, job.algorithm.importance) == ("bfloat16", "bfloat16", "truncate")
    ages = [row["staleness/mean"] for row in run.metrics if row["step"] > STALENESS]
    print("age", [round(age, 2) for age in ages])
    assert max(row["staleness/max"] for row in run.metrics if row["step"] > 0) == STALENESS
    assert fmean(ages) > STALENESS - 1


def read_curve(run: FinishedRun, score: str) -> tuple[float, ...]:
    return tuple(row[score] for row in run.metrics if score in row)


def take_last(curve: tuple[float, ...]) -> float:
    return curve[-1]


def compute_area(curve: tuple[float, ...]) -> float:
    """Area under the curve, by trapezoids and per step: a mean score."""
    return fmean((left + right) / 2 for left, right in pairwise(curve))


def measure_noise(figures: list[float]) -> float:
    """How far the means of two sets of seeds may differ by chance; not below what the held-out prompts resolve."""
    return max(RESOLUTION, STUDENT_T * stdev(figures) * sqrt(2 / len(figures)))
