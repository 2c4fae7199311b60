"""Early stopping and the best checkpoint: by a metric, with patience, and the same for a run that was interrupted."""

from typing import Any

import pytest

from rlplan.errors import SpecError
from rlplan.runtime.checkpoints.manifest import RunState
from rlplan.runtime.driver.best import BestSoFar
from tests.factories import job_data, make_job

ACCURACY = "evaluate/greedy_accuracy"
VALUES = [0.2, 0.5, 0.4, 0.51, 0.52, 0.5, 0.9]
"""Metric at the start and at each evaluation after it."""


def watching(**early: Any) -> BestSoFar:
    return BestSoFar(make_job(early_stopping={"metric": ACCURACY, **early}))


def find_stop(best: BestSoFar, values: list[float], first: int = 0) -> int | None:
    """The first step that ends the run."""
    return next((step for step, value in enumerate(values, first) if best.observe(step, {ACCURACY: value})), None)


@pytest.mark.parametrize(
    ("early", "step"),
    [
        ({"patience": 1}, 2),
        ({"patience": 2}, None),
        ({"patience": 2, "min_delta": 0.05}, 3),
        ({"patience": 4, "min_delta": 0.05}, 5),
        ({"patience": 5, "min_delta": 0.05}, None),
        ({"patience": 1, "mode": "min"}, 1),
    ],
)
def test_a_run_stops_after_so_many_values_that_are_no_better(early: dict[str, Any], step: int | None) -> None:
    assert find_stop(watching(**early), VALUES) == step


def test_why_is_said_with_both_numbers() -> None:
    best = watching(patience=2, min_delta=0.05)
    assert find_stop(best, VALUES) == 3
    assert best.explain_stop() == (
        f"{ACCURACY} is no better by more than 0.05 than at step 1 (0.5), 2 times in a row (early_stopping.patience=2)"
    )


def test_steps_without_the_metric_count_for_nothing() -> None:
    best = watching(patience=1)
    assert [best.observe(step, {"reward/mean": 0.0}) for step in range(5)] == [""] * 5


@pytest.mark.parametrize("interrupted", range(1, 5))
def test_a_resumed_run_stops_where_the_whole_one_does(interrupted: int) -> None:
    before = watching(patience=4, min_delta=0.05)
    assert find_stop(before, VALUES[: interrupted + 1]) is None
    saved = RunState(step=interrupted, version=1, early_stopping=before.early, best_checkpoint=before.kept)
    resumed = BestSoFar(before.job, RunState.model_validate_json(saved.model_dump_json()))
    assert find_stop(resumed, VALUES[interrupted + 1 :], interrupted + 1) == 5
    assert BestSoFar(before.job, saved.model_copy(update={"early_stopping": resumed.early})).explain_stop()


def test_the_best_checkpoint_is_of_a_step_that_has_one() -> None:
    job = make_job(checkpoints={"every": 2, "best_metric": "reward/mean"})
    best = BestSoFar(job)
    for step, value in enumerate([0.9, 0.8, 0.5, 0.7, 0.6, 0.9, 0.1]):
        best.observe(step, {"reward/mean": value})
    assert best.kept is not None
    assert (best.kept.step, best.kept.value) == (4, 0.6)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"early_stopping": {"metric": "evaluate/greedy_acuracy"}}, "Did you mean 'evaluate/greedy_accuracy'"),
        ({"early_stopping": {"metric": ACCURACY, "patience": 0}}, "greater than or equal to 1"),
        ({"early_stopping": {"patience": 2}}, "required key 'metric' is missing"),
        ({"checkpoints": {"best_metric": ACCURACY}}, "checkpoints.every is 0"),
        ({"checkpoints": {"best_metric": ACCURACY, "every": 3}}, "must be a multiple of checkpoints.every = 3"),
    ],
)
def test_what_cannot_be_watched_is_refused(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make_job(**parts)


def test_the_watched_metric_is_that_of_the_held_out_set_and_its_samples() -> None:
    data = {**job_data()["data"], "heldout": {"near": "n.jsonl", "far": "f.jsonl"}}
    sampled = {"workload.num_evaluation_samples": 4, "workload.evaluation_temperature": 1.0}
    make_job(data=data, early_stopping={"metric": "evaluate/far/accuracy/pass@4"}, **sampled)
    with pytest.raises(SpecError, match="the job's metrics to watch are evaluate/near/accuracy/avg@4"):
        make_job(data=data, early_stopping={"metric": ACCURACY}, **sampled)
