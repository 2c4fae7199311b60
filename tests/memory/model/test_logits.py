"""Logits: numbers worked by hand."""

import pytest

from rlplan.memory.model.logits import (
    ROWS_AT_ONCE,
    ROWS_ON_GPU,
    largest_micro_batch,
    num_micro_batches,
    rows_bytes,
)


def test_logits_are_fp32_for_at_most_so_many_rows_and_every_word_with_their_exponentials_as_large() -> None:
    assert (ROWS_AT_ONCE, ROWS_ON_GPU) == (128, 1024)
    assert rows_bytes(3, 70, 4, 128) == 2 * 3 * 70 * 4
    assert rows_bytes(3, 70, 4, 128, has_exponentials=False) == 3 * 70 * 4
    assert rows_bytes(128, 70, 4, 128) == rows_bytes(10_000, 70, 4, 128) == 2 * 128 * 70 * 4
    assert rows_bytes(0, 70, 4) == 0


def test_logits_of_16_bits_stand_beside_their_upcast() -> None:
    assert rows_bytes(3, 70, 2, has_exponentials=False) == 3 * 70 * (4 + 2)


@pytest.mark.parametrize(
    ("num_tokens", "limit", "largest", "count"), [(8, 4, 4, 2), (9, 4, 4, 3), (3, 4, 3, 1), (1, 1, 1, 1), (8, 8, 8, 1)]
)
def test_a_share_is_cut_into_micro_batches(num_tokens: int, limit: int, largest: int, count: int) -> None:
    assert largest_micro_batch(num_tokens, limit) == largest
    assert num_micro_batches(num_tokens, limit) == count
