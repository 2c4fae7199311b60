"""Packing: nothing is lost, nothing overflows, every rank has as many passes; and close to the best there is."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from rlplan.runtime.learning.packing import balance_by_length, pack_best_fit, pack_shares

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 5), st.integers(50, 200))
def test_every_sequence_is_in_one_pass_of_one_rank_and_no_pass_is_too_full(
    lengths: list[int], num_ranks: int, limit: int
) -> None:
    shares = pack_shares(lengths, num_ranks, limit)
    assert sorted(index for packs in shares for pack in packs for index in pack) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in pack) <= limit for packs in shares for pack in packs)
    assert len(shares) == num_ranks
    assert len({len(packs) for packs in shares}) == 1


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_the_fullest_of_two_ranks_has_at_most_seven_sixths_of_the_best_cut(lengths: list[int]) -> None:
    best = min(
        max(sum(n for n, side in zip(lengths, sides, strict=True) if side == chosen) for chosen in (0, 1))
        for sides in product((0, 1), repeat=len(lengths))
    )
    fullest = max(sum(lengths[index] for index in share) for share in balance_by_length(lengths, 2))
    assert fullest <= (4 / 3 - 1 / 6) * best


@given(LENGTHS, st.integers(50, 200))
def test_passes_are_at_most_eleven_ninths_of_the_fewest(lengths: list[int], limit: int) -> None:
    fewest = -(-sum(lengths) // limit)
    num_packs = len(pack_best_fit(lengths, limit))
    assert fewest <= num_packs
    # no two passes would fit into one
    rooms = sorted(sum(lengths[index] for index in pack) for pack in pack_best_fit(lengths, limit))
    assert len(rooms) < 2 or rooms[0] + rooms[1] > limit


def test_a_sequence_that_is_too_long_has_a_pass_of_its_own() -> None:
    assert pack_best_fit([9, 3, 2], 6) == [[0], [2, 1]]
