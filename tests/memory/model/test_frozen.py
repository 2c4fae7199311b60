"""Layers with frozen weights against what real modules save when only adapters are trained (oracle: fake tensors)."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.gpu.meters import CountedTensors
from rlplan.memory.model.block import Block
from rlplan.memory.model.frozen import Frozen, frozen_final_bytes, frozen_layer_bytes
from rlplan.memory.trainers.micro_batch import MicroBatchBytes, entry_bytes, layer_bytes
from rlplan.memory.trainers.shape import MicroBatchShape, Recompute
from rlplan.spec.model import model_from_config
from tests.memory.model.passes import find_block
from tests.memory.model.traced_layers import saved_by_layer

TOKENS, RANK = 1024, 8
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Adapted(nn.Module):
    """A frozen linear layer and LoRA beside it, as PEFT's lora/layer.py computes it."""

    def __init__(self, base: nn.Linear, dtype: torch.dtype, dropout: float) -> None:
        super().__init__()
        self.base, self.dtype, self.dropout = base, dtype, nn.Dropout(dropout)
        self.down = nn.Linear(base.in_features, RANK, bias=False, dtype=dtype)
        self.up = nn.Linear(RANK, base.out_features, bias=False, dtype=dtype)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result = self.base(rows)
        return (result + self.up(self.down(self.dropout(rows.to(self.dtype)))) * 2.0).to(result.dtype)


def adapt(targets: tuple[str, ...], dtype: torch.dtype, dropout: float) -> Any:
    def freeze(model: nn.Module) -> None:
        model.requires_grad_(False)
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if name in targets and isinstance(child, nn.Linear):
                    setattr(module, name, Adapted(child, dtype, dropout))

    return freeze


CASES = {
    "queries-values": (("q_proj", "v_proj"), torch.bfloat16, 0.0, Frozen(attention_inputs=2)),
    "fp32": (("q_proj", "v_proj"), torch.float32, 0.0, Frozen(attention_inputs=2, adapter_bytes=4)),
    "mlp": (ALL[4:], torch.float32, 0.0, Frozen(mlp_inputs=2, adapts_down=True, adapter_bytes=4)),
    "all": (
        ALL,
        torch.bfloat16,
        0.0,
        Frozen(attention_inputs=3, adapts_output=True, mlp_inputs=2, adapts_down=True),
    ),
    "dropout": (("q_proj", "v_proj"), torch.bfloat16, 0.1, Frozen(attention_inputs=2, has_dropout=True)),
}


@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=["llama", "qwen3"])
@pytest.mark.parametrize("case", CASES)
def test_a_frozen_layer_saves_what_its_norms_activation_and_adapters_need(case: str, config: dict[str, Any]) -> None:
    targets, dtype, dropout, frozen = CASES[case]
    _, saved, _, final = saved_by_layer(config, TOKENS, adapt=adapt(targets, dtype, dropout))
    block = find_block(model_from_config(config, where="config.json"))
    predicted = frozen_layer_bytes(block, frozen, TOKENS, 2)
    low_rank = TOKENS * RANK * len(targets) * (4 if dtype is torch.float32 else 2)
    wide_masks = TOKENS * 1024 * len(targets) if dropout else 0  # the CPU's masks have two bytes an element, not one
    assert predicted + low_rank + wide_masks == pytest.approx(saved, rel=0.02)
    rotary = TOKENS * 2 * 2 * block.head_dim  # saved by the first layer that reads it
    assert frozen_final_bytes(block, frozen, TOKENS, 2) - rotary == final


def test_a_backward_pass_through_adapters_holds_no_more_than_is_counted_in_flight() -> None:
    """An MLP as PEFT computes it, measured on the CPU; one scaled gradient is counted where nothing is recomputed."""
    block = Block(hidden=256, num_heads=4, num_kv_heads=4, head_dim=64, intermediate=1024)
    frozen = Frozen(mlp_inputs=2, adapts_down=True, scales_outputs=True)
    shape = MicroBatchShape(block, 1, 100, TOKENS, 0, frozen=frozen)
    gate, up, down = (
        Adapted(nn.Linear(*sizes, bias=False, dtype=torch.bfloat16).requires_grad_(False), torch.bfloat16, 0.0)
        for sizes in ((256, 1024), (256, 1024), (1024, 256))
    )
    rows = torch.randn(TOKENS, 256, dtype=torch.bfloat16, requires_grad=True)
    with CountedTensors() as counted:  # nothing that other tests have left
        result = rows + down(nn.functional.silu(gate(rows)) * up(rows))
        kept = counted.now
        result.backward(torch.ones_like(result))
        in_flight = counted.peak - kept
    assert in_flight <= MicroBatchBytes(shape).layer <= 1.6 * in_flight
    again = MicroBatchBytes(replace(shape, recompute=Recompute.FULL)).layer - layer_bytes(shape) + entry_bytes(shape)
    assert again == MicroBatchBytes(shape).layer + 2 * TOKENS * 1024
