"""Stand-ins for CUDA kernels in a trace: they allocate and save the kernels' tensors, and compute nothing.

On a CPU, and under fake tensors, transformers replaces CUDA kernels by torch code that needs more memory: T x T masks
instead of flash attention, a hundred tensors of the chunked gated delta rule instead of eight.
In: the tensors that a Hugging Face module passes to a kernel. Out: tensors of the right shapes.
Left out: kernels whose torch fallback saves the same tensors (norms, rotary positions, experts).
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

ATTENTION = "rlplan_traced"
CHUNK = 64
"""Tokens per chunk of the gated delta rule. Source: flash-linear-attention 0.4, ops/gated_delta_rule/chunk.py."""


@contextmanager
def fused_attention() -> Iterator[None]:
    """Use attention without a mask for the block; transformers builds a mask as soon as it detects tracing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def skip_mask(*arguments: Any, **named: Any) -> None:
        return None

    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, skip_mask)
    # models without exchangeable attention use the mask of "sdpa"
    masks = AttentionMaskInterface._global_mapping
    before = masks["sdpa"]
    masks["sdpa"] = skip_mask
    try:
        yield
    finally:
        masks["sdpa"] = before


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    """Causal flash attention with grouped keys and values as on CUDA: no T x T tensor, no repeated heads.

    Values narrower than the keys (MLA) are padded, as transformers does for flash attention.
    Queries are stored token by token, like the output of CUDA's kernel.
    """
    if query.stride(1) > query.stride(2):
        query, key = (states.transpose(1, 2).contiguous().transpose(1, 2) for states in (query, key))
    narrower = query.shape[-1] - value.shape[-1]
    if narrower:
        value = nn.functional.pad(value, (0, narrower))
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    if narrower:
        output = output[..., :-narrower]
    return output.transpose(1, 2).contiguous(), None


@contextmanager
def replace_kernels(model: nn.Module) -> Iterator[None]:
    """Replace the torch fallbacks in a model's module by the stand-ins, for the block."""
    home = sys.modules[type(model).__module__]
    stand_ins = {"torch_chunk_gated_delta_rule": _delta_rule, "causal_conv1d_fn": _convolution}
    before = {name: getattr(home, name) for name in stand_ins if hasattr(home, name)}
    try:
        for name in before:
            setattr(home, name, stand_ins[name])
        yield
    finally:
        for name, function in before.items():
            setattr(home, name, function)


class _GatedDeltaRule(torch.autograd.Function):
    """Saves normed queries and keys with their scales, values, decays, betas and one matrix of chunk width per head.

    Source: flash-linear-attention 0.4, ops/gated_delta_rule/chunk.py, `ChunkGatedDeltaRuleFunction`.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        query, key, value, decay, beta = (tensor.contiguous() for tensor in inputs)
        heads = value.shape[:3]
        scales = [decay.new_empty(heads, dtype=torch.float32) for _ in range(2)]
        within = key.new_empty(*heads, CHUNK)
        normed = [torch.empty_like(query), torch.empty_like(key)]
        ctx.save_for_backward(*normed, *scales, value, torch.empty_like(decay), beta, within)
        states(value, key)  # part of the forward pass's peak, but not saved
        return torch.empty_like(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, _, _, value, decay, beta, _ = ctx.saved_tensors
        recomputed = [states(value, key), states(value, key)]  # the states and their gradients, alive at the same time
        input_gradients = tuple(torch.empty_like(tensor) for tensor in (query, key, value, decay, beta))
        del recomputed
        return input_gradients


def states(value: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The recurrent state at the start of each chunk, recomputed in the backward pass."""
    batch, tokens, heads, width = value.shape
    return value.new_empty(batch, -(-tokens // CHUNK), heads, key.shape[-1], width)


def _delta_rule(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **named: Any) -> tuple[Any, None]:
    return _GatedDeltaRule.apply(query, key, value, named["g"], named["beta"]), None


class _Convolution(torch.autograd.Function):
    """Saves its input only. Source: causal-conv1d 1.5, `CausalConv1dFn`."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(states, weight)
        return torch.empty_like(states)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states, weight = ctx.saved_tensors
        return torch.empty_like(states), torch.empty_like(weight)


def _convolution(states: torch.Tensor, weight: torch.Tensor, bias: Any = None, **named: Any) -> Any:
    return _Convolution.apply(states, weight)
