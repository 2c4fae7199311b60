"""Router replay on a live engine: what the routers chose comes with each answer, and the trainer computes with it."""

import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.live.live_forks import SERVING, read_answers, start
from tests.runtime.live.live_routing import CHOSEN, NUM_LAYERS

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("routing") / "answer.json"
    log = path.with_suffix(".log")
    process = start("tests.runtime.live.live_routing:main", str(path), log=log, environment={}, libraries=SERVING)
    try:
        (answer,) = read_answers([process], [Path(path)], 240)
    finally:
        process.close()
    assert isinstance(answer, dict)
    return answer


def find_gap(answer: dict[str, Any], name: str) -> float:
    """Mean difference of the engine's log-probs and the trainer's."""
    return statistics.fmean(abs(a - b) for a, b in zip(answer["engine"], answer[name], strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_token_but_the_last_comes_with_its_experts_of_every_layer(answers: dict[str, Any], dtype: str) -> None:
    answer = answers[dtype]
    assert answer["shapes"] == [[length - 1, NUM_LAYERS, CHOSEN] for length in answer["lengths"]]


def test_in_fp32_they_are_those_that_transformers_routers_choose(answers: dict[str, Any]) -> None:
    """The recorded rows are at the right request, position and layer; a tie within rounding may differ."""
    assert answers["float32"]["same_choice"] > 0.995
    assert find_gap(answers["float32"], "replayed") < 1e-5


def test_in_bf16_replay_closes_the_gap_that_other_experts_open(answers: dict[str, Any]) -> None:
    """Measured: 8 % of the choices differ; the mean gap is 0.172 without replay and 0.021, bf16's rounding, with it."""
    answer = answers["bfloat16"]
    assert answer["same_choice"] < 0.995, "without other choices there is nothing to close"
    assert find_gap(answer, "replayed") < 0.3 * find_gap(answer, "own")
