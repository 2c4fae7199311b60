"""Sizes for the symbols of tensor tables: those of a whole model, and of one rank's share.

In: a ModelSpec and a Layout. Out: Sizes. Left out: uneven shares; sizes that do not divide are refused.

Symbols: as in `tables`, with dg, qg, kvg for full layers that differ from sliding ones (Gemma 4).
"""

from typing import TYPE_CHECKING

from pydantic import Field

from rlplan.errors import SpecError
from rlplan.spec.base import Spec
from rlplan.spec.models.tensors import Sizes
from rlplan.units import ceil_div

if TYPE_CHECKING:
    from rlplan.spec.model import ModelSpec
    from rlplan.spec.models.parts import LinearAttentionSpec


class Layout(Spec):
    """The parallelism that splits one copy of a model."""

    tp: int = Field(default=1, ge=1, le=1 << 16)
    """Tensor-parallel size: ranks that split every layer."""
    ep: int = Field(default=1, ge=1, le=1 << 16)
    """Expert-parallel size: ranks that split the experts. 1 if tp splits each expert, more if a rank holds whole
    experts."""
    etp: int | None = Field(default=None, ge=1, le=1 << 16)
    """Expert tensor-parallel size: ranks that split each expert's matrices. None: tp if ep is 1, else 1."""
    pp: int = Field(default=1, ge=1, le=1 << 16)
    """Pipeline-parallel size: ranks in a row, each with some layers."""
    attention_dp: int = Field(default=1, ge=1, le=1 << 16)
    """Groups of tp ranks over which whole experts are distributed. Above 1, each rank holds the shared experts whole,
    for its part of its group's tokens (vLLM 0.32.0, `use_sequence_parallel_moe`)."""
    vocab_multiple: int = Field(default=1, ge=1, le=1 << 24)
    """Padding multiple of the vocabulary tables' rows (vLLM: 64; Megatron: 128*tp)."""


WHOLE = Layout.create_default()


def compute_sizes(model: "ModelSpec", layout: Layout = WHOLE) -> Sizes:
    """Sizes of the whole model and of a rank's share under a layout. Raises: SpecError for sizes that do not divide."""
    return Sizes(whole=_numbers(model, WHOLE), share=_numbers(model, layout))


def _numbers(model: "ModelSpec", layout: Layout) -> dict[str, int]:
    tp = layout.tp
    heads = _cut(model.num_heads, tp, "num_heads")
    kv_heads = count_kv_heads(model.num_kv_heads, tp)
    rows = ceil_div(model.vocab_size, layout.vocab_multiple) * layout.vocab_multiple
    numbers = {
        "h": model.hidden_size,
        "d": model.head_dim,
        "P": model.max_position_embeddings,
        "V": ceil_div(rows, tp),
        "I": _cut(model.intermediate_size, tp, "intermediate_size"),
        "a": heads,
        "k": kv_heads,
        "q": heads * model.head_dim,
        "kv": kv_heads * model.head_dim,
    }
    for add in (_add_experts, _add_latent, _add_linear, _add_global):
        add(model, layout, heads, numbers)
    return numbers


def count_kv_heads(num_kv_heads: int, tp: int) -> int:
    """Key heads per rank: its share, or one head that several ranks replicate if there are fewer heads than ranks.

    Source: vLLM 0.25 QKVParallelLinear, Megatron-Core 0.14 attention.py.

    >>> count_kv_heads(8, 4), count_kv_heads(8, 16)
    (2, 1)
    """
    if tp <= num_kv_heads:
        return _cut(num_kv_heads, tp, "num_kv_heads")
    if tp % num_kv_heads:
        raise _indivisible("num_kv_heads", num_kv_heads, tp)
    return 1


def count_key_heads(spec: "LinearAttentionSpec", tp: int) -> int:
    """Key heads of a linear layer per rank. Ranks beyond Mamba-2's groups hold a copy of the group of their heads.

    Source: vLLM 0.32.0, mamba_utils.py (`extra_groups_for_head_shards`).
    """
    if spec.is_mamba:
        return count_kv_heads(spec.num_key_heads, tp)
    return _cut(spec.num_key_heads, tp, "linear_attention.num_key_heads")


def _add_experts(model: "ModelSpec", layout: Layout, heads: int, numbers: dict[str, int]) -> None:
    if spec := model.experts:
        numbers["E"] = _cut(spec.num_experts, layout.ep, "experts.num_experts", what="ep")
        num_shards = layout.etp or (layout.tp if layout.ep == 1 else 1)
        numbers["Ie"] = _cut(spec.intermediate_size, num_shards, "experts.intermediate_size")
        numbers["El"] = spec.latent_size or model.hidden_size
        num_shards = layout.tp if layout.attention_dp == 1 else 1
        numbers["Is"] = _cut(spec.shared_intermediate_size, num_shards, "experts.shared_intermediate_size")


def _add_latent(model: "ModelSpec", layout: Layout, heads: int, numbers: dict[str, int]) -> None:
    if spec := model.latent_attention:
        numbers |= {"rq": spec.q_rank, "rkv": spec.kv_rank, "dr": spec.rope_head_dim}
        numbers["qm"] = heads * (spec.nope_head_dim + spec.rope_head_dim)
        numbers["kvm"] = heads * (spec.nope_head_dim + spec.value_head_dim)
        numbers["om"] = heads * spec.value_head_dim
    if index := model.indexer:
        numbers |= {"ix": index.num_heads * index.head_dim, "ia": index.num_heads, "id": index.head_dim}


def _add_linear(model: "ModelSpec", layout: Layout, heads: int, numbers: dict[str, int]) -> None:
    if spec := model.linear_attention:
        keys = count_key_heads(spec, layout.tp)
        values = _cut(spec.num_value_heads, layout.tp, "linear_attention.num_value_heads")
        numbers |= {"lk": keys * spec.key_head_dim, "lv": values * spec.value_head_dim, "lh": values}
        numbers |= {"dl": spec.value_head_dim, "K": spec.conv_kernel}


def _add_global(model: "ModelSpec", layout: Layout, heads: int, numbers: dict[str, int]) -> None:
    if extra := model.per_layer_input:
        numbers |= {"Vp": extra.vocab_size, "p": extra.width, "pl": extra.width * model.num_layers}
    if spec := model.global_attention:
        kv_heads = count_kv_heads(spec.num_kv_heads, layout.tp)
        numbers |= {"dg": spec.head_dim, "qg": heads * spec.head_dim, "kvg": kv_heads * spec.head_dim}


def _cut(number: int, num_shards: int, name: str, *, what: str = "tp") -> int:
    if number % num_shards:
        raise _indivisible(name, number, num_shards, what)
    return number // num_shards


def _indivisible(name: str, number: int, num_shards: int, what: str = "tp") -> SpecError:
    return SpecError(
        f"{name} {number} does not divide over {what} {num_shards}",
        where=f"training.{what}, rollout.{what}" if what == "tp" else f"training.{what}",
        rule=f"every rank holds the same part of {name}",
        way_out=f"another {what}: {', '.join(str(size) for size in range(1, number + 1) if number % size == 0)}",
    )
