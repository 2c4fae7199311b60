"""Eager passes against torch itself: each tensor that the real modules make, byte for byte, and by hand."""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from rlplan.spec.model import ModelSpec, model_from_config
from rlplan.timing.cpu.eager import (
    BACKWARD_OPS,
    FORWARD_OPS,
    MicroBatch,
    backward_counts,
    backward_floats,
    backward_operands,
    forward_counts,
    forward_floats,
    forward_operands,
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


@dataclass(frozen=True)
class Counted:
    """floats: of all results. operands: floats that operations read, weights among them. num_ops: dispatched."""

    floats: float
    operands: float
    num_ops: int


def made_by_torch(architecture: str, num_layers: int) -> dict[str, Counted]:
    """Bytes that a forward and a backward pass over packed sequences make and read."""
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    packed = importlib.import_module("rlplan.runtime.models.packed_attention")
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    def tensors(tree: Any) -> list[Any]:
        return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]

    def count_present(tensor: Any) -> int:
        """Elements that lie in memory: an expanded dimension has one."""
        return math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)

    class Counting(TorchDispatchMode):  # type: ignore[misc]
        num_bytes, num_ops, operands = 0, 0, 0

        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            read = tensors((args, kwargs))
            known = {tensor.untyped_storage()._cdata for tensor in read}
            result = operation(*args, **(kwargs or {}))
            self.num_ops += 1
            new = [tensor for tensor in tensors(result) if tensor.untyped_storage()._cdata not in known]
            self.num_bytes += sum(tensor.untyped_storage().nbytes() for tensor in new)
            name = operation.overloadpacket.__name__
            if name == "copy_":
                self.operands += count_present(read[1])  # the first one is written
            elif new and not name.startswith(("empty", "new_empty")):  # views make nothing
                self.operands += sum(map(count_present, read))
            return result

    def count_call(call: Callable[[], Any]) -> tuple[Any, Counted]:
        with Counting() as counting:
            result = call()
        return result, Counted(counting.num_bytes / 4, counting.operands, counting.num_ops)

    packed.register_packed_attention()
    name = architecture.removesuffix("ForCausalLM")
    config = getattr(transformers, f"{name}Config")(**SMALL, num_hidden_layers=num_layers)
    config._attn_implementation = packed.PACKED
    model = getattr(transformers, architecture)(config).model
    ids = torch.zeros(1, TOKENS, dtype=torch.long)
    places = torch.arange(LENGTH).repeat(SEQUENCES)[None]
    lens = (LENGTH,) * SEQUENCES
    hidden, forward = count_call(
        lambda: model(input_ids=ids, position_ids=places, sequence_lens=lens, use_cache=False).last_hidden_state
    )
    _, backward = count_call(lambda: hidden.sum().backward())
    return {"forward": forward, "backward": backward}


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"])
def test_a_layer_makes_and_reads_as_many_floats_as_torch_does(architecture: str) -> None:
    single, two = made_by_torch(architecture, 1), made_by_torch(architecture, 2)
    model = model_from_config({"architectures": [architecture], **SMALL, "num_hidden_layers": 1}, where="test")
    layer = sum(t.numel for t in model.parameters if ".layers." in t.name)
    formulas = {
        "forward": (forward_floats(model), forward_operands(model), 0, layer),
        "backward": (backward_floats(model), backward_operands(model), layer, layer),
    }
    for name, (floats, operands, gradients, weights) in formulas.items():
        first, second = single[name], two[name]
        assert TOKENS * sum(width * count for width, count in floats.items()) == pytest.approx(
            second.floats - first.floats - gradients, rel=0.015
        ), "what has one float a head is left out"
        assert TOKENS * sum(width * count for width, count in operands.items()) == pytest.approx(
            second.operands - first.operands - weights, rel=0.025
        ), "as above, and Qwen2's biases"
        ops = second.num_ops - first.num_ops
        assert ops <= {"forward": FORWARD_OPS, "backward": BACKWARD_OPS}[name] <= 1.35 * ops


def test_flops_are_two_a_matrix_element_and_token_and_a_backward_pass_is_twice_that() -> None:
    model, batch = make_model(), MicroBatch(3, 10, 4)
    matrices = 2 * (8 * (12 + 6 + 6) + 12 * 8 + 3 * 8 * 20)
    assert matrix_numel(model) == matrices == 1536
    attention = 2 * 10 * 30 * 12 * 2
    assert forward_counts(model, batch).flops == 2 * (30 * 1536 + 12 * 70 * 8) + attention
    assert backward_counts(model, batch).flops == 2 * forward_counts(model, batch).flops


def test_small_tensors_are_not_fresh_and_large_ones_are() -> None:
    model = make_model()
    assert forward_counts(model, MicroBatch(1, 10, 4)).fresh_bytes == 0
    assert fresh_bytes({8: 1}, 4096) == 8 * 4096 * 4
    assert fresh_bytes({8: 1}, 4095) == 0


@pytest.mark.parametrize("larger", [MicroBatch(8, 512, 256), MicroBatch(4, 1024, 256), MicroBatch(4, 512, 300)])
def test_more_sequences_or_longer_ones_are_never_less_work(larger: MicroBatch) -> None:
    model: ModelSpec = make_model()
    for work in (forward_counts, backward_counts):
        less, more = work(model, MicroBatch(4, 512, 256)), work(model, larger)
        assert more.flops > less.flops
        assert more.fresh_bytes >= less.fresh_bytes
