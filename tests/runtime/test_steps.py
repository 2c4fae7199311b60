"""The runner without a crew: the order of prompts, and the check that the engine holds the weights of the trainer."""

import pytest

from rlplan.errors import RunError
from rlplan.runtime.requests import order_of
from rlplan.runtime.steps import LOGPROB_TOLERANCE, _check_agreement, _contiguous


def test_stale_weights_fail_the_run_by_name_and_rounding_does_not() -> None:
    _check_agreement(2e-5, LOGPROB_TOLERANCE[4], 3)
    with pytest.raises(RunError, match=r"differ by 0\.5 in the log-prob") as caught:
        _check_agreement(0.5, LOGPROB_TOLERANCE[2], 3)
    assert "step 3" in caught.value.where
    assert LOGPROB_TOLERANCE[4] == 1e-3


def test_each_epoch_sees_every_prompt_once_in_an_order_of_its_own() -> None:
    first, second, other_seed = order_of(0, 0, 50), order_of(0, 1, 50), order_of(1, 0, 50)
    assert sorted(first) == sorted(second) == sorted(other_seed) == list(range(50))
    assert len({tuple(order) for order in (first, second, other_seed)}) == 3
    assert order_of(0, 0, 50) == first


def test_rollouts_are_dealt_out_in_whole_and_in_order() -> None:
    shares = _contiguous(list(range(7)), 3)  # type: ignore[arg-type]
    assert shares == [[0, 1, 2], [3, 4, 5], [6]]
