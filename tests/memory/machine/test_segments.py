"""Torch's caching allocator, worked by hand from the rules of its source."""

from rlplan.memory.machine.segments import Segments
from rlplan.units import MIB


def reserved(segments: Segments) -> int:
    assert segments.reserved % MIB == 0
    return segments.reserved // MIB


def test_small_tensors_share_segments_of_two_mebibytes() -> None:
    segments = Segments()
    tensors = [segments.take(MIB), segments.take(1), segments.take(512)]
    assert segments.allocated == MIB + 2 * 512
    assert reserved(segments) == 2
    segments.take(MIB)  # 1 MiB less two blocks of 512 bytes are left there
    assert reserved(segments) == 4
    segments.give(*tensors)
    segments.take(MIB)
    assert reserved(segments) == 4


def test_tensors_below_ten_mebibytes_share_segments_of_twenty() -> None:
    segments = Segments()
    segments.take(8 * MIB)
    segments.take(8 * MIB)
    assert reserved(segments) == 20
    segments.take(8 * MIB)  # 4 are left
    assert reserved(segments) == 40


def test_a_large_tensor_has_a_segment_of_its_size_in_steps_of_two_mebibytes() -> None:
    segments = Segments()
    segments.take(255 * MIB)
    assert reserved(segments) == 256


def test_neighbours_join_when_they_are_given_back_and_other_segments_do_not() -> None:
    segments = Segments()
    halves = [segments.take(6 * MIB), segments.take(6 * MIB)]
    segments.give(*halves)
    segments.take(19 * MIB)
    assert reserved(segments) == 20
    segments.give(segments.take(100 * MIB), segments.take(100 * MIB))
    segments.take(200 * MIB)
    assert reserved(segments) == 20 + 100 + 100 + 200


def test_the_smallest_block_that_holds_a_tensor_is_taken() -> None:
    segments = Segments()
    segments.give(segments.take(100 * MIB), segments.take(50 * MIB))
    segments.take(40 * MIB)
    segments.take(100 * MIB)
    assert reserved(segments) == 150


def test_what_stays_in_a_tile_s_block_makes_the_next_tile_reserve_anew() -> None:
    segments = Segments()
    segments.give(segments.take(256 * MIB))
    moment = segments.take(2 * MIB)
    segments.give(segments.take(256 * MIB))
    assert reserved(segments) == 512
    segments.give(moment)
    segments.take(256 * MIB)
    segments.take(256 * MIB)
    assert reserved(segments) == 512


def test_of_two_equal_blocks_the_one_at_the_lower_address_is_broken_into() -> None:
    for goes_down, is_first in ((False, True), (True, False)):
        segments = Segments(goes_down=goes_down)
        first, second = segments.take(30 * MIB), segments.take(30 * MIB)
        segments.give(first, second)
        assert (segments.take(20 * MIB) is first) is is_first


def test_the_largest_sum_of_tensors_in_use_is_kept() -> None:
    segments = Segments()
    segments.give(segments.take(30 * MIB))
    segments.take(12 * MIB)
    assert segments.allocated == 12 * MIB
    assert segments.peak_allocated == 30 * MIB
