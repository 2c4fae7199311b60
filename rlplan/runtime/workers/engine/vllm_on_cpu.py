"""Changes to vLLM 0.32.0 on a CPU: faster kernels, and workarounds for kernels that are wrong.

In: nothing, or the policy. Out: vLLM with these changes, made through its own extension points; extra `vllm.LLM`
arguments, for runs and for the probe; a process that may use AMX tiles.

vLLM ships an RMS-norm kernel for CPUs (`torch.ops._C`) but computes norms with seven or more torch operations. Each
operation costs a dispatch, which matters in a decoding step of a few rows. Compilation would fuse them, but the runtime
does not compile. vLLM's kernel for gated SiLU is not used, because in bf16 it rounds differently than the trainer. vLLM
also computes the rank of every sampled token, which reads all log-probs once more; rlplan does not use ranks.
"""

from typing import Any

import torch

from rlplan.spec.model import ModelSpec

WIDTH = 8
"""Elements that the CPU kernel processes at a time; row lengths must be a multiple of it."""


def choose_cpu_arguments(model: ModelSpec) -> dict[str, Any]:
    """Extra arguments of an engine on a CPU; empty unless the model has latent attention."""
    if model.latent_attention is None:
        return {}
    # Torch must rotate queries and keys. The rotary part of the queries is a view, and vLLM 0.32's CPU kernel
    # (`rotary_embedding`) rotates the wrong elements of a view.
    rotated_by_torch = {"custom_ops": ["all", "-rotary_embedding"]}
    # On a CPU with AMX vLLM would choose an attention backend that supports neither fp32 nor blocks of 16 tokens.
    return {"attention_backend": "CPU_MLA", "compilation_config": rotated_by_torch}


def register_cpu_kernels() -> None:
    """Register the kernel; idempotent. Call it before an engine is created, and on a CPU only."""
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.v1.sample.sampler import Sampler

    if "RMSNorm" in op_registry_oot:
        return

    class CpuRMSNorm(RMSNorm):
        """RMS norm in vLLM's CPU kernel where it supports the shapes, else in torch."""

        def forward_cpu(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
            weight = self.weight.data
            is_whole = self.has_weight and self.variance_size_override is None
            if not (is_whole and weight.dtype is x.dtype and not x.shape[-1] % WIDTH):
                return self.forward_native(x, residual)
            if residual is None:
                output = torch.empty(x.shape, dtype=x.dtype)
                torch.ops._C.rms_norm(output, x.contiguous(), weight, self.variance_epsilon)
                return output
            if not (x.is_contiguous() and residual.is_contiguous()):
                return self.forward_native(x, residual)
            torch.ops._C.fused_add_rms_norm(x, residual, weight, self.variance_epsilon)
            return x, residual

    CustomOp.register_oot(CpuRMSNorm, name="RMSNorm")
    Sampler.gather_logprobs = staticmethod(_skip_ranks(Sampler.gather_logprobs))


def request_amx_tiles() -> None:
    """Request AMX tiles from the kernel for this process; without it their first use ends the process (SIGILL).

    vLLM 0.32 multiplies 4-bit weights with tiles where the CPU has them, but leaves the request to oneDNN. That library
    requests tiles only before its own first use. Source: kernels/linear/mixed_precision/cpu.py, `_get_isa_hint`.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def _skip_ranks(gather: Any) -> Any:
    """Wrap vLLM's `gather_logprobs`: without further log-probs requested, return rank 0 (no rank) for each token."""
    from vllm.v1.outputs import LogprobsTensors

    def gather_logprobs(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
        if num_logprobs:
            return gather(logprobs, num_logprobs, token_ids)
        chosen = token_ids.unsqueeze(-1)
        return LogprobsTensors(chosen.to(torch.int32), logprobs.gather(-1, chosen), torch.zeros_like(token_ids))

    return gather_logprobs


def fix_temperature_expansion() -> None:
    """Fix the temperatures of speculative decoding. Call it after an engine was created: that installs vLLM's kernels.

    vLLM 0.32 spreads each request's temperature over its draft tokens with `expand_kernel`. Its CPU replacement
    (`cpu_triton_utils._expand_kernel_impl`) writes into an int64 copy of the result, drops that copy, and reads
    temperatures as integers. Logits of draft tokens are then divided by uninitialized memory, so samples and log-probs
    are wrong. Greedy requests have no temperature and are correct; CUDA uses the real kernel.
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
