"""Attention over packed sequences: several sequences in one row, none of which sees another.

In: queries, keys and values of one row, and the sequences' lengths. Out: what each sequence alone would have given.
Left out: dropout, chunked attention: refused.

Registered with transformers under `PACKED`; the lengths travel through the model's keyword arguments. On a CPU
sequences go through torch's own flash kernel, neighbours of one length in one call, without a tensor of T squared and
without padding. Windows shorter than a sequence, capped scores and sinks, which that kernel lacks, are computed a few
rows at a time (attention_by_rows.py).
On CUDA `torch.nn.attention.varlen` does all sequences in one call, in fp32 or on older GPUs torch's other kernels do as
a CPU does: not yet run on a GPU.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch

from rlplan.runtime.device.layer import device_of
from rlplan.runtime.models.attention_by_rows import Scores, attend_by_rows
from rlplan.runtime.models.sequence_parallel import Sharing

PACKED = "rlplan_packed"
"""The name under which transformers knows this attention."""

_Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def register_packed_attention() -> None:
    """Make `attn_implementation=PACKED` known to transformers. It asks for no mask: lengths say everything."""
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

    options: `sharing`, where other ranks have the rest of the row's tokens; each attends to all of them with some of
    the heads. The rest is what transformers passes to any attention.
    """
    sharing: Sharing | None = options.pop("sharing", None)
    if sharing is not None:
        query, key, value = map(sharing.to_heads, (query, key, value))
    lens = sequence_lens or (query.shape[2],)
    window, cap, sinks = (options.get(name) for name in ("sliding_window", "softcap", "s_aux"))
    _check(module, query, lens, options, is_shared=sharing is not None)
    width, missing = value.shape[-1], query.shape[-1] - value.shape[-1]
    if missing:  # latent attention: no kernel takes two sizes
        value = torch.nn.functional.pad(value, (0, missing))
    device = device_of(query.device)
    if cap is not None or sinks is not None or (window is not None and max(lens) > window):
        score = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, window, cap)
        output = attend_by_rows(query, key, value, sinks, lens, score)
    elif device is None or query.device.type == "cpu":
        output = _PerLength.apply(query, key, value, lens, scaling)
    elif has_flash(query.dtype, device.capability()):
        output = _varlen(query, key, value, lens, scaling)
    else:
        output = _run_by_run(query, key, value, lens, scaling)
    if missing:
        output = output[..., :width]
    return output if sharing is None else sharing.to_tokens(output), None


def has_flash(dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Whether a GPU has torch's variable-length flash attention: for 16 bits, from compute capability 8.0."""
    return dtype in (torch.float16, torch.bfloat16) and capability >= (8, 0)


def _check(
    module: Any, query: torch.Tensor, lens: tuple[int, ...], options: dict[str, Any], *, is_shared: bool
) -> None:
    if query.shape[0] != 1 or sum(lens) != query.shape[2]:
        raise ValueError(f"packed attention takes one row of {sum(lens)} tokens, not {tuple(query.shape)}")
    if options.get("dropout"):
        raise ValueError(f"packed attention has no dropout, which {type(module).__name__} uses")
    if is_shared and options.get("s_aux") is not None:
        raise ValueError(f"ranks that share a pass have no sinks of their heads, which {type(module).__name__} uses")


class _PerLength(torch.autograd.Function):
    """One call of torch's CPU flash kernel for each run of sequences of one length; results are written in place.

    Grouped heads: the kernel takes as many key heads as query heads, so keys and values of a run are repeated for its
    call, and their gradients summed after it.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lens: tuple[int, ...], scale: float
    ) -> torch.Tensor:
        output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
        sums = []
        for part, (q, k, v) in _parts(query, key, value, lens):
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
        groups = query.shape[1] // key.shape[1]
        for (part, (q, k, v)), log_sum in zip(_parts(query, key, value, ctx.lens), sums, strict=True):
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _cut(gradient, part, len(q)), q, k, v, _cut(output, part, len(q)), log_sum, 0.0, True, scale=ctx.scale
            )
            for whole, one in zip(grads, parts, strict=True):
                summed = one if one.shape[1] == whole.shape[1] else one.unflatten(1, (-1, groups)).sum(2)
                whole[0, :, part] = summed.transpose(0, 1).flatten(1, 2)
        return (*grads, None, None)


def _parts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lens: tuple[int, ...]
) -> Iterator[tuple[slice, _Tensors]]:
    """(where, tensors [n, heads, length, d]) of each run of n neighbours of one length, in fp32.

    Keys and values are repeated to the queries' heads.

    In fp32 the kernel is twice as fast backward as in bf16 on a CPU without tiles, as fast forward, and exact.
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
    cut: torch.Tensor = rows[0, :, part].unflatten(1, (count, -1))
    return cut.transpose(0, 1).float()


def _run_by_run(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lens: tuple[int, ...], scale: float | None
) -> torch.Tensor:
    """In fp32, one call for each run of sequences of one length: for GPUs and formats without flash attention."""
    attend = torch.nn.functional.scaled_dot_product_attention
    parts = [attend(*qkv, is_causal=True, scale=scale) for _, qkv in _parts(query, key, value, lens)]
    return torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts]).unsqueeze(0).to(query.dtype)


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lens: tuple[int, ...], scale: float | None
) -> torch.Tensor:
    """All sequences in one call of torch's variable-length flash attention. Not yet run on a GPU."""
    from torch.nn.attention.varlen import varlen_attn

    starts = torch.tensor((0, *lens), device=query.device, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    longest = max(lens)
    output = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scale, window_size=(-1, 0), enable_gqa=True)
    assert isinstance(output, torch.Tensor), "no auxiliary output was asked for"
    return output.unsqueeze(0)
