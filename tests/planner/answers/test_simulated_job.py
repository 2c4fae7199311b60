"""A job's plan simulated: what async rollouts are worth, and that no rollout is older than allowed."""

from statistics import median

import pytest

from rlplan.planner.answers.simulated_plan import build_setting, simulate_plan
from rlplan.planner.search import find_plan
from rlplan.simulate.result import SimulationResult
from rlplan.spec.files.job_file import load_job
from tests.factories import EXAMPLES
from tests.repository.at_night import mark_nightly


def simulate_job(staleness: int, *overrides: str, seed: int = 1) -> SimulationResult:
    job = load_job(EXAMPLES / "maturity" / "5-async.yaml", [f"placement.max_staleness={staleness}", *overrides])
    return simulate_plan(find_plan(job), num_steps=12, seed=seed)


def test_running_ahead_is_worth_more_than_a_third_where_lengths_have_a_long_tail() -> None:
    together, once, twice = (simulate_job(staleness) for staleness in range(3))
    assert together.mean_step_s / once.mean_step_s > 1.33
    assert median(twice.step_s) <= median(once.step_s) * 1.001, "one more version ahead; the first step takes longer"


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("partial", ["true", "false"])
@pytest.mark.parametrize("seed", mark_nightly(range(4), but=1))
def test_no_rollout_is_older_than_allowed(staleness: int, partial: str, seed: int) -> None:
    tail = "workload.response_lengths={kind: lognormal, median: 10, sigma: 2.0}"
    result = simulate_job(staleness, f"placement.partial_rollouts={partial}", tail, seed=seed)
    assert max(result.rollout_staleness) <= staleness
    assert len(result.step_s) == 12


def test_a_synchronous_job_is_simulated_without_asynchrony() -> None:
    job = load_job(EXAMPLES / "quickstart.yaml")
    setting = build_setting(find_plan(job), 3)
    assert setting.asynchrony is None
    result = simulate_plan(find_plan(job), num_steps=3)
    assert set(result.token_staleness) == {0}
