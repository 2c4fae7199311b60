"""Where a run stands: generation that runs ahead comes back with each prompt still to be trained exactly once."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rlplan.dataflow.graph import Lead
from rlplan.errors import SpecError
from rlplan.runtime.checkpoints.finding import Resumption, find_checkpoint
from rlplan.runtime.checkpoints.manifest import EXPERIENCE, StreamState
from rlplan.runtime.checkpoints.run_state import check_order, give_state, take_state
from rlplan.runtime.experience import Completion, FinishedRequest, RolloutRequest, WeightSpan
from rlplan.runtime.fleet import ExpectedLengths
from rlplan.runtime.rollout_stream import RolloutStream, StreamWork
from tests.runtime.checkpoints.test_folder import save

WORK = StreamWork(num_prompts=2, num_steps=4, deadline_s=5.0)


def request_of(number: int) -> RolloutRequest:
    return RolloutRequest(f"generate/{number}", (number, 1), 1, 1.0, number, 4)


def finished(number: int) -> FinishedRequest:
    spans = (WeightSpan(1, 0, 1), WeightSpan(2, 1, 2))
    return FinishedRequest(f"generate/{number}", (Completion((3, number), (-0.1, float("-inf")), "stop", spans),))


class Asked:
    """What a stream asks an engine for; it answers nothing by itself. lengths, engines: those of a fleet of two."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.lengths, self.engines, self.processes = ExpectedLengths(), (("a",), ("b",)), ("a", "b")

    def submit(self, requests: Any, timeout_s: float) -> None:
        self.numbers += [request.seed for request in requests]


class Version:
    """The version of the weights that engines hold."""

    version = 3


def stream_of(asked: Asked, max_staleness: int = 1, work: StreamWork = WORK) -> RolloutStream:
    return RolloutStream(asked, request_of, Lead("generate", max_staleness, True), work)  # type: ignore[arg-type]


def ahead(tmp_path: Path, stream: StreamState) -> Resumption:
    """The checkpoint of step 1 of a run whose generation was so far ahead."""
    save(tmp_path, 1)
    found = find_checkpoint(tmp_path)
    (found.folder / EXPERIENCE).write_text(json.dumps([asdict(finished(number)) for number in stream.complete]))
    return Resumption(found.folder, found.manifest, found.state.model_copy(update={"stream": stream}))


def test_what_was_under_way_is_begun_anew_and_what_was_whole_is_kept(tmp_path: Path) -> None:
    asked = Asked()
    stream = stream_of(asked)
    stream._begin()
    stream._open = {"generate/1": (1, 0), "generate/3": (3, 0)}
    stream._complete = {2: finished(2)}  # 0 was trained
    asked.lengths.learn(request_of(0), finished(0))
    state, experience = take_state(1, Version(), asked, stream)  # type: ignore[arg-type]
    assert state.stream == StreamState(num_begun=4, again=(1, 3), complete=(2,))

    save(tmp_path, 1)
    found = find_checkpoint(tmp_path)
    (found.folder / EXPERIENCE).write_text(json.dumps(experience))
    anew = Asked()
    resumed, version = stream_of(anew), Version()
    said = give_state(Resumption(found.folder, found.manifest, state), version, anew, resumed)  # type: ignore[arg-type]
    assert said == "2 prompt(s) that were under way are begun anew, 1 finished one(s) kept"
    assert anew.lengths.by_prompt() == asked.lengths.by_prompt()
    assert resumed.state() == (state.stream, [finished(2)])
    resumed._begin()
    assert anew.numbers == [1, 3, 4, 5], "what is allowed under version 1 with a staleness of 1: prompts 0 to 5"
    assert resumed.take(1) == [(2, finished(2))]


def test_a_run_of_whole_steps_goes_on_running_ahead_behind_them(tmp_path: Path) -> None:
    save(tmp_path, 2)
    asked = Asked()
    stream = stream_of(asked)
    assert give_state(find_checkpoint(tmp_path), Version(), asked, stream) == ""  # type: ignore[arg-type]
    stream._begin()
    assert asked.numbers == [4, 5, 6, 7]


def test_steps_that_generate_for_themselves_go_on_behind_a_run_ahead_that_trained_its_prompts_in_order(
    tmp_path: Path,
) -> None:
    in_order = ahead(tmp_path, StreamState(num_begun=5, again=(3, 2), complete=(4,)))
    check_order(in_order, 2)
    said = give_state(in_order, Version(), Asked(), None)  # type: ignore[arg-type]
    assert said == "3 prompt(s) that generation was ahead are begun anew"


@pytest.mark.parametrize("untaken", [(0, 3), (0, 2, 4)], ids=["one left behind", "and another one not begun in order"])
def test_steps_that_generate_for_themselves_would_skip_prompts_of_a_run_ahead_and_are_refused(
    untaken: tuple[int, ...], tmp_path: Path
) -> None:
    """Step 1 trained two prompts of which one is not prompt 0: step 2 would train it again and never see prompt 0."""
    with pytest.raises(SpecError, match="trained its prompts out of order: prompt 0 is still to be trained"):
        check_order(ahead(tmp_path, StreamState(num_begun=2 + len(untaken), again=untaken)), 2)


def test_finished_rollouts_that_would_become_older_than_a_lower_bound_allows_are_begun_anew(tmp_path: Path) -> None:
    """Prompt n's turn is under version n // 2 at the latest; its first token is of version 1."""
    found = ahead(tmp_path, StreamState(num_begun=8, again=(3,), complete=(2, 5, 6)))
    resumed = stream_of(Asked(), max_staleness=1)
    said = give_state(found, Version(), Asked(), resumed)  # type: ignore[arg-type]
    assert resumed.state()[0] == StreamState(num_begun=8, again=(3, 6), complete=(2, 5))
    assert said == "2 prompt(s) that were under way are begun anew, 2 finished one(s) kept"


def test_generation_ends_where_a_resumed_run_has_fewer_steps_than_were_begun(tmp_path: Path) -> None:
    resumed = stream_of(Asked(), work=StreamWork(num_prompts=2, num_steps=2, deadline_s=5.0))
    give_state(ahead(tmp_path, StreamState(num_begun=6, complete=(2, 3))), Version(), Asked(), resumed)  # type: ignore[arg-type]
    resumed.run()
    assert [number for number, _ in resumed.take(2)] == [2, 3]
