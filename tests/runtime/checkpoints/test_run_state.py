"""Where a run stands: generation that runs ahead comes back with each prompt still to be trained exactly once."""

import json
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from rlplan.dataflow.schedule import AsyncRollouts
from rlplan.errors import SpecError
from rlplan.runtime.checkpoints.finding import Resumption, find_checkpoint
from rlplan.runtime.checkpoints.manifest import EXPERIENCE, StreamState
from rlplan.runtime.checkpoints.run_state import check_order, restore_state, take_state
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.rollout.buffer import BufferedGroup, ExperienceBuffer
from rlplan.runtime.rollout.experience import Completion, FinishedRequest, RolloutRequest, WeightSpan
from rlplan.runtime.rollout.fleet import ExpectedLengths
from rlplan.runtime.rollout.rollout_stream import RolloutStream, StreamSettings
from tests.runtime.checkpoints.test_folder import save

WORK = StreamSettings(num_prompts=2, num_steps=4, deadline_s=scale_seconds(5.0))


def request_of(number: int) -> RolloutRequest:
    return RolloutRequest(f"generate/{number}", (number, 1), 1, 1.0, number, 4)


def finished(number: int) -> FinishedRequest:
    spans = (WeightSpan(1, 0, 1), WeightSpan(2, 1, 2))
    return FinishedRequest(f"generate/{number}", (Completion((3, number), (-0.1, float("-inf")), "stop", spans),))


