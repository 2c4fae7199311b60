"""The n-th prompt: by weight, in epochs, by difficulty, and independent of who asks and in which order."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplan.runtime.data.mixing import Mixture, Share, compute_quotas

ONE = [Share("", 50)]
TWO = [Share("easy", 6, 3.0), Share("hard", 4, 1.0)]


def list_rows(mixture: Mixture, epoch: int) -> list[int]:
    return [mixture.find_row(epoch * mixture.num_rows + index) for index in range(mixture.num_rows)]


def test_each_epoch_sees_every_prompt_once_in_an_order_of_its_own() -> None:
    first, second, other = list_rows(Mixture(ONE, 0), 0), list_rows(Mixture(ONE, 0), 1), list_rows(Mixture(ONE, 1), 0)
    assert sorted(first) == sorted(second) == sorted(other) == list(range(50))
    assert len({tuple(order) for order in (first, second, other)}) == 3


def test_data_sets_are_mixed_by_weight_and_a_small_one_comes_again() -> None:
    mixture = Mixture(TWO, 0)
    assert mixture.quotas == [8, 2]
    for epoch in range(4):
        assert Counter(row < 6 for row in list_rows(mixture, epoch)) == {True: 8, False: 2}
    seen = Counter(mixture.find_row(number) for number in range(30))  # 24 of six easy rows, 6 of four hard ones
    assert {seen[row] for row in range(6)} == {4}
    assert {seen[row] for row in range(6, 10)} == {1, 2}


@given(st.lists(st.tuples(st.integers(1, 30), st.floats(0.01, 100)), min_size=1, max_size=4), st.integers(0, 300))
def test_a_number_is_answered_alike_whatever_was_asked_before(sets: list[tuple[int, float]], number: int) -> None:
    shares = [Share(str(index), count, weight) for index, (count, weight) in enumerate(sets)]
    total = sum(count for count, _ in sets)
    assert sum(compute_quotas(shares)) == total
    resumed, whole = Mixture(shares, 7), Mixture(shares, 7)
    for before in range(0, number, 17):
        whole.find_row(before)
    assert resumed.find_row(number) == whole.find_row(number)
    assert 0 <= resumed.find_row(number) < total


def test_without_shuffling_rows_come_as_they_stand_and_data_sets_evenly_spread() -> None:
    assert list_rows(Mixture(ONE, 0, shuffles=False), 1) == list(range(50))
    assert list_rows(Mixture([Share("a", 4), Share("b", 4)], 0, shuffles=False), 0) == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize("shuffles", [True, False])
def test_a_curriculum_goes_from_easy_to_hard_in_every_epoch(shuffles: bool) -> None:
    difficulties = [3.0, 1.0, 2.0, 1.0, 3.0, 1.0]
    mixture = Mixture([Share("", 6)], 0, shuffles=shuffles, difficulties=difficulties)
    for epoch in range(3):
        order = list_rows(mixture, epoch)
        assert [difficulties[row] for row in order] == sorted(difficulties)
        assert sorted(order) == list(range(6))
    assert shuffles or list_rows(mixture, 0) == [1, 3, 5, 2, 0, 4]
