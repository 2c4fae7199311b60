"""A synchronous plan's seconds beside its simulation: both spread rollouts over engines as the framework does.

The jobs are random. A simulation draws its own lengths and knows nothing of the plan's formulas.
"""

import random
from itertools import count, islice
from typing import Any

import pytest

from rlplan.planner.answers.simulated_plan import simulate_plan
from rlplan.planner.machine import open_search
from rlplan.planner.plan import Plan
from tests.factories import job_from
from tests.repository.at_night import mark_nightly

FRAMEWORKS = ("rlplan", "rlplan", "verl@0.9", "nemo-rl@0.7")
MODELS = ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-8B", "Qwen/Qwen2.5-32B")
NUM_JOBS = 60


def draw_job(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    model = draw.choice(MODELS)
    num_gpus = draw.choice((8, 16, 32, 64)) * (4 if "32B" in model else 1)
    longest = draw.choice((1024, 2048, 4096, 8192))
    mean = longest * draw.uniform(0.1, 0.5)
    lengths: dict[str, Any] = draw.choice(
        (
            {"kind": "constant", "value": int(mean)},
            {"kind": "lognormal", "median": 0.7 * mean, "sigma": draw.uniform(0.4, 1.1)},
            {"kind": "uniform", "low": 16, "high": int(1.6 * mean)},
        )
    )
    return {
        "policy": model,
        "algorithm": {"name": "grpo", "kl_coef": 0.0},
        "hardware": f"{num_gpus}x{draw.choice(('H100', 'H200', 'A100'))}",
        "framework": draw.choice(FRAMEWORKS),
        "workload": {
            "num_prompts_per_step": draw.choice((16, 32, 64, 100, 128)),
            "num_samples_per_prompt": draw.choice((4, 8, 16)),
            "max_prompt_len": draw.choice((256, 512, 2048)),
            "max_response_len": longest,
            "response_lengths": lengths,
        },
    }


def make_plan(data: dict[str, Any]) -> Plan:
    return open_search(job_from(data)).run(with_others=False, may_leave_idle=False)


def compare_seconds(data: dict[str, Any], num_steps: int = 40) -> float:
    """Planned over simulated seconds of a step."""
    plan = make_plan(data)
    return plan.seconds / simulate_plan(plan, num_steps=num_steps, seed=1).mean_step_s


@pytest.mark.parametrize("seed", range(4))
def test_a_synchronous_plan_lasts_as_long_as_its_simulation(seed: int) -> None:
    assert compare_seconds(draw_job(seed)) == pytest.approx(1, rel=0.05)


def has_rollout_for_each_gpu(data: dict[str, Any]) -> bool:
    """Whether every stack can train the job: verl refuses a batch that leaves data-parallel ranks without a rollout."""
    work = data["workload"]
    num_gpus = int(data["hardware"].partition("x")[0])
    return bool(work["num_prompts_per_step"] * work["num_samples_per_prompt"] >= num_gpus)


@pytest.mark.nightly
def test_nineteen_of_twenty_synchronous_plans_are_within_five_percent_of_their_simulation() -> None:
    jobs = islice(filter(has_rollout_for_each_gpu, map(draw_job, count(100))), NUM_JOBS)
    ratios = [compare_seconds(data, 60) for data in jobs]
    assert sum(abs(ratio - 1) <= 0.05 for ratio in ratios) >= 0.95 * NUM_JOBS


@pytest.mark.parametrize("framework", mark_nightly(["rlplan", "verl@0.9"], but=1))
def test_few_prompts_on_many_engines_are_planned_as_they_are_simulated(framework: str) -> None:
    workload = {"num_prompts_per_step": 64, "num_samples_per_prompt": 8, "max_response_len": 4096}
    lengths = {"response_lengths": {"kind": "lognormal", "median": 900, "sigma": 0.9}}
    data = {"policy": "Qwen/Qwen2.5-7B", "algorithm": {"name": "grpo", "kl_coef": 0.0}, "framework": framework}
    plan = data | {"hardware": "512xH100", "workload": workload | lengths, "rollout": {"tp": 1}}
    assert compare_seconds(plan) == pytest.approx(1, rel=0.05)


def test_only_frameworks_that_send_whole_groups_leave_engines_without_rollouts() -> None:
    work = {"num_prompts_per_step": 64, "num_samples_per_prompt": 8, "max_response_len": 512}
    jobs = [
        job_from({"policy": MODELS[0], "framework": name, "hardware": "128xH100", "workload": work})
        for name in ("rlplan", "nemo-rl@0.7", "verl@0.4", "verl@0.6")
    ]
    assert [job.count_busy_engines(128) for job in jobs] == [64, 128, 64, 128]
    assert [job.count_most_rollouts(128) for job in jobs] == [8, 4, 8, 4]


def test_a_simulation_has_the_interval_of_its_plan() -> None:
    data = draw_job(0)
    result = simulate_plan(make_plan(data), num_steps=2)
    assert result.interval_s is not None
    low, high = result.interval_s
    assert low < result.mean_step_s < high
    assert result.as_json()["interval_s"] == (low, high)
