"""Training with bitsandbytes on a CPU: a base in 4 bits beside adapters, and Adam's moments in 8 bits."""

from typing import Any

import pytest

from rlplan.errors import SpecError
from tests.factories import make_job
from tests.repository.at_night import mark_nightly
from tests.runtime.workers.trainer.agreement import answer_with_one_rank, check_states, select_cases

ADAPTERS = {"training.lora": {"rank": 4, "alpha": 8.0}, "algorithm.learning_rate": 1e-3}
QUANTISED = {
    "nf4, float32, stage 2": {"training.dtype": "float32", "training.zero_stage": 2},
    "nf4, float32, stage 0": {"training.dtype": "float32", "training.zero_stage": 0},
    "nf4, bfloat16, stage 1": {"training.dtype": "bfloat16", "training.zero_stage": 1},
}
EIGHT_BIT = {
    f"8 bits, {dtype}, stage {stage}": {"training.dtype": dtype, "training.zero_stage": stage}
    for dtype, stage in (("float32", 0), ("float32", 2), ("bfloat16", 1), ("bfloat16", 3))
}
WHOLE, EIGHT = "AdamW, float32", "8 bits, float32, stage 2"
OVERRIDES: dict[str, dict[str, Any]] = {
    **{name: {**ADAPTERS, "training.lora.base_dtype": "nf4", **case} for name, case in QUANTISED.items()},
    **{name: {"training.optimizer": "adamw_8bit", **case} for name, case in EIGHT_BIT.items()},
    WHOLE: {"training.zero_stage": 2},
}
BY_DAY = (
    *("nf4, float32, stage 2", "nf4, bfloat16, stage 1"),
    *("8 bits, float32, stage 2", "8 bits, bfloat16, stage 3"),
)
ROUNDING = {"float32": 1e-4, "bfloat16": 0.25}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Answers of one rank for each case."""
    wanted = select_cases(OVERRIDES, request) | {name: OVERRIDES[name] for name in (WHOLE, EIGHT)}
    cases = {name: ("adapted" if name in QUANTISED else "agree", more) for name, more in wanted.items()}
    return answer_with_one_rank(cases, tmp_path_factory.mktemp("rank"))


def distance(values: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(values, other, strict=True))


@pytest.mark.engine
@pytest.mark.parametrize("name", mark_nightly(QUANTISED, but=BY_DAY))
def test_adapters_learn_beside_a_base_in_four_bits_and_what_is_handed_over_says_the_same(
    answers: dict[str, Any], name: str
) -> None:
    answer = answers[name]
    assert answer["reference"] == answer["start"]  # to the bit: the base with its adapters off
    assert distance(answer["trained"], answer["start"]) > 0.01
    assert distance(answer["saved"], answer["trained"]) < ROUNDING[QUANTISED[name]["training.dtype"]]


@pytest.mark.engine
def test_moments_of_eight_bits_step_nearly_as_whole_ones(answers: dict[str, Any]) -> None:
    quantised, whole = answers[EIGHT], answers[WHOLE]
    assert quantised["norms"][0] == pytest.approx(whole["norms"][0], rel=1e-6)
    moved = distance(whole["logprobs"][1], whole["logprobs"][0])
    assert 0 < distance(quantised["logprobs"][1], whole["logprobs"][1]) < 0.05 * moved


@pytest.mark.engine
@pytest.mark.parametrize("name", mark_nightly((name for name in OVERRIDES if name != WHOLE), but=BY_DAY))
def test_states_are_predicted_to_the_byte(answers: dict[str, Any], name: str) -> None:
    check_states(OVERRIDES[name], [answers[name]])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"training.lora.base_dtype": "nf4"}, "training.lora.rank"),
        (
            {"training.lora.base_dtype": "nf4", "training.lora": {"rank": 4}, "training.zero_stage": 3},
            "zero_stage 0 to 2",
        ),
        ({"training.optimizer": "adamw_8bit", "training.offloads_optimizer": True}, "fp32 moments"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make_job(**overrides)
