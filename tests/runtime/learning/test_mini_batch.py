"""Mini-batches of a step that is trained on in several epochs."""

from typing import cast

import pytest

from rlplan.runtime.learning.mini_batch import select_mini_batch
from rlplan.runtime.rollout.experience import Rollout
from tests.factories import make_job

JOB = make_job(**{"workload.mini_batch_size": 4, "workload.num_epochs_per_step": 3})
STEP = cast(list[Rollout], list(range(16)))  # only their order matters


def collect_epoch(index: int, step: int = 1, job=JOB) -> list[Rollout]:
    return [each for place in range(4) for each in select_mini_batch(STEP, 4 * index + place, job, step)]


def test_every_epoch_trains_on_every_rollout_once_in_mini_batches_of_one_size() -> None:
    assert JOB.workload.num_mini_batches == 12
    for epoch in range(3):
        assert sorted(collect_epoch(epoch)) == STEP
    assert all(len(select_mini_batch(STEP, index, JOB, 1)) == 4 for index in range(12))


def test_the_first_epoch_is_in_order_and_later_ones_are_dealt_anew_from_the_seed() -> None:
    assert collect_epoch(0) == STEP
    assert collect_epoch(1) == collect_epoch(1)
    other = JOB.model_copy(update={"seed": JOB.seed + 1})
    orders = [STEP, collect_epoch(1), collect_epoch(2), collect_epoch(1, step=2), collect_epoch(1, job=other)]
    assert all(orders.count(order) == 1 for order in orders)


def test_pairs_stay_together_when_they_are_dealt_anew() -> None:
    job = make_job(
        algorithm={"name": "online_dpo", "kl_coef": 0.1},
        **{"workload.mini_batch_size": 8, "workload.num_epochs_per_step": 2, "workload.micro_batch_size_per_gpu": 8},
    )
    second = select_mini_batch(STEP, 2, job, 1)
    assert len(second) == 8
    for start in (0, 4):
        group = cast(list[int], second[start : start + 4])
        assert group[0] % 4 == 0
        assert group == list(range(group[0], group[0] + 4))


@pytest.mark.parametrize("index", range(4))
def test_one_epoch_is_cut_in_order_as_ever(index: int) -> None:
    job = make_job(**{"workload.mini_batch_size": 4})
    assert select_mini_batch(STEP, index, job, 9) == STEP[4 * index : 4 * index + 4]
