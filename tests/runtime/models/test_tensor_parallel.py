"""DeepSpeed's AutoTP on live ranks: two ranks with a part of every layer each compute what one rank computes alone."""

from typing import Any

import pytest

from rlplan.errors import SpecError
from tests.factories import make_job
from tests.repository.at_night import mark_nightly
from tests.runtime.workers.trainer.agreement import alone_and_together, check_states, select_cases

CASES: dict[str, dict[str, Any]] = {
    f"stage {stage}, {dtype}": {"training.zero_stage": stage, "training.dtype": dtype}
    for stage, dtype in ((0, "float32"), (1, "float32"), (2, "float32"), (2, "bfloat16"))
} | {"recomputed": {"training.zero_stage": 2, "training.gradient_checkpointing": True}}
EACH = mark_nightly(CASES, but=("stage 0, float32", "stage 2, bfloat16", "recomputed"))
SHARED = {"training.tp": 2}
ROUNDING = {"float32": (1e-5, 1e-5), "bfloat16": (0.3, 0.03)}
"""Tolerances of a log-prob, and of a tensor's sum relative to it."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, tuple[Any, Any]]:
    """Results of each case: from one rank alone, and from two ranks that share every layer."""
    return alone_and_together(select_cases(CASES, request), SHARED, tmp_path_factory.mktemp("ranks"), is_fresh=True)


@pytest.mark.engine
@pytest.mark.parametrize("name", EACH)
def test_log_probs_norms_and_whole_weights_are_those_of_one_rank(
    results: dict[str, tuple[Any, Any]], name: str
) -> None:
    alone, ranks = results[name]
    of_logprob, of_sum = ROUNDING[CASES[name].get("training.dtype", "float32")]
    for rank in ranks:
        before, after = zip(rank["logprobs"], alone["logprobs"], strict=True)
        assert before[0] == pytest.approx(before[1], abs=of_logprob)
        assert after[0] == pytest.approx(after[1], abs=10 * of_logprob)  # Adam makes steps of what rounding leaves
        assert rank["norms"] == pytest.approx(alone["norms"], rel=10 * of_sum)
        assert rank["sums"] == pytest.approx(alone["sums"], rel=of_sum)


@pytest.mark.engine
@pytest.mark.parametrize("name", EACH)
def test_what_a_model_computes_for_itself_stays_in_fp32(results: dict[str, tuple[Any, Any]], name: str) -> None:
    assert {tuple(rank["buffers"]) for rank in (results[name][0], *results[name][1])} == {("torch.float32",)}


@pytest.mark.engine
@pytest.mark.parametrize("name", EACH)
def test_states_are_those_of_a_ranks_own_part_as_predicted(results: dict[str, tuple[Any, Any]], name: str) -> None:
    check_states({**CASES[name], **SHARED}, results[name][1])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"training.ulysses": 2}, "one group besides data parallelism"),
        ({"training.zero_stage": 3}, "ZeRO 0 to 2"),
        ({"training.lora": {"rank": 4}}, "wrapped by PEFT"),
        ({"training.offloads_optimizer": True}, "never tried"),
    ],
)
def test_what_does_not_go_with_it_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make_job(**{"training.tp": 2, **overrides})


def test_whole_key_heads_lie_on_every_rank() -> None:
    with pytest.raises(SpecError, match="2 key heads"):
        make_job(**{"training.tp": 4, "hardware.num_devices": 4}).load_model()
