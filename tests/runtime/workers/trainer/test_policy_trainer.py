"""A trainer rank on live DeepSpeed: what it accumulates does not depend on how the mini-batch is cut."""

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rlplan.memory.roles.cpu_trainer import TrainerForecast
from rlplan.vocabulary import PERSISTENT_KINDS, ActionKind
from tests.runtime.live.live_ranks import exercise
from tests.runtime.live.live_trainer import plan_case

pytestmark = pytest.mark.engine

SMALL = {
    "training.persistence_threshold": 200,
    "algorithm.learning_rate": 1e-6,
    "algorithm.importance": "none",  # the samples' log-probs are made up, no engine's
}
"""Adam's first step is as long for a gradient that is all rounding as for a large one, so that stages, which add in
another order, differ by some learning rates in a few weights: at 1e-5 that was 1.5e-5 of the second gradient norm on
one kind of CPU, whose norms grow by a third a step.
"""
STAGES = {
    f"{dtype}, stage {stage}": {
        "exercise": "source",
        "overrides": {**SMALL, "training.dtype": dtype, "training.zero_stage": stage},
    }
    for dtype in ("float32", "bfloat16")
    for stage in range(4)
}
SWAPPED = ("float32, stage 0", "bfloat16, stage 1", "float32, stage 2", "bfloat16, stage 3")
SWAPS = {f"swapped, {name}": {**STAGES[name], "exercise": "swap"} for name in SWAPPED}
FEW = {name for name in STAGES if name.startswith("float32") or name == "bfloat16, stage 3"}
"""Cases that run before every change, with their swaps; the others run at night."""


def mark_nightly(names: Iterable[str]) -> list[Any]:
    """Parameters of a test, those that are not among the few marked as nightly."""
    return [name if name in FEW else pytest.param(name, marks=pytest.mark.nightly) for name in names]


CUTS = {"whole": (200, 1), "halves": (56, 2), "uneven": (24, 5)}
"""Maximum of tokens in a pass of 16 sequences of 5 to 9 tokens, 110 in all; and the number of passes."""


@pytest.fixture(scope="module")
def cuts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One step of the same mini-batch, cut in three ways."""
    cases = {
        name: {"exercise": "cut", "limit": limit, "overrides": {"training.max_tokens_per_micro_batch": limit}}
        for name, (limit, _) in CUTS.items()
    }
    return {name: ranks[0] for name, ranks in exercise(1, cases, tmp_path_factory.mktemp("rank")).items()}


def test_gradient_and_step_are_the_same_in_one_two_and_uneven_micro_batches(cuts: dict[str, Any]) -> None:
    assert {name: cut["passes"] for name, cut in cuts.items()} == {name: passes for name, (_, passes) in CUTS.items()}
    whole = cuts["whole"]
    for cut in (cuts["halves"], cuts["uneven"]):
        assert cut["norm"] == pytest.approx(whole["norm"], rel=1e-4)
        assert cut["loss"] == pytest.approx(whole["loss"], rel=1e-4, abs=1e-7)
        assert cut["tokens"] == whole["tokens"]
        assert cut["weights"] == pytest.approx(whole["weights"], rel=1e-5, abs=1e-4)
    assert whole["norm"] > 0.01


Asked = Callable[[str], list[Any]]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """Answers of a case on two ranks: the few are done together, and so are the others."""

    @cache
    def batch(*, is_few: bool) -> dict[str, list[Any]]:
        cases = {name: case for name, case in (STAGES | SWAPS).items() if is_among_few(name) == is_few}
        return exercise(2, cases, tmp_path_factory.mktemp("ranks"))

    return lambda name: batch(is_few=is_among_few(name))[name]


def is_among_few(name: str) -> bool:
    return name.removeprefix("swapped, ") in FEW


@pytest.mark.parametrize("name", mark_nightly(STAGES))
def test_the_source_gives_every_weight_whole_and_alike_on_every_rank(two_ranks: Asked, name: str) -> None:
    first, second = two_ranks(name)
    assert first["seen"] == second["seen"]
    assert first["sums"] == second["sums"]
    kind = f"torch.{name.split(',')[0]}"
    assert {dtype for dtype, *_ in first["seen"].values()} == {kind}
    assert first["seen"]["model.embed_tokens.weight"] == [kind, 64, 128]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
def test_every_stage_makes_the_same_steps(two_ranks: Asked, dtype: str) -> None:
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    whole = two_ranks(f"{dtype}, stage 0")
    for stage in (1, 2, 3):
        for own, other in zip(two_ranks(f"{dtype}, stage {stage}"), whole, strict=True):
            for step, expected in zip(own["log"], other["log"], strict=True):
                assert step == pytest.approx(expected, rel=tolerance, abs=tolerance)
            assert sum(own["sums"].values()) == pytest.approx(sum(other["sums"].values()), rel=tolerance)


@pytest.mark.nightly
def test_the_first_step_in_bf16_is_adam_s_first_in_every_stage(tmp_path: Path) -> None:
    """Adam's first step moves every weight that has a gradient by the learning rate, whatever the gradient is."""
    rate = 2.0**-8
    overrides = {"algorithm.learning_rate": rate, "algorithm.importance": "none", "algorithm.weight_decay": 0.1}
    cases = {
        f"stage {stage}": {
            "exercise": "first_step",
            "overrides": {**overrides, "training.dtype": "bfloat16", "training.zero_stage": stage},
        }
        for stage in range(3)
    }
    for name, ranks in exercise(2, cases, tmp_path).items():
        # 2^-8 in bf16 of weights up to 0.1: rounding is up to a 16th of it, and even
        assert ranks[0]["mean_move"] == pytest.approx(rate, rel=0.03), name


@pytest.mark.parametrize("name", mark_nightly(SWAPPED))
def test_states_that_offloaded_on_disk_come_back_bit_for_bit(two_ranks: Asked, name: str) -> None:
    for stayed, swapped in zip(two_ranks(name), two_ranks(f"swapped, {name}"), strict=True):
        assert swapped["log"] == stayed["log"]
        assert set(swapped["offloaded"]["components"].values()) == {0}
        assert swapped["back"]["components"] == swapped["before"]["components"]


@pytest.mark.parametrize("name", mark_nightly(SWAPPED))
def test_the_states_after_a_step_are_predicted_to_the_byte(two_ranks: Asked, name: str) -> None:
    plan = plan_case(2, STAGES[name])
    action = next(action for action in plan.schedule.step if action.kind is ActionKind.OPTIMIZER_STEP)
    for rank, answer in enumerate(two_ranks(f"swapped, {name}")):
        forecast = TrainerForecast(
            plan.job, plan.job.load_model(), plan.job.load_profile(), plan.schedule.find_layout("policy_trainer"), rank
        )
        resident = forecast.predict_resident(action, "steady")
        for kind in PERSISTENT_KINDS:
            assert answer["before"]["components"].get(kind.value, 0) == resident.get(kind, 0), (rank, kind)
