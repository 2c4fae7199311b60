"""Roles that share the policy's weights, on live DeepSpeed and PEFT: adapters, and a value head on the backbone."""

from pathlib import Path
from typing import Any

import pytest

from rlplan.spec.models.adapters import list_lora_parameters
from rlplan.vocabulary import PERSISTENT_KINDS, MemoryKind, Role
from tests.factories import make_adapter, make_job
from tests.runtime.workers.trainer.agreement import answer_with_one_rank

pytestmark = pytest.mark.engine

ROUNDING = 1e-4
SAME = 1e-5
"""Between two ways of computing the same in fp32."""


def distance(values: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(values, other, strict=True))


CASES = {
    "adapters": {
        "training.lora": {"rank": 4, "alpha": 8.0},
        "training.zero_stage": 2,
        "algorithm.learning_rate": 1e-3,
    },
    "value_head": {
        "algorithm.name": "ppo",
        "algorithm.value_coef": 1.0,  # the policy's gradient moves the backbone too
        "roles.value.shares_backbone": True,
        "algorithm.learning_rate": 1e-3,
    },
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Answers of one rank for each case."""
    folder = tmp_path_factory.mktemp("rank")
    cases = {**CASES, "role_adapters": role_adapter_case(folder)}
    return answer_with_one_rank({name: (name, overrides) for name, overrides in cases.items()}, folder)


def role_adapter_case(folder: Path) -> dict[str, Any]:
    """A policy that starts from an adapter, its reference too, and a teacher of another rank on fewer layers."""
    return {
        "training.lora": {"rank": 4, "alpha": 8.0, "path": str(make_adapter(folder / "start", rank=4, alpha=8.0))},
        "roles.teacher.adapter": str(make_adapter(folder / "other", rank=8, targets=("q_proj", "v_proj"), seed=1)),
        "training.zero_stage": 2,
        "algorithm.learning_rate": 1e-3,
        "algorithm.kl_coef": 0.01,
    }


@pytest.fixture
def adapters(answers: dict[str, Any]) -> dict[str, Any]:
    """A trainer with adapters after three steps."""
    answer: dict[str, Any] = answers["adapters"]
    return answer


@pytest.fixture
def value_head(answers: dict[str, Any]) -> dict[str, Any]:
    """A trainer with a value head after ten steps."""
    answer: dict[str, Any] = answers["value_head"]
    return answer


def test_the_base_without_adapters_is_the_reference_to_the_bit_before_and_after_training(
    adapters: dict[str, Any],
) -> None:
    assert adapters["reference"] == [adapters["base"], adapters["base"]]
    assert distance(adapters["trained"], adapters["base"]) > 100 * ROUNDING


def test_merged_weights_and_pefts_own_reading_give_the_trained_log_probs(adapters: dict[str, Any]) -> None:
    assert distance(adapters["merged"], adapters["trained"]) < ROUNDING
    assert distance(adapters["peft"], adapters["trained"]) < ROUNDING


def test_adapters_are_trained_alone_and_their_states_are_counted_to_the_byte(adapters: dict[str, Any]) -> None:
    job = make_job(**{"training.lora": {"rank": 4}})
    model = job.load_model()
    trained, frozen = (sum(p.numel for p in part) for part in job.trained_parameters(Role.POLICY, model))
    assert frozen == model.num_parameters
    components = adapters["components"]
    assert components[MemoryKind.WEIGHTS] == 4 * (frozen + trained)
    assert components[MemoryKind.MASTER_WEIGHTS] == 4 * trained
    assert components[MemoryKind.OPTIMIZER] == 8 * trained + 4
    assert all(
        adapters["predicted"].get(kind, 0) == components[kind] for kind in PERSISTENT_KINDS if kind in components
    )
    assert adapters["names"] == [parameter.name for parameter in model.parameters]


def test_reference_and_teacher_say_what_peft_says_of_their_adapters_before_and_after_training(
    answers: dict[str, Any],
) -> None:
    beside = answers["role_adapters"]
    for before_and_after, alone in ((beside["reference"], beside["start"]), (beside["teacher"], beside["other"])):
        assert before_and_after[0] == before_and_after[1]
        assert distance(before_and_after[0], alone) < SAME
    assert distance(beside["start"], beside["other"]) > 100 * ROUNDING


def test_a_policy_starts_from_its_adapter_and_alone_is_trained_saved_and_handed_over(answers: dict[str, Any]) -> None:
    beside = answers["role_adapters"]
    start, trained = beside["policy"]
    assert distance(start, beside["start"]) < SAME
    assert distance(trained, start) > 100 * ROUNDING
    assert distance(beside["merged"], trained) < ROUNDING
    assert distance(beside["peft"], trained) < ROUNDING
    assert beside["names"] == [parameter.name for parameter in make_job().load_model().parameters]


def test_adapters_of_roles_are_counted_to_the_byte_and_have_no_states(answers: dict[str, Any], tmp_path: Path) -> None:
    job = make_job(**role_adapter_case(tmp_path))
    model, components = job.load_model(), answers["role_adapters"]["components"]
    trained, frozen = (sum(p.numel for p in part) for part in job.trained_parameters(Role.POLICY, model))
    two_roles = sum(
        len(list_lora_parameters(model, *values)) for values in ((4, "all-linear"), (8, ("q_proj", "v_proj")))
    )
    assert len(job.frozen_adapter_parameters(model)) == two_roles
    assert components[MemoryKind.WEIGHTS] == 4 * (frozen + trained)
    assert components[MemoryKind.OPTIMIZER] == 8 * trained + 4
    predicted = answers["role_adapters"]["predicted"]
    assert all(predicted.get(kind, 0) == components[kind] for kind in PERSISTENT_KINDS if kind in components)


def test_a_value_head_on_the_backbone_starts_at_zero_learns_and_is_not_handed_over(value_head: dict[str, Any]) -> None:
    first, later = value_head["values"]
    assert set(first) == {0.0}
    assert min(later) > 0.1  # every return is 1
    model = make_job().load_model()
    assert value_head["names"] == [parameter.name for parameter in model.parameters]
    components = value_head["components"]
    assert components[MemoryKind.WEIGHTS] == 4 * (model.num_parameters + model.hidden_size)
    assert all(
        value_head["predicted"].get(kind, 0) == components[kind] for kind in PERSISTENT_KINDS if kind in components
    )
