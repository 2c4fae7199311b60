"""Trained states: what plain torch training keeps is found by kind, offloaded and reloaded without a trace."""

import types
from typing import Any

import pytest
import torch

from rlplan.runtime.models.start_checkpoint import load_language_model
from rlplan.runtime.workers.trainer.offloaded_states import OffloadedStates
from rlplan.runtime.workers.trainer.trained_states import copy_mapped_parameters, count_bytes, list_storages
from rlplan.vocabulary import MemoryKind
from tests.factories import EXAMPLES

SORTER = str(EXAMPLES / "models" / "sorter")


def train(*, is_offloaded: bool, dtype: torch.dtype) -> tuple[list[float], list[torch.Tensor], Any]:
    """Losses, weights and states after three steps; everything is offloaded once between backward and step."""
    model = load_language_model(SORTER, dtype)
    copy_mapped_parameters(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine = types.SimpleNamespace(module=model, optimizer=optimizer)
    losses = []
    for step in range(3):
        tokens = torch.arange(3, 11).unsqueeze(0) + step
        hidden = model.model(
            input_ids=tokens, position_ids=torch.arange(8).unsqueeze(0), sequence_lens=(8,), use_cache=False
        ).last_hidden_state
        loss = hidden.float().square().mean()
        loss.backward()
        if is_offloaded:
            offloaded, before = OffloadedStates(), count_bytes(engine)
            offloaded.offload([storage for storages in list_storages(engine).values() for storage in storages])
            assert set(count_bytes(engine).values()) == {0}
            offloaded.reload()
            assert count_bytes(engine) == before
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, [parameter.detach() for parameter in model.parameters()], engine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_does_not_notice_that_its_states_were_away(dtype: torch.dtype) -> None:
    stayed, swapped = (train(is_offloaded=is_offloaded, dtype=dtype) for is_offloaded in (False, True))
    assert swapped[0] == stayed[0]
    assert all(torch.equal(tensor, other) for tensor, other in zip(swapped[1], stayed[1], strict=True))


def test_each_byte_has_one_kind() -> None:
    _, weights, engine = train(is_offloaded=False, dtype=torch.float32)
    numel = sum(weight.numel() for weight in weights)
    sizes = count_bytes(engine)
    assert sizes[MemoryKind.WEIGHTS] == 4 * numel
    assert sizes[MemoryKind.OPTIMIZER] == 8 * numel + 4 * len(weights)
    assert sizes[MemoryKind.GRADIENTS] == sizes[MemoryKind.MASTER_WEIGHTS] == 0


def test_a_bucket_counts_as_far_as_it_was_touched() -> None:
    bucket: Any = type("IPGBucket", (), {})()
    bucket.buffer, model = [torch.empty(25_000_000)], torch.nn.Linear(1, 1)
    optimizer = types.SimpleNamespace(ipg_buckets={torch.float32: bucket}, state={})
    engine = types.SimpleNamespace(module=model, optimizer=optimizer)
    assert count_bytes(engine)[MemoryKind.COMM_BUFFERS] == 0
    bucket.buffer[0][:5_000_000] = 1.0
    assert count_bytes(engine)[MemoryKind.COMM_BUFFERS] == pytest.approx(20_000_000, abs=4 * 4096)
    bucket.buffer[0].zero_()
    assert count_bytes(engine)[MemoryKind.COMM_BUFFERS] == 100_000_000
