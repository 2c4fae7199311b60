"""Learning rates: as transformers' schedulers have them, and the same for a run that begins in the middle."""

from typing import Any

import pytest
import torch

from rlplan.runtime.workers.trainer.learning_rates import LearningRates
from tests.factories import make_job

NUM_STEPS = 20
COSINE = {"lr_scheduler_type": "cosine", "min_lr_ratio": 0.1}
SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {},
    "warm-up alone": {"lr_warmup_steps": 3},
    "linear": {"lr_scheduler_type": "linear", "lr_warmup_ratio": 0.1},
    "cosine": {"lr_scheduler_type": "cosine"},
    "cosine to a minimum": {**COSINE, "lr_warmup_steps": 5},
    "shorter than the run": {**COSINE, "lr_decay_steps": 12},
}
schedules = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


def make_rates(schedule: dict[str, Any]) -> LearningRates:
    return LearningRates(make_job(algorithm=schedule, **{"workload.num_steps": NUM_STEPS}), 2e-5)


@schedules
def test_behind_the_warm_up_rates_are_those_of_transformers(schedule: dict[str, Any]) -> None:
    from transformers import get_scheduler

    rates = make_rates(schedule)
    warmup, end = rates.job.algorithm.schedule_steps(NUM_STEPS)
    kind, more = rates.job.algorithm.lr_scheduler_type, {}
    if kind == "cosine":
        kind, more = "cosine_with_min_lr", {"min_lr_rate": rates.job.algorithm.min_lr_ratio}
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=2e-5)
    theirs = get_scheduler(kind, optimizer, warmup, end, scheduler_specific_kwargs=more).lr_lambdas[0]
    for step in range(warmup + 1, NUM_STEPS + 1):
        assert rates.find_rate(step) == pytest.approx(2e-5 * theirs(min(step - 1, end)), rel=1e-9), step


def test_a_warm_up_rises_evenly_and_wastes_no_step_on_a_rate_of_0() -> None:
    rates = make_rates({"lr_warmup_steps": 3})
    assert [rates.find_rate(step) / 2e-5 for step in (1, 2, 3, 4, 5)] == pytest.approx([0.25, 0.5, 0.75, 1, 1])


@schedules
def test_a_resumed_run_has_the_same_rates_bit_for_bit(schedule: dict[str, Any]) -> None:
    rates = make_rates(schedule)
    whole = [rates.find_rate(step) for step in range(1, NUM_STEPS + 1)]
    for first in (1, 4, 13):
        resumed = make_rates(schedule)
        assert [resumed.find_rate(step) for step in range(first, NUM_STEPS + 1)] == whole[first - 1 :]
    assert [rates.find_rate(step) for step in (2, 2, 1)] == [whole[1], whole[1], whole[0]]


def test_a_constant_rate_is_the_job_s_own() -> None:
    assert {make_rates({}).find_rate(step) for step in range(1, NUM_STEPS)} == {2e-5}
