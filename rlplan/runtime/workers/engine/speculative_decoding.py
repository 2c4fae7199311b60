"""Speculative decoding on a CPU: a fix for a vLLM kernel that has no effect there.

vLLM 0.32 spreads each request's temperature over its draft tokens with `expand_kernel`. Its CPU replacement
(`cpu_triton_utils._expand_kernel_impl`) writes into an int64 copy of the result, drops that copy, and reads
temperatures as integers. Logits of draft tokens are then divided by uninitialized memory, so samples and log-probs are
wrong. Greedy requests have no temperature and are correct; CUDA uses the real kernel.
In: nothing. Out: vLLM with a working replacement, installed through its own mechanism (`KernelOverride`).
"""

from typing import Any

import torch


def fix_temperature_expansion() -> None:
    """Install the fix. Call it after an engine was created: creating one installs vLLM's own replacements.

    `register_kernels` cannot be called again: it scans all modules and fails at an object of llvmlite, which
    speculative decoding imports through Numba.
    """
    from vllm.triton_utils import HAS_TRITON
    from vllm.triton_utils.dispatcher import KernelOverride
    from vllm.v1.sample import rejection_sampler

    if not HAS_TRITON:
        launcher: Any = rejection_sampler._expand
        launcher.kernel = KernelOverride(launcher.kernel, expand)


def expand(
    output_ptr: torch.Tensor,
    input_ptr: torch.Tensor,
    cu_num_tokens_ptr: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int,  # noqa: N803 - vLLM's own name
) -> None:
    """Write each request's value once per token. cu_num_tokens_ptr: cumulative token counts, one per request."""
    values = torch.where(input_ptr == replace_from, torch.as_tensor(replace_to, dtype=input_ptr.dtype), input_ptr)
    counts = cu_num_tokens_ptr.diff(prepend=cu_num_tokens_ptr.new_zeros(1))
    output_ptr.copy_(values.repeat_interleave(counts.long()))
