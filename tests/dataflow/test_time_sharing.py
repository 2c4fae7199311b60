"""A colocated step: the engine goes before anybody else computes, and comes back with the new weights."""

import itertools

import pytest

from rlplan.dataflow.build import build_step_graph
from rlplan.dataflow.placements import TimeSharing, share_time
from rlplan.dataflow.schedule import Call, StepGraph
from rlplan.vocabulary import ActionKind, Role
from tests.factories import make_job

ALL = (Role.POLICY, Role.REFERENCE)


def share(sleeps: bool = False, offloaded: tuple[Role, ...] = (), **overrides: object) -> StepGraph:
    return share_time(build_step_graph(make_job(**overrides)), TimeSharing(sleeps, offloaded))


def test_a_stopped_engine_starts_again_from_the_saved_weights() -> None:
    assert [call.id for call in share().step] == [
        "generate",
        "stop_engine",
        "verify",
        "score/reference",
        "compute_advantages",
        "train_forward_backward",
        "optimizer_step",
        "save_weights",
        "start_engine",
        "evaluate",
    ]


def test_a_sleeping_engine_wakes_for_the_weights_first_and_for_its_cache_last() -> None:
    ids = [call.id for call in share(sleeps=True, offloaded=(Role.POLICY,)).step]
    order = ["sleep_engine", "reload_role/policy", "train_forward_backward", "wake_weights", "sync_weights"]
    assert [ids.index(name) for name in order] == sorted(ids.index(name) for name in order)
    assert ids[-3:] == ["offload_role/policy", "wake_kv_cache", "evaluate"]


def test_an_offloaded_role_is_there_only_while_it_works() -> None:
    ids = [call.id for call in share(offloaded=ALL).step]
    assert ids[ids.index("score/reference") - 1] == "reload_role/reference"
    assert ids[ids.index("score/reference") + 1] == "offload_role/reference"
    assert ids[ids.index("train_forward_backward") - 1] == "reload_role/policy"
    assert ids[ids.index("save_weights") + 1] == "offload_role/policy"


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("offloaded", [(), ALL])
def test_everything_is_one_chain_but_for_what_needs_no_device(sleeps: bool, offloaded: tuple[Role, ...]) -> None:
    for part in (share(sleeps, offloaded).step, share(sleeps, offloaded).finish):
        chain = [call for call in part if call.id != "verify"]
        for before, call in itertools.pairwise(chain):
            assert before.id in call.after
    beside = {call.id: call.after for call in share(sleeps, offloaded).step}
    assert beside["verify"] == ("generate",)
    assert "verify" in beside["compute_advantages"]


def test_an_offloaded_role_is_gone_before_the_next_one_comes_up() -> None:
    start = share(offloaded=ALL).start
    assert [call.id for call in start] == [
        "start_trainer",
        "offload_role/policy",
        "start_scorer/reference",
        "offload_role/reference",
        "start_engine",
        "evaluate",
    ]
    for before, call in itertools.pairwise(start):
        assert call.after == (before.id,)


def test_roles_that_stay_come_up_side_by_side_before_those_that_go() -> None:
    calls = {call.id: call.after for call in share(offloaded=(Role.REFERENCE,)).start}
    assert calls["start_trainer"] == ()
    assert calls["start_scorer/reference"] == ("start_trainer",)
    assert calls["start_engine"] == ("offload_role/reference",)
    both = {call.id: call.after for call in share().start}
    assert both["start_trainer"] == both["start_scorer/reference"] == ()
    assert both["start_engine"] == ("start_trainer", "start_scorer/reference")


def test_the_policy_is_written_without_the_engine() -> None:
    assert [call.id for call in share(offloaded=ALL).finish] == [
        "evaluate",
        "stop_engine",
        "reload_role/policy",
        "checkpoint",
    ]


def test_states_are_written_at_once_while_their_role_is_there() -> None:
    ids = [call.id for call in share(offloaded=(Role.POLICY,), **{"checkpoints.every": 5}).step]
    assert ids[ids.index("optimizer_step") : ids.index("start_engine")] == [
        "optimizer_step",
        "save_states",
        "save_weights",
        "offload_role/policy",
    ]
    kinds = {stages: find_saving(stages).kind for stages in (False, True)}
    assert kinds == {False: ActionKind.WRITE_STATES, True: ActionKind.SAVE_STATES}


def find_saving(stages: bool) -> Call:
    graph = build_step_graph(make_job(**{"checkpoints.every": 5}))
    return next(
        call for call in share_time(graph, TimeSharing(sleeps=False, stages=stages)).step if call.id == "save_states"
    )


def test_what_a_step_leaves_out_neither_blocks_an_action_nor_releases_one() -> None:
    calls = {call.id: call for call in share(**{"checkpoints.every": 5}).step}
    assert calls["save_weights"].after == ("optimizer_step", "save_states")
    assert calls["start_engine"].after == ("save_weights",)
