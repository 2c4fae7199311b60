"""The kernels that a trainer runs, where they are not those that its target runs by itself.

In: `training.kernels` of a job. Out: frozen values. Left out: bytes (memory/), seconds (timing/training/kernels.py).
"""

from typing import Literal

from pydantic import Field

from rlplan.spec.base import Auto, Spec
from rlplan.spec.parts.workload import Count


class KernelsSpec(Spec):
    """Kernels of a trainer. rlplan's own runtime runs its own, so that these keys are for plans of other stacks."""

    attention: Literal["auto", "unfused", "flash_1", "flash_2", "flash_3", "flex"] = "auto"
    """The attention kernel: `flash_3` is any kernel written for the chip (cuDNN's too), `unfused` stores its scores."""
    is_compiled: bool = False
    """Whether layers pass through torch.compile, which fuses norms, rotary positions and activations."""
    matmuls: Literal["auto", "fp8", "fp8_rowwise", "mxfp8", "fp4"] = "auto"
    """Number format of the layers' matmuls; `auto` is training.dtype, which stored weights keep in any case."""
    logit_rows: Count | None = Field(default=None)
    """Rows of logits that a loss by rows or chunks has at a time; None for 1,024."""
    overlaps_step: bool = True
    """Whether a step's gradients are reduced beside passes (Megatron's `overlap_grad_reduce`)."""
    overlaps_tp: bool = False
    """Whether tensor parallel collectives run beside the matmuls that they feed (async TP)."""
    has_cuda_graphs: bool | Auto = "auto"
    """Whether layers of experts are launched as CUDA graphs; `auto` launches them one kernel at a time."""
    expert_dispatcher: Literal["auto", "alltoall", "deepep", "hybridep"] = "auto"
    """Who sends rows to experts: `alltoall` (and `auto`) one for each expert, the others one for each host."""
    overlaps_experts: bool = False
    """Whether rows travel to experts beside another micro-batch's matmuls (Megatron's expert overlap)."""
