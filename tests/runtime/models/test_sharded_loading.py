"""Models that are cut while they are built say, in bf16 and over 2,000 tokens, what whole ones say."""

from typing import Any

import pytest

from tests.repository.at_night import mark_nightly
from tests.runtime.live.live_cut import ARCHITECTURES, LENGTHS, VARIANTS
from tests.runtime.live.live_forks import read_answers, start
from tests.runtime.workers.trainer.agreement import select_cases

pytestmark = pytest.mark.engine
VARIED = "qwen3"
EACH = mark_nightly(ARCHITECTURES, but=("llama", VARIED, "mixtral"))
"""Scaled rotary positions, norms of queries and keys, and experts; without any of them at night."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    """The answer of one rank."""
    names = sorted({VARIED, *select_cases(ARCHITECTURES, request)})
    folder = tmp_path_factory.mktemp("cut")
    rank = start("tests.runtime.live.live_cut:main", str(folder), names, log=folder / "log", environment={})
    try:
        answer: dict[str, Any]
        (answer,) = read_answers([rank], [folder / "answer.json"], 240)
    finally:
        rank.close()
    return answer


@pytest.mark.parametrize("who", ["trainer", "reference", "reward"])
@pytest.mark.parametrize("name", EACH)
def test_a_cut_model_in_bf16_says_what_the_whole_one_says_of_any_length(
    answers: dict[str, Any], name: str, who: str
) -> None:
    assert answers[name][who] == [0.0] * len(LENGTHS)


@pytest.mark.parametrize("name", EACH)
def test_what_a_model_computes_for_itself_keeps_its_own_type(answers: dict[str, Any], name: str) -> None:
    whole, cut = answers[name]["buffers"]
    assert cut == whole
    assert ["inv_freq", "torch.float32"] in cut


@pytest.mark.parametrize("variant", VARIANTS)
def test_models_that_are_loaded_whole_keep_those_types_too_whatever_is_made_of_them(
    answers: dict[str, Any], variant: str
) -> None:
    answer = answers[VARIED]["variants"][variant]
    assert answer["buffers"] == answers[VARIED]["buffers"][0]
    if variant != "nf4":  # whose weights are others
        assert answer["apart"] == [0.0] * len(LENGTHS)
