"""What vLLM is told on a CPU where attention is latent: kernels that are right there.

In: the policy. Out: arguments of `vllm.LLM` beside the plan's, for a run and for the probe of an architecture.
Source: vLLM 0.32.0.
"""

from typing import Any

from rlplan.spec.model import ModelSpec


def cpu_arguments(model: ModelSpec) -> dict[str, Any]:
    """What an engine on a CPU is told beside, where attention is latent.

    Torch rotates queries and keys: of the rotary part of the queries, which is a view, vLLM 0.32's kernel for CPUs
    (the custom operation `rotary_embedding`) turns other elements. And on a CPU with AMX vLLM would take an attention
    that knows neither fp32 nor blocks of 16.
    """
    if model.latent_attention is None:
        return {}
    rotated_by_torch = {"custom_ops": ["all", "-rotary_embedding"]}
    return {"attention_backend": "CPU_MLA", "compilation_config": rotated_by_torch}
