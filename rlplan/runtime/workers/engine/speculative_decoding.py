"""Speculative decoding on a CPU: a replacement for a kernel of vLLM's that does nothing there.

vLLM 0.32 spreads each request's temperature over its draft tokens with `expand_kernel`. Its stand-in for CPUs
(`cpu_triton_utils._expand_kernel_impl`) writes into an int64 copy of the result and drops it, and reads temperatures as
whole numbers. So logits of draft tokens are divided by whatever lay in fresh memory, and both what is sampled and its
log-prob are wrong. Greedy requests have no temperature and are right; CUDA has the real kernel.
In: nothing. Out: vLLM with a stand-in that works, by the means that vLLM has for stand-ins (`KernelOverride`).
"""

from typing import Any

import torch


def fix_temperature_expansion() -> None:
    """Call it after an engine was made, for vLLM puts its own stand-ins in place whenever one is.

    `register_kernels` itself cannot be called once Numba is loaded, which speculative decoding loads: it looks through
    all modules, and fails at an object of llvmlite's.
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
    """Write each request's value for each of its tokens. cu_num_tokens_ptr: where the tokens of each request end."""
    values = torch.where(input_ptr == replace_from, torch.as_tensor(replace_to, dtype=input_ptr.dtype), input_ptr)
    counts = cu_num_tokens_ptr.diff(prepend=cu_num_tokens_ptr.new_zeros(1))
    output_ptr.copy_(values.repeat_interleave(counts.long()))
