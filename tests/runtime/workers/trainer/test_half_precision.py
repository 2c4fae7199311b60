"""float16 with loss scaling on live DeepSpeed. Its gate for CPUs without fp16 units is held open: torch computes."""

from typing import Any

import pytest

from rlplan.runtime.measure.step_metrics import StepMetrics
from rlplan.vocabulary import Role
from tests.factories import make_job
from tests.repository.at_night import mark_nightly
from tests.runtime.workers.trainer.agreement import RATE, answer_with_one_rank, check_states, select_cases

CASES = {
    f"stage {stage}": {
        "training.zero_stage": stage,
        "training.dtype": "float16",
        "algorithm.importance": "none",  # the engine's log-probs are made up
        **RATE,
    }
    for stage in (0, 1, 2, 3)
}
EACH = mark_nightly(CASES, but=("stage 0", "stage 2", "stage 3"))
"""Stages 1 and 2 are one optimizer of DeepSpeed's; stage 0 is scaled by us."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Eight steps of one rank for each case, and one in float32."""
    cases = {
        name: ("scaled", overrides) for name, overrides in {**select_cases(CASES, request), "float32": RATE}.items()
    }
    return answer_with_one_rank(cases, tmp_path_factory.mktemp("rank"))


@pytest.mark.engine
@pytest.mark.parametrize("name", EACH)
def test_overflows_halve_the_scale_and_leave_the_step_out(answers: dict[str, Any], name: str) -> None:
    steps, scales = answers[name]["steps"], answers[name]["scales"]
    assert [step["is_skipped"] for step in steps] == [1.0, 1.0] + [0.0] * 6  # the first two are huge on purpose
    assert scales[1] < 65536  # the first overflow may be forgiven
    assert set(scales[1:]) == {scales[1]}


@pytest.mark.engine
@pytest.mark.parametrize("name", EACH)
def test_what_is_learned_and_its_norm_are_those_of_float32(answers: dict[str, Any], name: str) -> None:
    assert answers[name]["steps"][2]["grad_norm"] == pytest.approx(
        answers["float32"]["steps"][0]["grad_norm"], rel=0.01
    )
    assert answers[name]["losses"][2:] == pytest.approx(answers["float32"]["losses"][:6], abs=0.05)


@pytest.mark.engine
@pytest.mark.parametrize("name", EACH)
def test_states_are_predicted_to_the_byte(answers: dict[str, Any], name: str) -> None:
    check_states(CASES[name], [answers[name]])


def test_skipped_steps_are_counted_and_are_not_in_the_mean_norm() -> None:
    metrics = StepMetrics(make_job(**{"training.dtype": "float16"}))
    for norm, is_skipped in ((float("inf"), 1.0), (2.0, 0.0), (4.0, 0.0)):
        metrics.add_optimizer_step({"learning_rate": 1e-5, "grad_norm": norm, "is_skipped": is_skipped})
    assert [each["grad_norm"] for each in metrics.optimizer_steps[Role.POLICY]] == [2.0, 4.0]
    assert metrics.learning["policy/skipped_steps"] == 1.0
