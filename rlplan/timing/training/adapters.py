"""Additional work of LoRA adapters, and of a frozen 4-bit base, in a pass.

In: a ModelSpec and its adapters. Out: FLOPs and bytes per token, bytes per pass. Left out: dropout, casts of adapters
that are kept in fp32, scales of 4-bit weights.

Symbols: r rank, e = 2 bytes per element.
"""

from functools import lru_cache

from rlplan.memory.model.quantization import NF4_DOUBLE
from rlplan.spec.model import Component, ModelSpec, Parameter
from rlplan.spec.models.adapters import list_lora_parameters
from rlplan.spec.parts.training import LoraSpec
from rlplan.timing.training.elementwise import ELEMENT_BYTES

DEQUANTIZED = NF4_DOUBLE.bits / 8 + ELEMENT_BYTES
"""Bytes per weight to dequantize it to 16 bits, read and written, before every matmul with it."""


@lru_cache(maxsize=256)
def adapter_flops(model: ModelSpec, lora: LoraSpec) -> float:
    """FLOPs per token of the matmuls of all adapters, forward.

    Counts: 2 r (in + out) per layer. Source: LoRA, arXiv 2106.09685, section 4.1.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> llama = find_model("meta-llama/Llama-3.2-3B")
    >>> adapter_flops(llama, LoraSpec(rank=32, target_modules=("q_proj",)))  # 28 layers * 2 * 32 * (3072 + 3072)
    11010048.0
    """
    tensors = list_lora_parameters(model, lora.rank, lora.target_modules)
    return 2.0 * sum(tensor.numel * _compute_active_share(model, tensor) for tensor in tensors)


def _compute_active_share(model: ModelSpec, tensor: Parameter) -> float:
    """Share of a tensor that each token is multiplied with: the active experts' share, or all of it."""
    experts = model.experts if tensor.component is Component.EXPERTS else None
    return experts.num_active / experts.num_experts if experts else 1.0


@lru_cache(maxsize=256)
def adapter_bytes(model: ModelSpec, lora: LoraSpec) -> float:
    """Bytes per token that adapters read and write, forward; thin matmuls are limited by memory bandwidth.

    Counts: e (in + 2 r + 6 out) per layer: the input read, r written and read, the output written, scaled (2) and
    added (3). Source: PEFT 0.18 tuners/lora/layer.py, `result + lora_B(lora_A(x)) * scaling`, one kernel per operator.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> llama = find_model("meta-llama/Llama-3.2-3B")
    >>> adapter_bytes(llama, LoraSpec(rank=32, target_modules=("q_proj",)))  # 28 layers * 2 * (3072 + 64 + 6 * 3072)
    1207808.0
    """
    total = 0.0
    for tensor in list_lora_parameters(model, lora.rank, lora.target_modules):
        out, into = tensor.shape
        if tensor.component is Component.EXPERTS and model.experts is not None:
            out = out // model.experts.num_experts
            total += model.experts.num_active * (into + out if "lora_A" in tensor.name else into + 6 * out)
            continue
        total += into + out if "lora_A" in tensor.name else into + 6 * out
    return ELEMENT_BYTES * total
