"""The experience buffer: oldest first, never too old, on the disk where memory shall not hold it."""

import json
import random
from pathlib import Path

import pytest

from rlplan.errors import SpecError
from rlplan.runtime.rollout.buffer import BufferedGroup, ExperienceBuffer
from rlplan.runtime.rollout.experience import Completion, FinishedRequest, WeightSpan


def group(number: int, version: int = 0) -> BufferedGroup:
    random.seed(number)
    spans = (WeightSpan(version, 0, 1), WeightSpan(version + 1, 1, 2))
    completions = tuple(Completion((number, 7), (-random.random(), -1e-300), "stop", spans) for _ in range(2))
    return BufferedGroup(number, version, FinishedRequest(f"generate/{number}", completions))


def test_the_oldest_prompts_are_taken_first_whatever_the_order_they_come_in() -> None:
    buffer = ExperienceBuffer(max_staleness=0)
    for number in (4, 1, 3):
        buffer.add(group(number))
    assert [taken.number for taken in buffer.take(2)] == [1, 3]
    assert [taken.number for taken in buffer.take(2)] == [4]
    assert len(buffer) == 0


@pytest.mark.parametrize(("max_staleness", "late"), [(0, [1, 2]), (1, [1]), (2, [])])
def test_what_is_too_old_is_evicted_and_said(max_staleness: int, late: list[int]) -> None:
    buffer = ExperienceBuffer(max_staleness)
    for number, version in ((1, 3), (2, 4), (3, 5)):
        buffer.add(group(number, version))
    assert buffer.evict_late(5, num_per_version=100) == late
    assert buffer.num_evicted == len(late)


def test_what_memory_shall_not_hold_waits_on_the_disk_and_comes_back_as_it_was(tmp_path: Path) -> None:
    buffer = ExperienceBuffer(9, max_in_memory=1, folder=tmp_path)
    groups = [group(number) for number in (3, 1, 2)]
    for each in groups:
        buffer.add(each)
    assert (len(buffer), len(list(tmp_path.iterdir()))) == (3, 2)
    assert buffer.take(3) == sorted(groups, key=lambda each: each.number)
    assert list(tmp_path.iterdir()) == []


def test_evicting_and_closing_leave_nothing_on_the_disk(tmp_path: Path) -> None:
    buffer = ExperienceBuffer(0, max_in_memory=0, folder=tmp_path)
    buffer.add(group(1, version=0))
    buffer.add(group(2, version=5))
    assert buffer.evict_late(5, num_per_version=100) == [1]
    buffer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_buffer_leaves_no_room_for_what_is_under_way() -> None:
    buffer = ExperienceBuffer(0, capacity=3)
    buffer.add(group(1))
    assert [buffer.would_be_full(num_open) for num_open in (1, 2)] == [False, True]


def test_its_state_goes_through_json_bit_for_bit(tmp_path: Path) -> None:
    buffer, other = ExperienceBuffer(1, max_in_memory=1, folder=tmp_path), ExperienceBuffer(1)
    for number in (2, 0, 1):
        buffer.add(group(number))
    other.restore(json.loads(json.dumps(buffer.state())))
    assert other.take(3) == buffer.take(3)


def test_a_state_that_is_none_changes_nothing() -> None:
    buffer = ExperienceBuffer(0)
    buffer.add(group(1))
    with pytest.raises(ValueError, match="number"):
        buffer.restore({"schema_version": 1, "groups": [{"version": 1}]})
    assert buffer.take(1) == [group(1)]


def test_a_state_of_another_version_is_refused() -> None:
    with pytest.raises(SpecError, match="version 99"):
        ExperienceBuffer(0).restore({"schema_version": 99})
