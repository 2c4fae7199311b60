"""Logits: numbers worked by hand."""

import pytest

from rlplan.memory.logits import (
    ROWS_AT_ONCE,
    largest_micro_batch,
    logits_bytes,
    num_micro_batches,
    probability_slice_bytes,
)


def test_logits_are_fp32_for_every_response_token_and_word() -> None:
    assert logits_bytes(3, 70) == 3 * 70 * 4 == 840
    assert logits_bytes(0, 70) == 0


def test_the_entropy_holds_three_slices_of_at_most_256_rows() -> None:
    assert ROWS_AT_ONCE == 256
    assert probability_slice_bytes(3, 70) == 3 * 3 * 70 * 4 == 2520
    assert probability_slice_bytes(256, 70) == probability_slice_bytes(10_000, 70) == 3 * 256 * 70 * 4


@pytest.mark.parametrize(
    ("num_rollouts", "size", "largest", "count"), [(8, 4, 4, 2), (9, 4, 4, 3), (3, 4, 3, 1), (1, 1, 1, 1), (8, 8, 8, 1)]
)
def test_a_share_is_cut_into_micro_batches(num_rollouts: int, size: int, largest: int, count: int) -> None:
    assert largest_micro_batch(num_rollouts, size) == largest
    assert num_micro_batches(num_rollouts, size) == count
