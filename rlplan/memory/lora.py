"""Adapters: the parameters that LoRA trains beside a frozen model, and the bytes of a quantised base.

In: the model's parameters and the adapted projections. Out: parameters, bytes. Left out: DoRA, adapters of embeddings.

Symbols: r rank, in and out the two sides of a projection.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from rlplan.spec.model import Parameter
from rlplan.units import ceil_div

ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_TARGETS = ("gate_proj", "up_proj", "down_proj")
ALL_TARGETS = ATTENTION_TARGETS + MLP_TARGETS


def adapter_parameters(parameters: Iterable[Parameter], rank: int, targets: tuple[str, ...]) -> tuple[Parameter, ...]:
    """The two matrices that LoRA adds to every projection whose name ends in one of the targets.

    Counts: r * (in + out) for each. Source: Hu et al. 2021, section 4.1; PEFT 0.18 tuners/lora/layer.py.

    >>> from rlplan.spec.model import Parameter
    >>> weight = Parameter("model.layers.0.self_attn.q_proj.weight", (64, 32))
    >>> [adapter.shape for adapter in adapter_parameters([weight], 8, ("q_proj",))]
    [(8, 32), (64, 8)]
    """
    adapters = []
    for parameter in parameters:
        module, _, kind = parameter.name.rpartition(".")
        if kind == "weight" and len(parameter.shape) == 2 and module.endswith(targets):
            out_size, in_size = parameter.shape
            adapters.append(Parameter(f"{module}.lora_A.weight", (rank, in_size)))
            adapters.append(Parameter(f"{module}.lora_B.weight", (out_size, rank)))
    return tuple(adapters)


@dataclass(frozen=True)
class Nf4:
    """4-bit normal floats in blocks. double: the scales are quantised too, in groups of `scale_group`.

    Source: bitsandbytes 0.49, functional.py (`quantize_4bit`: blocksize 64, double quantisation in blocks of 256).
    """

    double: bool
    block: int = 64
    scale_group: int = 256

    def num_bytes(self, numel: int) -> int:
        """Bytes of one weight of this many elements.

        Counts: half a byte an element; a scale of 4 bytes a block of 64, or of 1 byte and 4 bytes a group of 256.

        >>> Nf4(double=False).num_bytes(65536), Nf4(double=True).num_bytes(65536)
        (36864, 33808)
        """
        blocks = ceil_div(numel, self.block)
        scales = blocks + 4 * ceil_div(blocks, self.scale_group) if self.double else 4 * blocks
        return ceil_div(numel, 2) + scales


def is_quantized_weight(parameter: Parameter) -> bool:
    """Whether a 4-bit loader quantises this tensor: the linear layers inside the blocks, not tables, head or norms.

    Source: transformers 5.19 quantizers (`lm_head` and embeddings are skipped).
    """
    return len(parameter.shape) >= 2 and ".layers." in parameter.name


def frozen_base_bytes(parameters: Iterable[Parameter], element_bytes: int, quantization: Nf4 | None) -> int:
    """Bytes of the frozen model under adapters: quantised linear layers, everything else as it was.

    >>> from rlplan.spec.model import Parameter
    >>> base = [Parameter("model.embed_tokens.weight", (64, 64)), Parameter("model.layers.0.q_proj.weight", (64, 64))]
    >>> frozen_base_bytes(base, 2, None), frozen_base_bytes(base, 2, Nf4(double=False))
    (16384, 10496)
    """
    return sum(
        quantization.num_bytes(parameter.numel)
        if quantization is not None and is_quantized_weight(parameter)
        else parameter.numel * element_bytes
        for parameter in parameters
    )
