"""vLLM's own kernel for norms on a CPU: it computes what its operations in torch do."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rlplan.runtime.workers.engine.vllm_on_cpu import register_cpu_kernels

pytestmark = pytest.mark.engine
ROUNDINGS = {torch.float32: 4, torch.bfloat16: 2}
"""Units in the last place between two orders of the same products."""


@pytest.fixture(scope="module")
def layers() -> Iterator[Any]:
    """vLLM's layers, as they are made in an engine."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import layernorm

    register_cpu_kernels()
    register_cpu_kernels()  # as a second engine in a process does
    with set_current_vllm_config(VllmConfig()):
        yield {"norm": layernorm.RMSNorm}


@pytest.mark.parametrize("dtype", ROUNDINGS)
@pytest.mark.parametrize("width", [64, 72, 33])
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_norm_is_that_of_torchs_operations(layers: Any, dtype: torch.dtype, width: int, *, is_cut: bool) -> None:
    """Also of heads that were cut from a row of queries, keys and values; and of widths that the kernel cannot take."""
    norm = layers["norm"](width, eps=1e-6, dtype=dtype)
    norm.weight.data.copy_(torch.randn(width))
    rows = torch.randn(5, 4 * width).to(dtype)
    x = (rows[:, width:] if is_cut else rows[:, width:].contiguous()).unflatten(1, (3, width))
    near(norm.forward_cpu(x), norm.forward_native(x))


@pytest.mark.parametrize("dtype", ROUNDINGS)
@pytest.mark.parametrize("width", [64, 33])
def test_a_norm_adds_the_residual_first_and_hands_the_sum_on(layers: Any, dtype: torch.dtype, width: int) -> None:
    norm = layers["norm"](width, eps=1e-6, dtype=dtype)
    x, residual = torch.randn(2, 5, width).to(dtype)
    expected, expected_sum = norm.forward_native(x.clone(), residual.clone())
    actual, found_sum = norm.forward_cpu(x.clone(), residual.clone())
    near(actual, expected)
    assert torch.equal(found_sum, expected_sum)


def test_sampled_tokens_come_with_their_log_probs_and_without_ranks(layers: Any) -> None:
    from vllm.v1.sample.sampler import Sampler

    logprobs, tokens = torch.randn(3, 10).log_softmax(-1), torch.tensor([4, 0, 9])
    actual = Sampler.gather_logprobs(logprobs, 0, tokens)
    assert actual.logprob_token_ids.tolist() == [[4], [0], [9]]
    assert torch.equal(actual.logprobs[:, 0], logprobs[range(3), tokens])
    assert actual.selected_token_ranks.tolist() == [0, 0, 0]


def near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The same but for a few roundings."""
    tolerance = ROUNDINGS[expected.dtype] * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
