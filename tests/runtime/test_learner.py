"""The learner without a crew: the check that the engine holds the trainer's weights, and who scores what."""

import math

import pytest

from rlplan.errors import RunError
from rlplan.runtime.learner import LOGPROB_TOLERANCE, _check_agreement, _check_finite, _contiguous


def test_stale_weights_fail_the_run_by_name_and_rounding_does_not() -> None:
    _check_agreement(2e-5, LOGPROB_TOLERANCE[4], 3)
    with pytest.raises(RunError, match=r"differ by 0\.5 in the log-prob") as caught:
        _check_agreement(0.5, LOGPROB_TOLERANCE[2], 3)
    assert "step 3" in caught.value.where
    assert LOGPROB_TOLERANCE[4] == 1e-3


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_difference_a_loss_or_a_gradient_that_is_no_number_ends_the_run(value: float) -> None:
    _check_finite([0.5, -3.0], 3)
    with pytest.raises(RunError, match=f"the loss or its gradient is {value}"):
        _check_finite([0.5, value], 3)
    with pytest.raises(RunError, match="differ by"):
        _check_agreement(value, LOGPROB_TOLERANCE[4], 3)


def test_rollouts_are_dealt_out_in_whole_and_in_order() -> None:
    shares = _contiguous(list(range(7)), 3)  # type: ignore[arg-type]
    assert shares == [[0, 1, 2], [3, 4, 5], [6]]
