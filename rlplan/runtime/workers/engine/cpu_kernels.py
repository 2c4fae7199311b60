"""Faster decoding on CPUs: vLLM's own RMS-norm kernel instead of torch operations, and no unused token ranks.

vLLM 0.32 ships an RMS-norm kernel for CPUs (`torch.ops._C`) but computes norms with seven or more torch operations.
Each operation costs a dispatch in a decoding step of a few rows; compilation would fuse them, but the runtime does not
compile. vLLM's kernel for gated SiLU is not used: in bf16 it rounds differently than the trainer. vLLM also computes
the rank of every sampled token, which reads all log-probs once more; rlplan does not use ranks.
In: nothing. Out: vLLM with that kernel, through its own extension point (`CustomOp.register_oot`); a process that may
use AMX tiles, as vLLM's kernel for 4-bit weights does.
"""

from typing import Any

import torch

WIDTH = 8
"""Elements that the CPU kernel processes at a time; row lengths must be a multiple of it."""


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

    vLLM 0.32 multiplies 4-bit weights with tiles where the CPU has them, but leaves the request to oneDNN. oneDNN makes
    it only before its own first use. Source: kernels/linear/mixed_precision/cpu.py, `_get_isa_hint`.
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
