"""The learner without a worker_group: numbers that are none, and who scores what."""

import math

import pytest

from rlplan.errors import RunError
from rlplan.runtime.learning.learner import _check_finite, _split_contiguously


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_or_a_gradient_that_is_no_number_ends_the_run(value: float) -> None:
    _check_finite([0.5, -3.0], 3)
    with pytest.raises(RunError, match=f"the loss or its gradient is {value}"):
        _check_finite([0.5, value], 3)


def test_rollouts_are_dealt_out_in_whole_and_in_order() -> None:
    shares = _split_contiguously(list(range(7)), 3)  # type: ignore[arg-type]
    assert shares == [[0, 1, 2], [3, 4, 5], [6]]
