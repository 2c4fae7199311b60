"""Attention over packed sequences where a GPU has no flash attention for it: the same numbers by another way."""

import pytest
import torch

from rlplan.runtime.models.packed_attention import _attend_by_runs, _PerLength, has_flash


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
