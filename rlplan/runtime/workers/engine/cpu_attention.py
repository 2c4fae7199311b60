"""Attention kernels that vLLM must use on a CPU for models with latent attention (MLA).

In: the policy. Out: extra `vllm.LLM` arguments, for a run and for the probe of an architecture.
Source: vLLM 0.32.0.
"""

from typing import Any

from rlplan.spec.model import ModelSpec


def choose_cpu_arguments(model: ModelSpec) -> dict[str, Any]:
    """Extra arguments of an engine on a CPU; empty unless the model has latent attention."""
    if model.latent_attention is None:
        return {}
    # Torch rotates queries and keys: the rotary part of the queries is a view, and vLLM 0.32's CPU kernel (the custom
    # operation `rotary_embedding`) rotates the wrong elements of a view.
    rotated_by_torch = {"custom_ops": ["all", "-rotary_embedding"]}
    # On a CPU with AMX vLLM would choose an attention backend that supports neither fp32 nor blocks of 16 tokens.
    return {"attention_backend": "CPU_MLA", "compilation_config": rotated_by_torch}
