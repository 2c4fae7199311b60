"""A frozen base in 4-bit NormalFloat (QLoRA) through bitsandbytes: linear layers are replaced in place.

On CPUs with bf16 instructions bitsandbytes 0.50 converts weights to another format in evaluation mode. Training and
scoring would then round differently, so the conversion is disabled.

In: a Hugging Face module and the names of its weights. Out: the same module with 4-bit linear layers, and their
dequantized weights on request. Left out: adapters (adapters.py).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

QUANT_TYPE = "nf4"


def quantize_base(model: Any, names: Iterable[str]) -> None:
    """Replace the linear layers of these weights one by one, so that only one of them exists twice at a time."""
    for name in names:
        parent, _, child = name.removesuffix(".weight").rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, child, _quantize(getattr(owner, child)))
    model.is_loaded_in_4bit = True  # PEFT checks this attribute


def dequantize_weight(parameter: torch.Tensor) -> torch.Tensor:
    """A weight in its compute type: as it is, or dequantized from 4 bits."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter.detach()
    from bitsandbytes.functional import dequantize_4bit

    weight: torch.Tensor = dequantize_4bit(parameter.data, state)
    return weight


def list_scales(parameter: torch.Tensor) -> list[torch.Tensor]:
    """Tensors stored beside a 4-bit weight: scales, their scales and offset (double quantization), and both codes."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return []
    nested = [] if state.state2 is None else [state.offset, state.state2.absmax, state.state2.code]
    return [state.absmax, state.code, *nested]


def _quantize(linear: nn.Linear) -> nn.Module:
    from bitsandbytes.nn import Linear4bit, Params4bit

    dtype, device = linear.weight.dtype, linear.weight.device
    layer: Any = Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=dtype,
        compress_statistics=True,
        quant_type=QUANT_TYPE,
        device="meta",  # no memory for weights that the next statement replaces
    )
    layer.weight = Params4bit(
        linear.weight.detach(), requires_grad=False, compress_statistics=True, quant_type=QUANT_TYPE, module=layer
    ).to(device)
    layer.bias = linear.bias
    layer.support_avx512bf16_for_cpu = False
    quantized: nn.Module = layer
    return quantized
