"""Algorithms: each declaration is complete, and a job's choice of it is checked."""

from typing import Any

import pytest

from rlplan.errors import SpecError
from rlplan.spec.parts.algorithm import ALGORITHMS, Algorithm, AlgorithmSpec
from rlplan.vocabulary import Role
from tests.factories import make_job


@pytest.mark.parametrize(("name", "algorithm"), ALGORITHMS.items())
def test_a_declaration_is_found_under_its_own_name_and_trains_something(name: str, algorithm: Algorithm) -> None:
    assert algorithm.name == name
    assert Role.POLICY in algorithm.trained_roles
    assert algorithm.min_samples_per_prompt >= 1
    assert all((algorithm.advantage, algorithm.loss, algorithm.source))


def test_grpo_is_what_its_paper_says() -> None:
    grpo = make_job().algorithm.declaration
    assert (grpo.advantage, grpo.loss, grpo.min_samples_per_prompt) == ("group_normalized", "clipped_ratio", 2)
    assert grpo.trained_roles == (Role.POLICY,)
    assert "2402.03300" in grpo.source


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"lr_warmup_steps": 2, "lr_warmup_ratio": 0.5}, "set the same value: give one"),
        ({"min_lr_ratio": 0.1}, "a constant schedule has no minimum"),
        ({"lr_decay_steps": 2}, "a constant learning rate does not decay"),
        ({"lr_warmup_steps": 4}, "lr_warmup_steps = 4 of a constant schedule of 3 steps"),
        ({"lr_scheduler_type": "linear", "lr_warmup_steps": 3}, "lr_warmup_steps = 3 of a linear schedule of 3 steps"),
        ({"lr_scheduler_type": "cosine", "lr_decay_steps": 4}, "longer than the run, workload.num_steps = 3"),
        ({"lr_scheduler_type": "linear", "lr_decay_steps": 2}, "the last 1 steps would learn nothing"),
    ],
)
def test_a_schedule_that_does_not_fit_the_run_is_refused(algorithm: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make_job(algorithm=algorithm)


def test_a_warm_up_is_given_in_steps_or_as_a_part_of_the_schedule() -> None:
    assert AlgorithmSpec(lr_warmup_steps=7).schedule_steps(200) == (7, 200)
    cosine = AlgorithmSpec(lr_scheduler_type="cosine", lr_warmup_ratio=0.1, lr_decay_steps=101, min_lr_ratio=0.2)
    assert cosine.schedule_steps(200) == (11, 101)
