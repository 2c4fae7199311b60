"""The step graph: what a GRPO step consists of and what must come before what."""

import pytest

from rlplan.dataflow.build import build_step_graph
from rlplan.dataflow.schedule import Call
from rlplan.vocabulary import ActionKind, Phase, Role
from tests.factories import make_job


def calls_by_id(calls: tuple[Call, ...]) -> dict[str, Call]:
    assert len({call.id for call in calls}) == len(calls)
    return {call.id: call for call in calls}


def ancestors(calls: tuple[Call, ...], name: str) -> set[str]:
    by_id = calls_by_id(calls)
    earlier: set[str] = set()
    pending = list(by_id[name].after)
    while pending:
        before = pending.pop()
        earlier.add(before)
        pending += by_id[before].after
    return earlier


JOBS = {
    "one mini-batch": make_job(),
    "four mini-batches": make_job(**{"workload.mini_batch_size": 4}),
    "three epochs": make_job(**{"workload.mini_batch_size": 8, "workload.num_epochs_per_step": 3}),
    "no reference": make_job(**{"algorithm.kl_coef": 0}),
    "one step": make_job(**{"workload.num_steps": 1}),
}
jobs = pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)


@jobs
def test_nothing_stands_before_what_it_needs(job) -> None:
    graph = build_step_graph(job)
    for calls in (graph.start, graph.step, graph.finish):
        seen: set[str] = set()
        for call in calls:
            assert set(call.after) <= seen, f"{call.id} needs {call.after}, only {seen} came before"
            assert call.id not in seen
            seen.add(call.id)


@jobs
def test_weights_travel_after_the_last_optimizer_step_and_before_the_evaluation(job) -> None:
    step = build_step_graph(job).step
    optimizer_steps = {call.id for call in step if call.kind is ActionKind.OPTIMIZER_STEP}
    assert len(optimizer_steps) == job.workload.num_mini_batches
    assert optimizer_steps <= ancestors(step, "sync_weights")
    assert "sync_weights" in ancestors(step, "evaluate")


def test_scoring_and_verifying_run_side_by_side_after_generating() -> None:
    step = build_step_graph(make_job()).step
    assert calls_by_id(step)["verify"].after == calls_by_id(step)["score/reference"].after == ("generate",)
    assert "verify" not in ancestors(step, "score/reference")
    assert set(calls_by_id(step)["compute_advantages"].after) == {"verify", "score/reference"}


def test_without_a_reference_nothing_is_scored_and_no_scorer_starts() -> None:
    graph = build_step_graph(JOBS["no reference"])
    kinds = {call.kind for call in (*graph.start, *graph.step)}
    assert not kinds & {ActionKind.SCORE, ActionKind.START_SCORER}
    assert calls_by_id(graph.step)["compute_advantages"].after == ("verify",)


def test_mini_batches_follow_one_another_each_with_its_own_optimizer_step() -> None:
    step = calls_by_id(build_step_graph(JOBS["four mini-batches"]).step)
    assert step["train_forward_backward/0"].after == ("compute_advantages",)
    for index in range(4):
        assert step[f"optimizer_step/{index}"].after == (f"train_forward_backward/{index}",)
        assert step[f"optimizer_step/{index}"].mini_batch == index
    for index in range(1, 4):
        assert step[f"train_forward_backward/{index}"].after == (f"optimizer_step/{index - 1}",)


def test_a_single_mini_batch_needs_no_number_in_its_name() -> None:
    assert "train_forward_backward" in calls_by_id(build_step_graph(JOBS["one mini-batch"]).step)


@jobs
def test_every_process_is_up_before_the_first_weights_travel(job) -> None:
    start = build_step_graph(job).start
    starts = {call.id for call in start if call.phase is Phase.START}
    assert starts == ancestors(start, "sync_weights")
    assert all(not call.after for call in start if call.phase is Phase.START)
    assert "sync_weights" in ancestors(start, "evaluate")


def test_the_start_policy_and_the_trained_one_are_evaluated_and_the_trained_one_is_kept() -> None:
    graph = build_step_graph(make_job())
    assert "evaluate" in calls_by_id(graph.start)
    assert [(call.id, call.kind, call.role) for call in graph.finish] == [
        ("evaluate", ActionKind.EVALUATE, Role.POLICY),
        ("checkpoint", ActionKind.CHECKPOINT, Role.POLICY),
    ]


def test_the_evaluation_comes_as_often_as_the_job_says() -> None:
    step = calls_by_id(build_step_graph(make_job(**{"workload.evaluate_every": 7})).step)
    assert step["evaluate"].every == 7
    assert {call.every for call in step.values() if call.id != "evaluate"} == {1}


def test_a_trained_role_is_saved_after_its_last_optimizer_step_and_before_its_weights_travel() -> None:
    assert not [call for call in build_step_graph(make_job()).step if call.id.startswith("save_states")]
    job = make_job(**{"checkpoints.every": 5, "algorithm": {"name": "ppo"}, "workload.mini_batch_size": 8})
    step = calls_by_id(build_step_graph(job).step)
    assert step["save_states/value"].after == ("optimizer_step/value/1",)
    assert step["save_states"].after == ("optimizer_step/1",)
    assert {"optimizer_step/1", "save_states", "save_states/value"} <= set(step["sync_weights"].after)
    assert {step[name].every for name in ("save_states", "save_states/value")} == {5}
    assert {step[name].kind for name in ("save_states", "save_states/value")} == {ActionKind.SAVE_STATES}
    waiting = make_job(**{"checkpoints.every": 1, "checkpoints.writes": "waiting"})
    assert calls_by_id(build_step_graph(waiting).step)["save_states"].kind is ActionKind.WRITE_STATES
