"""Deadlines follow the plan: what is predicted to be long may take long, unless the job says otherwise."""

from functools import cache

import pytest

from rlplan.planner.plan import Plan
from rlplan.planner.search import DEADLINE_FACTOR, find_best_plan
from rlplan.spec.files.job_file import load_job
from rlplan.spec.resolved import LEAST_SECONDS
from tests.factories import EXAMPLES, QUICKSTART


@cache
def make_plan(*overrides: str) -> Plan:
    return find_best_plan(load_job(EXAMPLES / "grpo-7b-8xh100.yaml", overrides))


LONG = ("workload.num_prompts_per_step=4096", "workload.mini_batch_size=32768")


def longest(plan: Plan, *, of_the_start: bool) -> float:
    assert plan.timing
    parts = (plan.timing.start, plan.timing.step, plan.timing.sometimes, plan.timing.finish)
    actions = [action for part in parts for action in part.actions]
    return max(action.cost.seconds for action in actions if action.action_id.startswith("start") is of_the_start)


def test_an_action_may_take_four_times_what_is_predicted() -> None:
    plan = make_plan(*LONG)
    limit_s, predicted_s = plan.job.limits.action_timeout_s, longest(plan, of_the_start=False)
    assert predicted_s > 600, "the old deadline would have ended it"
    assert predicted_s * DEADLINE_FACTOR <= limit_s < predicted_s * DEADLINE_FACTOR + 1


def test_loading_large_models_from_a_slow_disk_may_take_long() -> None:
    plan = find_best_plan(load_job(EXAMPLES / "ppo-70b-64xh100.yaml"))
    limit_s, predicted_s = plan.job.limits.start_timeout_s, longest(plan, of_the_start=True)
    assert limit_s >= max(300, predicted_s * DEADLINE_FACTOR)


def test_a_small_job_keeps_the_least_deadlines() -> None:
    limits = find_best_plan(load_job(QUICKSTART)).job.limits
    assert {key: getattr(limits, key) for key in LEAST_SECONDS} == LEAST_SECONDS


@pytest.mark.parametrize("key", LEAST_SECONDS)
def test_what_the_job_says_stays(key: str) -> None:
    plan = make_plan(*LONG, f"limits.{key}=17")
    assert getattr(plan.job.limits, key) == 17


def test_a_wait_for_async_rollouts_may_last_a_step_of_the_other_side() -> None:
    plan = make_plan(*LONG, "placement.placement=disaggregated", "placement.max_staleness=1")
    assert plan.schedule.async_rollouts is not None
    assert plan.job.limits.action_timeout_s >= plan.seconds * DEADLINE_FACTOR


def test_ranks_wait_for_each_other_as_long_as_the_longest_deadline() -> None:
    limits = make_plan(*LONG).job.limits
    assert limits.rank_timeout_s == limits.action_timeout_s > limits.start_timeout_s
