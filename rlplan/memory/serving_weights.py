"""Weights of one vLLM rank: parameters as the engine pads, fuses and quantises them, and the buffers beside them.

In: a ModelSpec, a Layout and a checkpoint's quantisation. Out: bytes. Left out: repacked copies while loading.
Symbols: V vocab_size, h hidden_size, Ie width of an expert, d rotary part of a head.
"""

from rlplan.memory import quantization
from rlplan.memory.quantization import Quantization, weight_bytes
from rlplan.spec.model import ModelSpec, Parameter
from rlplan.spec.models.dimensions import Layout
from rlplan.spec.models.parts import FULL, SLIDING
from rlplan.spec.models.shards import stage_tensors
from rlplan.spec.models.tensors import Component
from rlplan.units import round_up

VOCAB_MULTIPLE = 64
"""Rows that the vocabulary is padded to. Source: vLLM 0.32.0 layers/vocab_parallel_embedding.py."""
WITHOUT_ROPE = ("OPTForCausalLM", "GPT2LMHeadModel", "MPTForCausalLM", "MptForCausalLM", "BloomForCausalLM")
"""Learned positions or ALiBi: no rotary table."""


def engine_layout(tp: int = 1, pp: int = 1, ep: int = 1) -> Layout:
    """How vLLM cuts a model. ep: above 1 where expert parallelism is on."""
    return Layout(tp=tp, pp=pp, ep=ep, vocab_multiple=VOCAB_MULTIPLE)


def engine_weight_bytes(
    model: ModelSpec, layout: Layout, element_bytes: int, scheme: Quantization | None = None, stage: int = 0
) -> int:
    """Bytes of the parameters of one rank of a stage.

    Counts: each tensor of the rank in its format; MXFP4 experts padded to what the kernels take.
    Source: the format of each tensor (quantization.py). Differs: `Model loading took` also has the rotary table.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> engine_weight_bytes(find_model("meta-llama/Llama-3.1-8B"), engine_layout(), 2)  # 2 * 8,030,261,248
    16060522496
    """
    tensors = stage_tensors(model, layout, stage)
    if scheme is not None and scheme.form == quantization.MXFP4 and model.experts:
        width = model.experts.intermediate_size // (layout.tp if layout.ep == 1 else 1)
        tensors = tuple(_padded(tensor, model.hidden_size, width) for tensor in tensors)
    return weight_bytes(tensors, element_bytes, scheme)


def _padded(tensor: Parameter, hidden: int, width: int) -> Parameter:
    """An MXFP4 expert tensor as its kernels want it: h to a multiple of 256, Ie to one of 128.

    Source: vLLM 0.32.0 fused_moe/oracle/mxfp4.py, Marlin and TRT-LLM back ends. Assumes: stacked experts (gpt-oss).
    """
    if tensor.component is not Component.EXPERTS:
        return tensor
    wide_hidden, wide = round_up(hidden, 256), round_up(width, 128)
    first, *inner = tensor.shape
    if "down" in tensor.name:
        shape = (first, wide, wide_hidden) if len(inner) == 2 else (first, wide_hidden)
    else:
        shape = (first, wide_hidden, 2 * wide) if len(inner) == 2 else (first, 2 * wide)
    return Parameter(tensor.name, shape, tensor.component, tensor.is_buffer, tensor.is_linear)


def rope_table_bytes(model: ModelSpec, element_bytes: int) -> int:
    """Bytes of the rotary table, one for all layers of a kind on every rank.

    Counts: max_position_embeddings * d * e, twice where sliding layers rotate at another base.
    Source: vLLM 0.32.0 layers/rotary_embedding/base.py. Assumes: the whole head rotates (Phi, GLM and Qwen3-Next rotate
    a part, which leaves at most 24 MiB too much).

    >>> from rlplan.spec.models.catalogue import find_model
    >>> rope_table_bytes(find_model("meta-llama/Llama-3.1-8B"), 2)  # 131072 * 128 * 2
    33554432
    """
    if model.architecture in WITHOUT_ROPE:
        return 0
    width = model.latent_attention.rope_head_dim if model.latent_attention else model.head_dim
    has_two = model.architecture.startswith("Gemma3") and {FULL, SLIDING} <= set(model.attention_kinds)
    return model.max_position_embeddings * width * element_bytes * (2 if has_two else 1)
