"""A frozen base in 4-bit normal floats (QLoRA), by bitsandbytes: linear layers replaced in place, and read again.

In: a Hugging Face module and the names of its weights. Out: the same module whose linear layers multiply by 4-bit
weights; whole tensors of them, dequantised. Left out: adapters beside them (adapters.py).

bitsandbytes 0.50 has kernels for CPUs too. There it turns weights over to a format of its own when a module is
evaluated, on processors with bf16 instructions: that would round differently in training and in scoring, so it is off.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

QUANT_TYPE = "nf4"


def quantize_base(model: Any, names: Iterable[str]) -> None:
    """Replace the linear layers of these weights, one after the other, so that one of them at a time exists twice."""
    for name in names:
        parent, _, child = name.removesuffix(".weight").rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, child, _quantized(getattr(owner, child)))
    model.is_loaded_in_4bit = True  # PEFT asks for it


def whole_weight(parameter: torch.Tensor) -> torch.Tensor:
    """A weight as a matmul reads it: itself, or dequantised from 4 bits."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter.detach()
    from bitsandbytes.functional import dequantize_4bit

    weight: torch.Tensor = dequantize_4bit(parameter.data, state)
    return weight


def scales_of(parameter: torch.Tensor) -> list[torch.Tensor]:
    """What stands beside a weight's 4 bits: scales, their own scales and offset, and the codes of both."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return []
    nested = [] if state.state2 is None else [state.offset, state.state2.absmax, state.state2.code]
    return [state.absmax, state.code, *nested]


def _quantized(linear: nn.Linear) -> nn.Module:
    from bitsandbytes.nn import Linear4bit, Params4bit

    dtype, device = linear.weight.dtype, linear.weight.device
    layer: Any = Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=dtype,
        compress_statistics=True,
        quant_type=QUANT_TYPE,
        device="meta",
    )
    layer.weight = Params4bit(
        linear.weight.detach(), requires_grad=False, compress_statistics=True, quant_type=QUANT_TYPE, module=layer
    ).to(device)
    layer.bias = linear.bias
    layer.support_avx512bf16_for_cpu = False
    quantized: nn.Module = layer
    return quantized
