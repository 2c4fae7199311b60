"""Weights of one vLLM rank: the tensors that it allocates for a model, cut, padded, fused and quantized.

In: a ModelSpec, a Layout, a checkpoint's quantization. Out: tensors, bytes. Left out: packed weights
(generation.py), rotary tables of partly rotated heads, repacked copies while loading, architectures that vLLM 0.32.0
runs with transformers' modules (OLMo 2, Phi, GPT-NeoX, StarCoder 2 and others: same parameters, other buffers).
Source: vLLM 0.32.0, model_executor/models/*.py (`packed_modules_mapping`), layers/vocab_parallel_embedding.py,
layers/rotary_embedding/base.py; the tests compare every tensor with live engines.

Symbols: e bytes an element, P max_position_embeddings, d head_dim, h hidden_size, Ie width of an expert.
"""

from collections.abc import Iterable
from functools import lru_cache
from itertools import compress

from rlplan.memory.model import quantization
from rlplan.memory.model.quantization import Quantization
from rlplan.spec.model import Component, Layout, ModelSpec, Parameter
from rlplan.spec.models.shards import list_stage_tensors
from rlplan.units import round_up

VOCABULARY_MULTIPLE = 64
"""`DEFAULT_VOCAB_PADDING_SIZE`: rows of the vocabulary tables are padded to a multiple of it before they are cut."""

_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "q_a_proj": "fused_qkv_a_proj",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj",
    "in_proj_qkv": "in_proj_qkvz",
    "in_proj_z": "in_proj_qkvz",
    "in_proj_b": "in_proj_ba",
    "in_proj_a": "in_proj_ba",
}
_STAYS_A_TENSOR = "kv_b_proj.weight"
"""MLA splits this weight into the two matrices of its attention, so it is never packed."""

_OWN_BASE_IN_A_WINDOW = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
"""Architectures whose sliding layers have another rotary base than the full ones, and so a second table."""

_FP32_ROTARY = ("GptOssForCausalLM",)
_LEARNED_POSITIONS = ("embed_positions.weight", "wpe.weight")
_WITH_ALIBI = ("MPTForCausalLM", "MptForCausalLM", "BloomForCausalLM")


@lru_cache(maxsize=8)
def list_engine_tensors(model: ModelSpec, tp: int = 1) -> tuple[Parameter, ...]:
    """Every parameter of one rank, by Hugging Face's name, or vLLM's if it fuses several. Raises: SpecError.

    Counts: `list_rank_tensors`, projections of the same input stacked along their first dimension.
    Assumes: experts are cut over tp, without expert parallelism. Differs: vLLM transposes GPT-2's projections.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> model = find_model("meta-llama/Llama-3.1-8B")
    >>> rows = {tensor.name: tensor.shape for tensor in list_engine_tensors(model, tp=16)}
    >>> rows["model.layers.0.self_attn.qkv_proj.weight"]  # 32 heads over 16 ranks, one of 8 key heads: (2+1+1)*128
    (512, 4096)
    """
    return tuple(fuse_tensors(model.list_rank_tensors(Layout(tp=tp, vocab_multiple=VOCABULARY_MULTIPLE))))


def fuse_tensors(tensors: Iterable[Parameter]) -> list[Parameter]:
    """Fuse tensors whose modules have the same fused name and parent. A single one keeps its name."""
    return [
        _stack(name, members) if len(members) > 1 else members[0] for name, members in _group_tensors(tensors).items()
    ]


def _group_tensors(tensors: Iterable[Parameter]) -> dict[str, list[Parameter]]:
    """Tensors by their fused name, in the order in which they are stacked."""
    groups: dict[str, list[Parameter]] = {}
    for tensor in tensors:
        path, _, leaf = tensor.name.rpartition(".")
        parent, dot, module = path.rpartition(".")
        groups.setdefault(f"{parent}{dot}{_FUSED.get(module, module)}.{leaf}", []).append(tensor)
    return groups


def list_fused_members(model: ModelSpec) -> tuple[tuple[Parameter, tuple[Parameter, ...]], ...]:
    """(tensor, its members) for each of `list_engine_tensors` without tensor parallelism."""
    members = _group_tensors(model.list_rank_tensors(Layout(tp=1, vocab_multiple=VOCABULARY_MULTIPLE))).values()
    return tuple(zip(list_engine_tensors(model), map(tuple, members), strict=True))


def _stack(name: str, members: list[Parameter]) -> Parameter:
    first = members[0]
    rows = sum(member.shape[0] for member in members)
    return Parameter(name, (rows, *first.shape[1:]), first.component, first.is_buffer, first.is_linear)


def stored_bytes(tensors: Iterable[Parameter], element_bytes: int) -> int:
    """Bytes of an engine's tensors. Routing biases and the decay of linear attention are fp32 with any dtype.

    Source: vLLM 0.32.0, deepseek_v2.py (`e_score_correction_bias`), qwen3_next.py (`A_log`).
    """
    return sum(
        tensor.numel * (4 if tensor.is_buffer or tensor.name.endswith(".A_log") else element_bytes)
        for tensor in tensors
    )


def list_linear_weights(tensors: Iterable[Parameter]) -> list[Parameter]:
    """The matrices that a CPU engine packs: those of linear layers, with routers, without experts or tables.

    Source: vLLM 0.32.0, fused_moe/router/gate_linear.py: routers are linear layers too.
    """
    return [
        tensor
        for tensor in tensors
        if len(tensor.shape) == 2
        and (tensor.is_linear or (tensor.component is Component.ROUTER and tensor.name.endswith(".weight")))
        and not tensor.name.endswith(_STAYS_A_TENSOR)
    ]


def rotary_table_bytes(model: ModelSpec, element_bytes: int) -> int:
    """Bytes of the tables of sines and cosines, one for all layers with the same base, whole on every rank.

    Counts: P * d * e; for MLA d is the rotary part. 0 with learned positions or ALiBi.
    Source: vLLM 0.32.0, layers/rotary_embedding/base.py; in the model's dtype, except fp32 for gpt-oss.
    Assumes: the whole head is rotated; P includes any scaling of positions (YaRN), as in published configs.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> rotary_table_bytes(find_model("meta-llama/Llama-3.1-8B"), 2)  # 131072 * 128 * 2
    33554432
    """
    if model.architecture in _WITH_ALIBI or any(tensor.name.endswith(_LEARNED_POSITIONS) for tensor in model.tensors):
        return 0
    width = model.latent_attention.rope_head_dim if model.latent_attention else model.head_dim
    tables = 2 if model.architecture in _OWN_BASE_IN_A_WINDOW and len(set(model.attention_kinds)) > 1 else 1
    size = 4 if model.architecture in _FP32_ROTARY else element_bytes
    return tables * model.max_position_embeddings * width * size


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
