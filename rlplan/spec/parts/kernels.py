"""The kernels of a trainer, where they differ from the framework's defaults.

In: `training.kernels` of a job. Out: frozen values. Left out: bytes (memory/), seconds (timing/training/kernels.py).
"""

from typing import Literal

from pydantic import Field

from rlplan.spec.base import Auto, Spec
from rlplan.spec.parts.workload import Count


class KernelsSpec(Spec):
    """Kernels of the trainer. rlplan's own runtime has fixed kernels, so that these keys serve plans for other
    frameworks.
    """

    attention: Literal["auto", "unfused", "flash_1", "flash_2", "flash_3", "flex"] = "auto"
    """Attention kernel. `flash_3`: any kernel written for the GPU generation (also cuDNN's); `unfused`: scores are
    stored."""
    is_compiled: bool = False
    """Whether layers are compiled with torch.compile, which fuses norms, rotary embeddings and activations."""
    matmuls: Literal["auto", "fp8", "fp8_rowwise", "mxfp8", "fp4"] = "auto"
    """Number format of the layers' matmuls; stored weights keep training.dtype. `auto`: training.dtype."""
    logit_rows: Count | None = Field(default=None)
    """Rows of logits that a row-chunked loss materializes at a time; None: 1,024."""
    overlaps_step: bool = True
    """Whether gradient reduction overlaps with the backward pass (Megatron's `overlap_grad_reduce`)."""
    overlaps_tp: bool = False
    """Whether tensor-parallel collectives overlap with matmuls (async TP)."""
    has_cuda_graphs: bool | Literal["router", "attention"] | Auto = "auto"
    """Whether expert layers run as CUDA graphs: all that can be captured, or one part of them; `auto`: no."""
    fuses_router: bool | Auto = "auto"
    """Whether the router runs in fused kernels (Megatron's `moe_router_fusion`); `auto`: no."""
    expert_dispatcher: Literal["auto", "alltoall", "deepep", "hybridep"] = "auto"
    """How tokens are dispatched to experts. `alltoall` (and `auto`) sends a row per expert, the others one per host."""
    overlaps_experts: bool = False
    """Whether token dispatch overlaps with the matmuls of another micro-batch (Megatron's expert overlap)."""
    expert_imbalance: float = Field(default=1.0, ge=1.0, le=64.0)
    """Rows of the busiest expert-parallel rank relative to the mean. Qwen3-30B-A3B on 16 ranks has about 1.5 in early
    pre-training (30.3 s a step; 24.7 s with forced balance), Moonlight on 8 hardly more than 1."""
