"""Algorithms: each declaration is complete, and a job's choice of it is checked."""

import pytest

from rlplan.spec.parts.algorithm import ALGORITHMS, Algorithm
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
