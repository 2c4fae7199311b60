"""Attention over packed sequences: several sequences share one row, and none attends to another.

The function is registered with transformers as `PACKED`; sequence lengths arrive as a keyword argument of the model. On
a CPU it calls torch's flash kernel once per run of equally long sequences, without padding and without a tensor of
size T squared. Sliding windows, score caps and sinks, which that kernel lacks, are computed a few rows at a time
(attention_by_rows.py). On CUDA one call of `torch.nn.attention.varlen` serves all sequences; fp32 and older GPUs use
torch's other kernels, one call per run. The CUDA paths were not yet run on a GPU.

In: queries, keys and values of one row, and sequence lengths. Out: the attention of each sequence on its own.
Left out: dropout and chunked attention, which are refused.
"""

from collections.abc import Iterator
from functools import lru_cache
from inspect import signature
from itertools import accumulate, groupby
from typing import Any

import torch

from rlplan.runtime.device.layer import device_of
from rlplan.runtime.models.attention_by_rows import Scores, attend_by_rows, cut_sequences, sum_groups
from rlplan.runtime.models.sequence_parallel import Sharing

PACKED = "rlplan_packed"
"""Name of this attention in transformers (`attn_implementation`)."""

_Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def register_packed_attention() -> None:
    """Register `attn_implementation=PACKED` with transformers. It needs no mask, only the sequence lengths."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, packed_attention)


def packed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sequence_lens: tuple[int, ...] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence of one row. query: [1, heads, T, d]. Returns: [1, T, heads, d] and None.

    options: `sharing`, if ranks share the row's tokens; each rank then computes some heads for all tokens. The other
    options are those that transformers passes to every attention function.
    """
    sharing: Sharing | None = options.pop("sharing", None)
    if sharing is not None:
        query, key, value = map(sharing.to_heads, (query, key, value))
    lens = sequence_lens or (query.shape[2],)
    window, cap, sinks = (options.get(name) for name in ("sliding_window", "softcap", "s_aux"))
    _check(module, query, lens, options, is_shared=sharing is not None)

    width, missing = value.shape[-1], query.shape[-1] - value.shape[-1]
    if missing:  # latent attention (MLA) has smaller values than keys, which no kernel accepts
        value = torch.nn.functional.pad(value, (0, missing))
    device = device_of(query.device)
    # A window as long as the longest sequence changes nothing, so the fused kernels apply.
    if cap is not None or sinks is not None or (window is not None and max(lens) > window):
        score = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, window, cap)
        output = attend_by_rows(query, key, value, sinks, lens, score)
    elif device is None or query.device.type == "cpu":
        output = _PerLength.apply(query, key, value, lens, scaling)
    elif has_flash(query.dtype, device.capability()):
        output = _attend_varlen(query, key, value, lens, scaling)
    else:
        output = _attend_by_runs(query, key, value, lens, scaling)
    if missing:
        output = output[..., :width]
    return output if sharing is None else sharing.to_tokens(output), None


def has_flash(dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Whether torch's variable-length flash attention works: 16-bit types, from compute capability 8.0."""
    return dtype in (torch.float16, torch.bfloat16) and capability >= (8, 0)


def _check(
    module: Any, query: torch.Tensor, lens: tuple[int, ...], options: dict[str, Any], *, is_shared: bool
) -> None:
    if query.shape[0] != 1 or sum(lens) != query.shape[2]:
        raise ValueError(f"packed attention needs one row of {sum(lens)} tokens, not {tuple(query.shape)}")
    if options.get("dropout"):
        raise ValueError(f"packed attention does not support dropout, which {type(module).__name__} uses")
    if is_shared and options.get("s_aux") is not None:
        raise ValueError(f"Ulysses does not support attention sinks, which {type(module).__name__} uses")


class _PerLength(torch.autograd.Function):
    """One call of torch's CPU flash kernel per run of equally long sequences.

    The kernel needs as many key heads as query heads. With grouped heads (GQA) the keys and values of a run are
    repeated for its call, and their gradients are summed after it.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lens: tuple[int, ...], scale: float
    ) -> torch.Tensor:
        output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
        sums = []
        for part, (q, k, v) in _split_runs(query, key, value, lens):
            result, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, True, scale=scale
            )
            output[0, part] = result.transpose(1, 2).flatten(0, 1)
            sums.append(log_sum)
        ctx.save_for_backward(query, key, value, output, *sums)
        ctx.lens, ctx.scale = lens, scale
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, *sums = ctx.saved_tensors
        grads = [torch.empty_like(tensor) for tensor in (query, key, value)]
        gradient, output = gradient.transpose(1, 2), output.transpose(1, 2)
        for (part, (q, k, v)), log_sum in zip(_split_runs(query, key, value, ctx.lens), sums, strict=True):
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _cut(gradient, part, len(q)), q, k, v, _cut(output, part, len(q)), log_sum, 0.0, True, scale=ctx.scale
            )
            for total, grad in zip(grads, parts, strict=True):
                total[0, :, part] = sum_groups(grad, total.shape[1]).transpose(0, 1).flatten(1, 2)
        return (*grads, None, None)


def _split_runs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lens: tuple[int, ...]
) -> Iterator[tuple[slice, _Tensors]]:
    """(tokens, fp32 tensors [n, heads, length, d]) for each run of n adjacent sequences of equal length.

    Keys and values are repeated to the number of query heads. The conversion to fp32 is exact. On a CPU without AMX
    tiles the kernel's backward pass is twice as fast in fp32 as in bf16; its forward pass is as fast.
    """
    groups = query.shape[1] // key.shape[1]
    first = 0
    for length, run in groupby(lens):
        count = len(list(run))
        part = slice(first, first + count * length)
        q, k, v = (_cut(tensor, part, count) for tensor in (query, key, value))
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        yield part, (q, k, v)
        first = part.stop


def _cut(rows: torch.Tensor, part: slice, count: int) -> torch.Tensor:
    """[1, heads, T, d] to [count, heads, length, d] in fp32."""
    return cut_sequences(rows, part, count).float()


def _attend_by_runs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lens: tuple[int, ...], scale: float | None
) -> torch.Tensor:
    """Attention in fp32, one call per run of equally long sequences: for GPUs and types without flash attention."""
    attend = torch.nn.functional.scaled_dot_product_attention
    parts = [attend(*qkv, is_causal=True, scale=scale) for _, qkv in _split_runs(query, key, value, lens)]
    return torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts]).unsqueeze(0).to(query.dtype)


def _attend_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lens: tuple[int, ...], scale: float | None
) -> torch.Tensor:
    """All sequences in one call of torch's variable-length flash attention. Not yet run on a GPU."""
    from torch.nn.attention.varlen import varlen_attn

    # In torch 2.11 and before, the function accepts grouped heads without an argument and has none for them.
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    starts = _place_starts(lens, query.device)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    longest = max(lens)
    output = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scale, window_size=(-1, 0), **grouped)
    assert isinstance(output, torch.Tensor), "no auxiliary output was asked for"
    return output.unsqueeze(0)


@lru_cache(maxsize=1)
def _place_starts(lens: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Token at which each sequence starts, and the end of the last: [n + 1], int32, on the device.

    All layers of a batch share one tensor, because a copy from pageable memory waits for everything queued on the GPU.
    """
    return torch.tensor((0, *accumulate(lens)), dtype=torch.int32, device=device)
