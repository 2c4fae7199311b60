"""Placements that switch or overlap, on real runs of three steps: time sharing, async rollouts, what is freed."""

import json

import pytest

from tests.runtime.conftest import FinishedRun
from tests.runtime.runs.beside_the_plan import process_peaks
from tests.runtime.runs.test_runs import ROUNDING

pytestmark = pytest.mark.engine


def test_an_engine_that_was_started_anew_has_the_trainers_weights(colocated_run: FinishedRun) -> None:
    assert colocated_run.exit_code == 0, colocated_run.stderr
    differences = [row["sync/logprob_difference_max"] for row in colocated_run.metrics if row["step"] > 0]
    assert len(differences) == 3
    assert max(differences) < ROUNDING
    assert len(list((colocated_run.folder / "weights").iterdir())) == 1, "weights that nobody needs were removed"


def test_a_stopped_engine_gives_back_what_the_plan_says(colocated_run: FinishedRun) -> None:
    rows = [row for row in colocated_run.plan.ledger.rows if row.run_phase == "steady"]
    planned = {
        name: sum(row.resident_bytes for row in rows if (row.action_id, row.process) == (name, "rollout_engine/0"))
        for name in ("generate", "stop_engine")
    }
    measured = {
        (sample.step, sample.action_id): sample.num_bytes
        for sample in colocated_run.trace.samples
        if (sample.process, sample.kind, sample.statistic) == ("rollout_engine/0", "total", "resident")
    }
    for step in (2, 3):
        freed = measured[(step, "generate")] - measured[(step, "stop_engine")]
        assert freed >= 0.9 * (planned["generate"] - planned["stop_engine"])


def test_a_whole_cycle_was_rehearsed_before_the_first_step(colocated_run: FinishedRun) -> None:
    preflight = json.loads((colocated_run.folder / "preflight.json").read_text())
    assert not preflight["not_rehearsed"]
    assert {one["process"] for one in preflight["rehearsed"]} == {
        *(process for process in process_peaks(colocated_run) if "trainer" in process or "engine" in process)
    }
    for one in preflight["rehearsed"]:
        assert -0.02 < one["predicted_bytes"] / one["measured_bytes"] - 1 < 0.15, one


def test_rollouts_are_at_most_as_old_as_allowed_and_survive_new_weights(async_run: FinishedRun) -> None:
    assert async_run.exit_code == 0, async_run.stderr
    trained = [row for row in async_run.metrics if row["step"] > 0]
    assert [row["step"] for row in trained] == [1, 2, 3]
    assert max(row["staleness/max"] for row in trained) == 1
    assert trained[0]["staleness/max"] == 0
    assert max(row["staleness/partial_fraction"] for row in trained) > 0


def test_the_next_step_s_generation_does_not_wait_for_training(async_run: FinishedRun) -> None:
    """How long they overlap depends on the speed of judging: a generation may end while its step's training waits."""
    spans = {(span.action_id, span.step): span for span in async_run.trace.spans if span.process != "driver/0"}
    training, generating = spans[("train_forward_backward", 1)], spans[("generate", 2)]
    assert generating.start_s < training.end_s


def test_drawn_lengths_never_take_more_than_the_longest_that_was_planned_for(async_run: FinishedRun) -> None:
    for process, (predicted, measured) in process_peaks(async_run).items():
        assert measured <= predicted, (process, predicted, measured)
