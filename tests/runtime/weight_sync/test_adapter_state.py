"""An engine's slots hold the trainer's adapter: what the runtime compares, and that it notices what is wrong there.

The rank is below the slots' and alpha / rank is no power of two, so that padding and scaling matter. What also counts
are the trainer's log-probs of what the engine samples.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from rlplan.errors import RunError
from tests.factories import EXAMPLES
from tests.runtime.weight_sync.live_sync import Case, Setup

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
SORTER = str(EXAMPLES / "models" / "sorter")
RANK = 3
ROUNDING = 1e-4
"""Between vLLM and transformers in fp32."""


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    adapter = {"training.lora": {"rank": RANK, "alpha": 5.0}, "placement.sync_content": "adapter"}
    live = Setup(tmp_path_factory.mktemp("sync"), SORTER, 1, **adapter)
    try:
        yield live
    finally:
        live.worker_group.close()


def sync_adapter(setup: Setup, tp: int) -> Case:
    """A trainer that has moved, and an engine that has its adapter."""
    case = setup.case(0, "shared_memory", "adapter", tp)
    case.sync()
    assert not case.weight_sync.is_verified, "every B is zero, which shows little"
    case.train()
    case.sync()
    return case


@pytest.mark.parametrize("tp", [1, 2])
def test_slots_hold_the_trainers_matrices_and_the_record_says_so(setup: Setup, tp: int) -> None:
    case = sync_adapter(setup, tp)
    assert case.weight_sync.is_verified
    num_matrices = sum(len(packet.bucket.entries) for packet in build_packets(setup, tp))
    words = f"{tp * num_matrices} adapter matrices in {tp} engine processes equal the trainer's"
    assert case.weight_sync.verified == f"{words}; not compared: the base, which is not sent"
    assert case.difference() < ROUNDING


def build_packets(setup: Setup, tp: int) -> Any:
    from rlplan.memory.weight_sync.packets import plan_policy_packets

    job = setup.build_spec(0, "shared_memory", "adapter", tp).job
    return plan_policy_packets(job, job.load_model())


def _layer(name: str, engine: Any) -> tuple[Any, int]:
    manager = engine._vllm_worker.model_runner.model.lora_manager
    return manager.modules[name], manager.lora_index_to_id.index(engine.adapters.newest)


def change_a_bit(name: str, member: int, engine: Any) -> None:
    layer, index = _layer(name, engine)
    layer.lora_b_stacked[member][index, 0].view(torch.int32)[1, 1] ^= 1


def leave_the_scale_out(name: str, member: int, engine: Any) -> None:
    layer, index = _layer(name, engine)
    layer.lora_b_stacked[member][index, 0] *= RANK / 5.0


def swap_two_members(name: str, member: int, engine: Any) -> None:
    layer, index = _layer(name, engine)
    slots = layer.lora_a_stacked
    slots[member][index], slots[1 - member][index] = slots[1 - member][index].clone(), slots[member][index].clone()


def drop_the_slot(name: str, member: int, engine: Any) -> None:
    manager = engine._vllm_worker.model_runner.model.lora_manager
    manager.lora_index_to_id[:] = [None] * len(manager.lora_index_to_id)


DAMAGES = [
    (change_a_bit, r"1 of its [0-9]+ parameters differ after loading: model.layers.1.mlp.up_proj.lora_B.weight\n"),
    (
        leave_the_scale_out,
        r"1 of its [0-9]+ parameters differ after loading: model.layers.1.mlp.up_proj.lora_B.weight\n",
    ),
    (
        swap_two_members,
        r"2 of its [0-9]+ parameters differ after loading: model.layers.1.mlp.gate_proj.lora_A.weight, ",
    ),
    (drop_the_slot, r"vLLM did not load model.layers.0"),
]


@pytest.mark.parametrize(("damage", "expected"), DAMAGES)
def test_what_is_wrong_in_a_slot_is_noticed_by_name(
    damage: Callable[[str, int, Any], None], expected: str, setup: Setup
) -> None:
    case = sync_adapter(setup, 1)
    case.worker_group.apply(case.engines[0], partial(damage, "model.layers.1.mlp.gate_up_proj", 1))
    with pytest.raises(RunError, match=expected) as caught:
        case.weight_sync._verify(case.action.processes)
    assert "placement.sync_content=full" in caught.value.way_out
