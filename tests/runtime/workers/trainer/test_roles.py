"""Roles that share the policy's weights, on live DeepSpeed and PEFT: adapters, and a value head on the backbone."""

from typing import Any

import pytest

from rlplan.vocabulary import PERSISTENT_KINDS, MemoryKind, Role
from tests.factories import make_job
from tests.runtime.workers.trainer.agreement import on_one_rank

pytestmark = pytest.mark.engine

ROUNDING = 1e-4


def distance(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


CASES = {
    "adapters": {
        "training.lora": {"rank": 4, "alpha": 8.0},
        "training.zero_stage": 2,
        "algorithm.learning_rate": 1e-3,
    },
    "value_head": {"algorithm.name": "ppo", "roles.value.shares_backbone": True, "algorithm.learning_rate": 1e-3},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one rank gave in each case."""
    return on_one_rank({name: (name, overrides) for name, overrides in CASES.items()}, tmp_path_factory.mktemp("rank"))


@pytest.fixture
def adapters(found: dict[str, Any]) -> dict[str, Any]:
    """A trainer with adapters after three steps."""
    answer: dict[str, Any] = found["adapters"]
    return answer


@pytest.fixture
def value_head(found: dict[str, Any]) -> dict[str, Any]:
    """A trainer with a value head after five steps."""
    answer: dict[str, Any] = found["value_head"]
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
    held = adapters["components"]
    assert held[MemoryKind.WEIGHTS] == 4 * (frozen + trained)
    assert held[MemoryKind.MASTER_WEIGHTS] == 4 * trained
    assert held[MemoryKind.OPTIMIZER] == 8 * trained + 4
    assert all(adapters["predicted"].get(kind, 0) == held[kind] for kind in PERSISTENT_KINDS if kind in held)
    assert adapters["names"] == [parameter.name for parameter in model.parameters]


def test_a_value_head_on_the_backbone_starts_at_zero_learns_and_is_not_handed_over(value_head: dict[str, Any]) -> None:
    first, later = value_head["values"]
    assert set(first) == {0.0}
    assert min(later) > 0.1  # every return is 1
    model = make_job().load_model()
    assert value_head["names"] == [parameter.name for parameter in model.parameters]
    held = value_head["components"]
    assert held[MemoryKind.WEIGHTS] == 4 * (model.num_parameters + model.hidden_size)
    assert all(value_head["predicted"].get(kind, 0) == held[kind] for kind in PERSISTENT_KINDS if kind in held)