class Asked:
    """An engine that answers nothing by itself. lengths, engines: those of a fleet of two."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.lengths, self.engines, self.processes = ExpectedLengths(), (("a",), ("b",)), ("a", "b")

    def submit(self, requests: Any, timeout_s: float) -> None:
        self.numbers += [request.seed for request in requests]


class Version:
    """The version of the weights that engines hold."""

    version = 3


def stream_of(asked: Asked, max_staleness: int = 1, work: StreamSettings = WORK) -> RolloutStream:
    async_rollouts = AsyncRollouts("generate", max_staleness, interrupts=True)
    return RolloutStream(asked, request_of, async_rollouts, work, ExperienceBuffer(max_staleness))  # type: ignore[arg-type]


def ahead(tmp_path: Path, stream: StreamState, versions: dict[int, int]) -> Resumption:
    """The checkpoint of step 2 of a run whose generation was ahead. versions: of finished prompts, by number."""
    save(tmp_path, 2)
    result = find_checkpoint(tmp_path)
    buffer = ExperienceBuffer(9)
    for number, version in versions.items():
        buffer.add(BufferedGroup(number, version, finished(number)))
    (result.folder / EXPERIENCE).write_text(json.dumps(buffer.state()))
    more = {"stream": stream, "num_replaced": stream.num_replaced}
    return Resumption(result.folder, result.manifest, result.state.model_copy(update=more))


def test_what_was_under_way_is_begun_anew_and_what_was_whole_is_kept(tmp_path: Path) -> None:
    asked = Asked()
    stream = stream_of(asked)
    stream.replace(1)
    stream._submit_next()
    stream._open = {"generate/1": (1, 0), "generate/3": (3, 0)}
    stream.buffer.add(BufferedGroup(2, 0, finished(2)))  # 0 taught nothing, 4 was trained
    asked.lengths.learn(request_of(0), finished(0))
    state, experience = take_state(1, Version(), asked, stream)  # type: ignore[arg-type]
    assert state.stream == StreamState(num_begun=5, num_replaced=1, again=(1, 3))

    save(tmp_path, 1)
    result = find_checkpoint(tmp_path)
    (result.folder / EXPERIENCE).write_text(json.dumps(experience))
    anew = Asked()
    resumed, version = stream_of(anew), Version()
    message = restore_state(Resumption(result.folder, result.manifest, state), version, anew, resumed)  # type: ignore[arg-type]
    assert message == "2 prompt(s) that were in flight are generated again, 1 finished one(s) kept"
    assert anew.lengths.by_prompt == asked.lengths.by_prompt
    assert resumed.state() == (state.stream, experience)
    assert resumed.buffer.groups() == [BufferedGroup(2, 0, finished(2))], "as old as it was"
    resumed._submit_next()
    assert anew.numbers == [1, 3, 5, 6], "version 1, a staleness of 1: prompts 0 to 5, and one for the replaced"


@pytest.mark.parametrize("text", ["[]", "{}", '{"schema_version": 1, "groups": [{}]}', "nothing"])
def test_a_buffer_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    save(tmp_path, 1)
    result = find_checkpoint(tmp_path)
    (result.folder / EXPERIENCE).write_text(text)
    state = result.state.model_copy(update={"stream": StreamState(num_begun=4)})
    asked = Asked()
    with pytest.raises(SpecError, match="buffer"):
        restore_state(Resumption(result.folder, result.manifest, state), Version(), asked, stream_of(asked))  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_replaced", "next_ones"), [(0, [4, 5, 6, 7]), (3, [7, 8, 9, 10])])
def test_a_run_of_whole_steps_goes_on_running_ahead_behind_them(
    tmp_path: Path, num_replaced: int, next_ones: list[int]
) -> None:
    save(tmp_path, 2)
    result, asked = find_checkpoint(tmp_path), Asked()
    result = replace(result, state=result.state.model_copy(update={"num_replaced": num_replaced}))
    stream = stream_of(asked)
    assert restore_state(result, Version(), asked, stream) == ""  # type: ignore[arg-type]
    stream._submit_next()
    assert asked.numbers == next_ones


@pytest.mark.parametrize("num_replaced", [0, 3])
def test_steps_that_generate_for_themselves_go_on_behind_a_run_ahead_that_trained_its_prompts_in_order(
    num_replaced: int, tmp_path: Path
) -> None:
    first = 4 + num_replaced
    stream = StreamState(num_begun=first + 3, num_replaced=num_replaced, again=(first + 1, first))
    result = ahead(tmp_path, stream, {first + 2: 2})
    check_order(result, WORK.num_prompts)
    message = restore_state(result, Version(), Asked(), None)  # type: ignore[arg-type]
    assert message == "3 prompt(s) that were generated ahead are generated again"


@pytest.mark.parametrize("again", [(0, 5), (0, 4, 6)], ids=["one left behind", "others begun after it"])
def test_steps_that_generate_for_themselves_would_skip_prompts_of_a_run_ahead_and_are_refused(
    again: tuple[int, ...], tmp_path: Path
) -> None:
    """Two steps trained four prompts of which none is prompt 0: step 3 would train one again and never see prompt 0."""
    result = ahead(tmp_path, StreamState(num_begun=4 + len(again), again=again), {})
    with pytest.raises(SpecError, match=f"out of order: {len(again)} of .* are left, the first is prompt 0"):
        check_order(result, WORK.num_prompts)


def test_finished_rollouts_that_would_become_older_than_a_lower_bound_allows_are_begun_anew(tmp_path: Path) -> None:
    """Turns come in the order 3, 4 (under version 2), 5, 6 (3) and 7 (4)."""
    result = ahead(tmp_path, StreamState(num_begun=8, again=(3,)), {4: 1, 5: 1, 6: 2, 7: 2})
    for max_staleness, kept in ((2, [4, 5, 6, 7]), (1, [4, 6]), (0, [])):
        resumed = stream_of(Asked(), max_staleness)
        message = restore_state(result, Version(), Asked(), resumed)  # type: ignore[arg-type]
        assert [group.number for group in resumed.buffer.groups()] == kept
        begun_anew = sorted({3, 4, 5, 6, 7} - {*kept})
        assert resumed.state()[0].again == tuple(begun_anew)
        assert message.startswith(
            f"{len(begun_anew)} prompt(s) that were in flight are generated again, {len(kept)} finished"
        )


def test_generation_ends_where_a_resumed_run_has_fewer_steps_than_were_begun(tmp_path: Path) -> None:
    resumed = stream_of(Asked(), work=StreamSettings(num_prompts=2, num_steps=3, deadline_s=scale_seconds(5.0)))
    restore_state(ahead(tmp_path, StreamState(num_begun=7), {4: 2, 5: 2, 6: 2}), Version(), Asked(), resumed)  # type: ignore[arg-type]
    thread = Thread(target=resumed.run, daemon=True)
    thread.start()
    thread.join(scale_seconds(5))
    is_over = not thread.is_alive()
    resumed.close()
    assert is_over
