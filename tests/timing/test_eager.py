"""Eager passes against torch itself: each tensor that the real modules make, byte for byte, and by hand."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from rlplan.spec.model import ModelSpec, model_from_config
from rlplan.timing.eager import (
    BACKWARD_OPS,
    FORWARD_OPS,
    MicroBatch,
    backward_floats,
    backward_work,
    forward_floats,
    forward_work,
    fresh_bytes,
    matrix_numel,
)
from tests.factories import make_model

SEQUENCES, LENGTH = 8, 16
TOKENS = SEQUENCES * LENGTH
SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 160,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def made_by_torch(architecture: str, num_layers: int) -> dict[str, tuple[float, int]]:
    """(floats of all results, dispatched operations) of a forward and of a backward pass."""
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Counting(TorchDispatchMode):  # type: ignore[misc]
        num_bytes, num_ops = 0, 0

        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
            result = operation(*args, **(kwargs or {}))
            self.num_ops += 1
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in known:
                    self.num_bytes += tensor.untyped_storage().nbytes()
            return result

    def counted(call: Callable[[], Any]) -> tuple[Any, tuple[float, int]]:
        with Counting() as counting:
            result = call()
        return result, (counting.num_bytes / 4, counting.num_ops)

    name = architecture.removesuffix("ForCausalLM")
    config = getattr(transformers, f"{name}Config")(**SMALL, num_hidden_layers=num_layers)
    model = getattr(transformers, architecture)(config).model
    ids = torch.zeros(SEQUENCES, LENGTH, dtype=torch.long)
    hidden, forward = counted(lambda: model(input_ids=ids, use_cache=False).last_hidden_state)
    _, backward = counted(lambda: hidden.sum().backward())
    return {"forward": forward, "backward": backward}


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"])
def test_a_layer_makes_as_many_floats_as_torch_allocates(architecture: str) -> None:
    one, two = made_by_torch(architecture, 1), made_by_torch(architecture, 2)
    model = model_from_config({"architectures": [architecture], **SMALL, "num_hidden_layers": 1}, where="test")
    layer = sum(t.numel for t in model.parameters if ".layers." in t.name)
    for name, floats in (("forward", forward_floats(model)), ("backward", backward_floats(model))):
        measured = two[name][0] - one[name][0] - (layer if name == "backward" else 0)
        predicted = TOKENS * sum(width * count for width, count in floats.items())
        assert predicted == pytest.approx(measured, rel=0.015), "what has one float a head is left out"
        ops = two[name][1] - one[name][1]
        assert ops <= {"forward": FORWARD_OPS, "backward": BACKWARD_OPS}[name] <= 1.35 * ops


def test_flops_are_two_a_matrix_element_and_token_and_a_backward_pass_is_twice_that() -> None:
    model, batch = make_model(), MicroBatch(3, 10, 4)
    matrices = 2 * (8 * (12 + 6 + 6) + 12 * 8 + 3 * 8 * 20)
    assert matrix_numel(model) == matrices == 1536
    attention = 2 * 10 * 30 * 12 * 2
    assert forward_work(model, batch).flops == 2 * (30 * 1536 + 12 * 70 * 8) + attention
    assert backward_work(model, batch).flops == 2 * forward_work(model, batch).flops


def test_small_tensors_are_not_fresh_and_large_ones_are() -> None:
    model = make_model()
    assert forward_work(model, MicroBatch(1, 10, 4)).fresh_bytes == 0
    assert fresh_bytes({8: 1}, 4096) == 8 * 4096 * 4
    assert fresh_bytes({8: 1}, 4095) == 0


@pytest.mark.parametrize("larger", [MicroBatch(8, 512, 256), MicroBatch(4, 1024, 256), MicroBatch(4, 512, 300)])
def test_more_sequences_or_longer_ones_are_never_less_work(larger: MicroBatch) -> None:
    model: ModelSpec = make_model()
    for work in (forward_work, backward_work):
        less, more = work(model, MicroBatch(4, 512, 256)), work(model, larger)
        assert more.flops > less.flops
        assert more.fresh_bytes >= less.fresh_bytes
