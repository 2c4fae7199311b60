"""A kernel of vLLM's own that it leaves aside on a CPU, and a count that it makes for nobody.

vLLM 0.32 was built with a kernel for RMS norms on CPUs (`torch.ops._C`) and computes them in torch's operations, seven
or more, each of which costs a decoding step of a few rows its dispatch: with compilation they would be fused, and the
runtime has none. Its kernel for gated SiLU rounds otherwise than the trainer in bf16, and stays aside. And for the
log-prob of every sampled token it counts the words that are as likely, which reads all log-probs once more and which no
part of ours reads.
In: nothing. Out: vLLM with that kernel, by its own means for such replacements (`CustomOp.register_oot`); a process
that may use the CPU's tiles, as its kernel for weights in 4 bits does.
"""

from typing import Any

import torch

WIDTH = 8
"""The kernel for CPUs takes so many elements at a time, and refuses rows that are no multiple of it."""


def take_cpu_kernels() -> None:
    """Call it before an engine is made; once more does nothing. On a CPU only: a GPU takes its own kernels."""
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.v1.sample.sampler import Sampler

    if "RMSNorm" in op_registry_oot:
        return

    class CpuRMSNorm(RMSNorm):
        """In vLLM's kernel, wherever that computes what is asked for."""

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
    Sampler.gather_logprobs = staticmethod(_unranked(Sampler.gather_logprobs))


def allow_tiles() -> None:
    """Ask the system for AMX tiles, once a process: without it their first use ends the process (SIGILL).

    vLLM 0.32 multiplies 4 bits with tiles where the CPU has them, and leaves the asking to oneDNN, which does it only
    where it multiplies with them itself first. Source: kernels/linear/mixed_precision/cpu.py, `_get_isa_hint`.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def _unranked(gather: Any) -> Any:
    """The sampled tokens' log-probs alone, where no others are asked for; their ranks stay 0, which is none."""
    from vllm.v1.outputs import LogprobsTensors

    def gather_logprobs(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
        if num_logprobs:
            return gather(logprobs, num_logprobs, token_ids)
        chosen = token_ids.unsqueeze(-1)
        return LogprobsTensors(chosen.to(torch.int32), logprobs.gather(-1, chosen), torch.zeros_like(token_ids))

    return gather_logprobs
