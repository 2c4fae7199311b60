"""Checkpoints of live trainer ranks: resumed training is the uninterrupted one to the bit, in every stage."""

from pathlib import Path
from typing import Any

import pytest

from rlplan.memory.roles.cpu_trainer import TrainerForecast
from rlplan.memory.trainers.checkpoints import saved_bytes
from tests.runtime.live.live_ranks import exercise
from tests.runtime.live.live_trainer import plan_case

pytestmark = pytest.mark.engine


def _case(stage: int, dtype: str, **overrides: Any) -> dict[str, Any]:
    writes = "beside" if stage % 2 else "waiting"
    name = f"stage-{stage}-{dtype}" + "".join(f"-{key.split('.')[-1]}" for key in overrides)
    keys = {"training.zero_stage": stage, "training.dtype": dtype, "name": name, "algorithm.learning_rate": 1e-3}
    staging = {"checkpoints.every": 1, "checkpoints.writes": writes}
    return {"exercise": "resume", "overrides": {**keys, **staging, **overrides}}


DTYPES = ("float32", "bfloat16")
ADAPTERS = {"training.lora": {"rank": 4}}
EIGHT_BIT = {"training.optimizer": "adamw_8bit"}
CASES = {
    **{f"stage {stage}, {DTYPES[stage % 2]}": _case(stage, DTYPES[stage % 2]) for stage in (0, 2, 3)},
    "adapters": _case(2, "float32", **ADAPTERS),
    "8 bits, stage 3, bfloat16": _case(3, "bfloat16", **EIGHT_BIT),
}
MORE = {
    "stage 1, bfloat16": _case(1, "bfloat16"),
    **{f"stage {stage}, {DTYPES[1 - stage % 2]}": _case(stage, DTYPES[1 - stage % 2]) for stage in range(4)},
    "adapters, stage 3": _case(3, "bfloat16", **ADAPTERS),
    "offloaded": _case(2, "bfloat16", **{"training.offloads_optimizer": True}),
    "8 bits, stage 0, float32": _case(0, "float32", **EIGHT_BIT),
    "small tensors cut too": _case(3, "float32", **{"training.persistence_threshold": 0}),
}
SHARED_LAYERS = {
    f"shared layers, stage {stage}, {dtype}": _case(stage, dtype, **{"training.tp": 2})
    for stage, dtype in ((0, "float32"), (1, "float32"), (2, "bfloat16"))
}
"""Processes of their own: DeepSpeed keeps AutoTP's groups."""
ALL_CASES = {**CASES, **MORE, **SHARED_LAYERS}
EACH = [*CASES, *(pytest.param(name, marks=pytest.mark.nightly) for name in (*MORE, *SHARED_LAYERS))]
OWN_RANKS = "8 bits"
"""Cases whose checkpoints are read by the ranks that wrote them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


Answers = dict[str, list[Any]]


def add_folder(cases: dict[str, dict[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    """The cases, with the folder that their checkpoints lie in."""
    return {name: {**case, "folder": str(folder)} for name, case in cases.items()}


@pytest.fixture(scope="module")
def few(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return exercise(2, add_folder(CASES, folder), tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def more(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return exercise(2, add_folder(MORE, folder), tmp_path_factory.mktemp("more"))


@pytest.fixture(scope="module")
def shared_layers(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return exercise(2, add_folder(SHARED_LAYERS, folder), tmp_path_factory.mktemp("shared"), is_fresh=True)


def find_ranks(name: str, request: pytest.FixtureRequest) -> list[Any]:
    """Answers of each rank in a case."""
    where = next(
        where for where, cases in (("few", CASES), ("more", MORE), ("shared_layers", ALL_CASES)) if name in cases
    )
    answers: Answers = request.getfixturevalue(where)
    return answers[name]


@pytest.mark.parametrize("name", EACH)
def test_training_goes_on_to_the_bit(name: str, request: pytest.FixtureRequest) -> None:
    for rank in find_ranks(name, request):
        assert rank["loaded"] == rank["saved"]
        assert rank["again"] == rank["log"][2:]
        assert rank["resumed"] == rank["went_on"]
        assert rank["went_on"]["steps"] - rank["saved"]["steps"] == 2


@pytest.mark.parametrize("name", EACH)
def test_the_copy_is_as_large_as_predicted_and_the_file_hardly_larger(
    name: str, request: pytest.FixtureRequest
) -> None:
    plan = plan_case(2, ALL_CASES[name])
    layout, writes = plan.schedule.find_layout("policy_trainer"), plan.job.checkpoints.writes
    for number, rank in enumerate(find_ranks(name, request)):
        forecast = TrainerForecast(plan.job, plan.job.load_model(), plan.job.load_profile(), layout, number)
        predicted = saved_bytes(forecast.states)
        assert rank["held"]["components"]["checkpoint_staging"] == (predicted if writes == "beside" else 0)
        assert predicted <= rank["facts"]["file"]["num_bytes"] <= predicted + 64_000


def test_one_rank_in_the_next_stage_takes_over_the_same_weights(
    few: Answers, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cases = {name: case for name, case in take_over_cases(CASES).items() if "then" in name}
    check_takeover(few, exercise(1, add_folder(cases, folder), tmp_path_factory.mktemp("one")))


@pytest.mark.nightly
def test_other_ranks_and_other_stages_take_over_the_same_weights(
    few: Answers, more: Answers, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cases = take_over_cases(CASES | MORE)
    check_takeover(few | more, exercise(1, add_folder(cases, folder), tmp_path_factory.mktemp("all")))


def take_over_cases(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The checkpoints of two ranks, taken over by one: in the same stage, and in the next one."""
    answer = {}
    for name, case in cases.items():
        if name.startswith(OWN_RANKS):
            continue
        stage = case["overrides"]["training.zero_stage"]
        answer[name] = {"exercise": "take_over", "overrides": case["overrides"]}
        if "offload" not in name:
            other = {**case["overrides"], "training.zero_stage": (stage + 1) % 4}
            answer[f"{name}, then {(stage + 1) % 4}"] = {"exercise": "take_over", "overrides": other}
    return answer


def check_takeover(before: Answers, after: Answers) -> None:
    assert after
    for name, (rank,) in after.items():
        ranks = before[name.partition(", then")[0]]
        assert rank["loaded"]["weights"] == ranks[0]["saved"]["weights"], name
        assert rank["next"]["loss"] == pytest.approx(
            sum(other["again"][0]["loss"] for other in ranks), rel=2e-2, abs=2e-3
        )
