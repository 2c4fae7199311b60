"""Logits: numbers worked by hand."""

import pytest

from rlplan.memory.model.logits import (
    ROWS_AT_ONCE,
    largest_micro_batch,
    logits_bytes,
    num_micro_batches,
    probability_slice_bytes,
)


def test_logits_are_fp32_for_at_most_128_response_tokens_and_every_word() -> None:
    assert ROWS_AT_ONCE == 128
    assert logits_bytes(3, 70) == 3 * 70 * 4 == 840
    assert logits_bytes(128, 70) == logits_bytes(10_000, 70) == 128 * 70 * 4
    assert logits_bytes(0, 70) == 0


def test_logits_of_16_bits_stand_beside_their_upcast() -> None:
    assert logits_bytes(3, 70, 2) == 3 * 70 * (4 + 2)


def test_the_exponentials_are_as_large_as_the_logits() -> None:
    assert probability_slice_bytes(3, 70) == 3 * 70 * 4 == 840
    assert probability_slice_bytes(128, 70) == probability_slice_bytes(10_000, 70) == 128 * 70 * 4


@pytest.mark.parametrize(
    ("num_tokens", "limit", "largest", "count"), [(8, 4, 4, 2), (9, 4, 4, 3), (3, 4, 3, 1), (1, 1, 1, 1), (8, 8, 8, 1)]
)
def test_a_share_is_cut_into_micro_batches(num_tokens: int, limit: int, largest: int, count: int) -> None:
    assert largest_micro_batch(num_tokens, limit) == largest
    assert num_micro_batches(num_tokens, limit) == count
