"""Roles that share the policy's weights, on live DeepSpeed and PEFT: adapters, and a value head on the backbone."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from rlplan.vocabulary import PERSISTENT_KINDS, MemoryKind, Role
from tests.factories import ROOT, make_job

pytestmark = pytest.mark.engine

ROUNDING = 1e-4


def result_of(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.live_roles", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT"))
    return result


def distance(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A trainer with adapters after three steps."""
    return result_of("adapters", str(tmp_path_factory.mktemp("policy")))


@pytest.fixture(scope="module")
def value_head() -> dict[str, Any]:
    """A trainer with a value head after five steps."""
    return result_of("value_head")


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
