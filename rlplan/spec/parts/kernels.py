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
    has_cuda_graphs: bool | Auto = "auto"
    """Whether expert layers run as CUDA graphs; `auto`: no."""
    expert_dispatcher: Literal["auto", "alltoall", "deepep", "hybridep"] = "auto"
    """How tokens are dispatched to experts. `alltoall` (and `auto`) sends a row per expert, the others one per host."""
    overlaps_experts: bool = False
    """Whether token dispatch overlaps with the matmuls of another micro-batch (Megatron's expert overlap)."""
