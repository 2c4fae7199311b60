"""Checkpoints of live trainer ranks: resumed training is the uninterrupted one to the bit, in every stage."""

from pathlib import Path
from typing import Any

import pytest

from rlplan.memory.checkpoints import saved_bytes
from rlplan.memory.forecast_trainer import TrainerForecast
from tests.runtime.live_trainer import exercise, plan_of

pytestmark = pytest.mark.engine


def _case(stage: int, dtype: str, **overrides: Any) -> dict[str, Any]:
    writes = "beside" if stage % 2 else "waiting"
    name = f"stage-{stage}-{dtype}" + "".join(f"-{key.split('.')[-1]}" for key in overrides)
    keys = {"training.zero_stage": stage, "training.dtype": dtype, "name": name, "algorithm.learning_rate": 1e-3}
    staging = {"checkpoints.every": 1, "checkpoints.writes": writes}
    return {"exercise": "resume", "overrides": {**keys, **staging, **overrides}}


CASES = {
    **{f"stage {stage}, {dtype}": _case(stage, dtype) for stage in range(4) for dtype in ("float32", "bfloat16")},
    "adapters": _case(2, "float32", **{"training.lora": {"rank": 4}}),
    "adapters, stage 3": _case(3, "bfloat16", **{"training.lora": {"rank": 4}}),
    "offloaded": _case(2, "bfloat16", **{"training.offloads_optimizer": True}),
    **{
        f"8 bits, stage {stage}, {dtype}": _case(stage, dtype, **{"training.optimizer": "adamw_8bit"})
        for stage, dtype in ((0, "float32"), (3, "bfloat16"))
    },
    "small tensors cut too": _case(3, "float32", **{"training.persistence_threshold": 0}),
}

SHARED_LAYERS = {
    f"shared layers, stage {stage}, {dtype}": _case(stage, dtype, **{"training.tp": 2})
    for stage, dtype in ((0, "float32"), (1, "float32"), (2, "bfloat16"))
}
"""Processes of their own: DeepSpeed keeps AutoTP's groups."""
ALL_CASES = {**CASES, **SHARED_LAYERS}
EACH = [*CASES, *(pytest.param(name, marks=pytest.mark.nightly) for name in SHARED_LAYERS)]
OWN_RANKS = "8 bits"
"""Cases whose checkpoints are read by the ranks that wrote them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def found(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLPLAN_TEST_FOLDER", str(folder))
        return exercise(2, CASES, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def shared(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLPLAN_TEST_FOLDER", str(folder))
        return exercise(2, SHARED_LAYERS, tmp_path_factory.mktemp("shared"))


def ranks_of(name: str, request: pytest.FixtureRequest) -> list[Any]:
    """What each rank gave in a case."""
    answers: dict[str, list[Any]] = request.getfixturevalue("found" if name in CASES else "shared")
    return answers[name]


@pytest.fixture(scope="module")
def on_one_rank(found: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The checkpoints of two ranks, taken over by one: in the same stage, and in the next one."""
    cases = {}
    for name, case in CASES.items():
        if name.startswith(OWN_RANKS):
            continue
        stage = case["overrides"]["training.zero_stage"]
        cases[name] = {"exercise": "take_over", "overrides": case["overrides"]}
        if "offload" not in name:
            other = {**case["overrides"], "training.zero_stage": (stage + 1) % 4}
            cases[f"{name}, then {(stage + 1) % 4}"] = {"exercise": "take_over", "overrides": other}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLPLAN_TEST_FOLDER", str(folder))
        return exercise(1, cases, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("name", EACH)
def test_training_goes_on_to_the_bit(name: str, request: pytest.FixtureRequest) -> None:
    for rank in ranks_of(name, request):
        assert rank["loaded"] == rank["saved"]
        assert rank["again"] == rank["log"][2:]
        assert rank["resumed"] == rank["went_on"]
        assert rank["went_on"]["steps"] - rank["saved"]["steps"] == 2


@pytest.mark.parametrize("name", EACH)
def test_the_copy_is_as_large_as_predicted_and_the_file_hardly_larger(
    name: str, request: pytest.FixtureRequest
) -> None:
    plan = plan_of(2, ALL_CASES[name])
    layout, writes = plan.schedule.layout("policy_trainer"), plan.job.checkpoints.writes
    for number, rank in enumerate(ranks_of(name, request)):
        forecast = TrainerForecast(plan.job, plan.job.load_model(), plan.job.load_profile(), layout, number)
        predicted = saved_bytes(forecast.states)
        assert rank["held"]["components"]["checkpoint_staging"] == (predicted if writes == "beside" else 0)
        assert predicted <= rank["facts"]["num_bytes"] <= predicted + 64_000


def test_other_ranks_and_other_stages_take_over_the_same_weights(
    found: dict[str, list[Any]], on_one_rank: dict[str, list[Any]]
) -> None:
    for name, (rank,) in on_one_rank.items():
        before = found[name.partition(", then")[0]][0]
        assert rank["loaded"]["weights"] == before["saved"]["weights"], name
        assert rank["next"]["loss"] == pytest.approx(
            sum(other["again"][0]["loss"] for other in found[name.partition(", then")[0]]), rel=2e-2, abs=2e-3
        )
