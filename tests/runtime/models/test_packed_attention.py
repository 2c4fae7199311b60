"""Attention over packed sequences where a GPU has no flash attention for it: the same numbers by another way."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen

from rlplan.runtime.models.packed_attention import (
    _attend_by_runs,
    _attend_varlen,
    _PerLength,
    _place_starts,
    has_flash,
)


@pytest.mark.parametrize(
    ("dtype", "capability", "has"),
    [
        (torch.bfloat16, (9, 0), True),
        (torch.float16, (8, 0), True),
        (torch.float32, (9, 0), False),
        (torch.float16, (7, 5), False),
    ],
)
def test_flash_attention_is_taken_in_16_bits_from_compute_capability_8(
    dtype: torch.dtype, capability: tuple[int, int], has: bool
) -> None:
    assert has_flash(dtype, capability) is has


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_without_flash_attention_each_run_of_sequences_gives_the_same(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    lens = (5, 5, 9, 1)
    query = torch.randn(1, 4, sum(lens), 8, dtype=dtype, requires_grad=True)
    key, value = (torch.randn(1, 2, sum(lens), 8, dtype=dtype, requires_grad=True) for _ in range(2))
    output, expected = (way(query, key, value, lens, 0.3) for way in (_attend_by_runs, _PerLength.apply))
    assert output.dtype is dtype
    torch.testing.assert_close(output, expected)
    if dtype is torch.float16:
        return  # the CPU's way keeps its result in 16 bits for the way back, this one in 32
    weights = torch.randn_like(expected)
    for gradient, other in zip(
        *(torch.autograd.grad(each, (query, key, value), weights) for each in (output, expected)), strict=True
    ):
        torch.testing.assert_close(gradient, other)


def attend_as_torch_2_11(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """A plain form of the CUDA kernel: one sequence after the other, with the arguments of torch 2.11."""
    assert window_size == (-1, 0)
    assert cu_seq_q is cu_seq_k
    outputs = []
    for first, last in zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:], strict=False):
        assert last - first <= min(max_q, max_k)
        q, k, v = (tensor[first:last].transpose(0, 1) for tensor in (query, key, value))
        attend = torch.nn.functional.scaled_dot_product_attention
        outputs.append(attend(q, k, v, is_causal=True, scale=scale, enable_gqa=True).transpose(0, 1))
    return torch.cat(outputs)


def attend_as_torch_2_13(*tensors: Any, enable_gqa: bool = False, **options: Any) -> torch.Tensor:
    """The same kernel with the arguments of torch 2.13, which takes grouped heads only when asked."""
    assert enable_gqa or tensors[0].shape[1] == tensors[1].shape[1]
    return attend_as_torch_2_11(*tensors, **options)


@pytest.mark.parametrize("kernel", [attend_as_torch_2_11, attend_as_torch_2_13])
def test_flash_attention_of_every_accepted_torch_gives_the_same(
    kernel: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    lens = (5, 5, 9, 1)
    query = torch.randn(1, 4, sum(lens), 8)
    key, value = (torch.randn(1, 2, sum(lens), 8) for _ in range(2))
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    torch.testing.assert_close(
        _attend_varlen(query, key, value, lens, 0.3), _PerLength.apply(query, key, value, lens, 0.3)
    )


def test_all_layers_of_a_batch_share_one_copy_of_the_sequence_starts() -> None:
    _place_starts.cache_clear()
    starts = [_place_starts((3, 4, 2), torch.device("cpu")) for _ in range(24)]
    assert starts[0].tolist() == [0, 3, 7, 9]
    assert all(layer is starts[0] for layer in starts)
    assert _place_starts.cache_info().misses == 1
    assert _place_starts((9,), torch.device("cpu")).tolist() == [0, 9]
