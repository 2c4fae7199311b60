"""Weights of one vLLM rank on a GPU: parameters as the engine cuts, pads and quantizes them.

In: a ModelSpec, a Layout and a checkpoint's quantization. Out: bytes. Left out: buffers and fused tensors (tensors.py;
fusing changes no bytes); repacked copies while loading.
Symbols: h hidden_size, Ie width of an expert.
"""

from functools import lru_cache
from itertools import compress

from rlplan.memory.model import quantization
from rlplan.memory.model.quantization import Quantization
from rlplan.memory.serving.tensors import VOCABULARY_MULTIPLE, stored_bytes
from rlplan.spec.model import ModelSpec, Parameter
from rlplan.spec.models.dimensions import Layout
from rlplan.spec.models.shards import list_stage_tensors
from rlplan.spec.models.tensors import Component
from rlplan.units import round_up


def build_engine_layout(tp: int = 1, pp: int = 1, ep: int = 1, attention_dp: int = 1) -> Layout:
    """The Layout in which vLLM cuts a model. ep: tp x attention_dp where expert parallelism is on, otherwise 1."""
    return Layout(tp=tp, pp=pp, ep=ep, attention_dp=attention_dp, vocab_multiple=VOCABULARY_MULTIPLE)


@lru_cache(maxsize=512)
def engine_weight_bytes(
    model: ModelSpec, layout: Layout, element_bytes: int, scheme: Quantization | None = None, stage: int = 0
) -> int:
    """Bytes of the parameters of one rank of a stage.

    Counts: each tensor of the rank in its format; MXFP4 experts padded as their kernels require.
    Source: the format of each tensor (quantization.py). Differs: `Model loading took` also has the rotary table.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> engine_weight_bytes(find_model("meta-llama/Llama-3.1-8B"), build_engine_layout(), 2)  # 2 * 8,030,261,248
    16060522496
    """
    tensors = list_stage_tensors(model, layout, stage)
    if scheme is not None and scheme.form == quantization.MXFP4 and model.experts:
        width = model.experts.intermediate_size // (layout.tp if layout.ep == 1 else 1)
        tensors = tuple(_pad_experts(tensor, model.hidden_size, width) for tensor in tensors)
    if scheme is None:
        return stored_bytes(tensors, element_bytes)
    covered = [scheme.covers(tensor) for tensor in tensors]
    plain = [tensor for tensor, is_covered in zip(tensors, covered, strict=True) if not is_covered]
    packed = sum(scheme.form.num_bytes(tensor.shape) for tensor in compress(tensors, covered))
    return stored_bytes(plain, element_bytes) + packed


def _pad_experts(tensor: Parameter, hidden: int, width: int) -> Parameter:
    """Pad an MXFP4 expert tensor as its kernels require: h to a multiple of 256, Ie to one of 128.

    Source: vLLM 0.32.0 fused_moe/oracle/mxfp4.py, Marlin and TRT-LLM back ends. Assumes: stacked experts (gpt-oss).
    """
    if tensor.component is not Component.EXPERTS:
        return tensor
    padded_hidden, padded_width = round_up(hidden, 256), round_up(width, 128)
    first, *inner = tensor.shape
    if "down" in tensor.name:
        shape = (first, padded_width, padded_hidden) if len(inner) == 2 else (first, padded_hidden)
    else:
        shape = (first, padded_hidden, 2 * padded_width) if len(inner) == 2 else (first, 2 * padded_width)
    return Parameter(tensor.name, shape, tensor.component, tensor.is_buffer, tensor.is_linear)
