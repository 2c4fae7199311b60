"""Blocks of model families: the kinds of decoder layers that each Hugging Face architecture has, and their parts that
tensor parallel ranks cut (`LayerCut`).

`block_families.json` lists the traits that distinguish each family's layers from Llama's. A family that it does not
list, or lists as refused, raises an error: its attention may keep tensors of T squared, or it may run every expert on
every token.

In: a ModelSpec, ranks. Out: its kinds of layers, each with a Block. Left out: bytes (activations.py), the elements of
the weights (spec/models/shards.py).

Source: modeling files of transformers 5.19; tensors saved by each family's layers, listed one by one under fake tensors
(tests/memory/model/test_block_families.py compares every family with its own module). Cuts: Megatron-Core 0.14 and its
main branch of 2026-08: tensor_parallel/layers.py (`LinearWithGradAccumulationAndAsyncCommunication` saves its input
sharded and gathers it again in the backward pass), transformer/moe/moe_layer.py (MoE with tensor parallelism trains
only under sequence parallelism); Transformer Engine 2026-08, module/layernorm_linear.py (`ln_out_needs_gather`); torch
2.13 distributed/tensor/parallel/style.py (`SequenceParallel`; `ColwiseParallel`'s matmul saves its gathered input).
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import lru_cache
from math import log
from pathlib import Path
from typing import Any

from rlplan.errors import SpecError
from rlplan.memory.model.block import Block, DeltaRule, Experts, Latent, Layers, Norm, StateSpace
from rlplan.spec.model import FAMILIES, ModelSpec
from rlplan.spec.models.catalogue import find_model, load_catalogue
from rlplan.spec.models.parts import FULL, LINEAR, NONE


@dataclass(frozen=True)
class LayerCut:
    """The cut of a layer over tensor parallel ranks."""

    tp: int = 1
    """Ranks over which heads and MLP are cut."""
    expert_tp: int = 1
    """Ranks over which each expert's matrices are cut. 1: experts are whole, and each rank sends them its own rows."""
    shares_rows: bool = False
    """Sequence parallelism: between the sharded matmuls (norms, residual, router) a rank has only its own rows."""
    gathers_again: bool = False
    """Whether a sharded matmul saves only the rank's part of its input and gathers it again in the backward pass."""

    @property
    def sequence_shards(self) -> int:
        """Ranks that shard the rows between the sharded matmuls."""
        return self.tp if self.shares_rows else 1

    def cut_layers(self, kinds: Iterable[Layers]) -> tuple[Layers, ...]:
        """Replace each kind of layer by one rank's part of it.

        >>> from rlplan.memory.model.block import Block
        >>> [kind] = LayerCut(2, 2).cut_layers([Layers(3, Block(64, 4, 2, 16, 256))])
        >>> kind.num, kind.block.num_heads, kind.block.intermediate
        (3, 2, 128)
        """
        return tuple(replace(kind, block=kind.block.shard(self.tp, self.expert_tp)) for kind in kinds)


def choose_layer_cut(tp: int, expert_tp: int, *, is_megatron: bool, has_sequence_parallel: bool) -> LayerCut:
    """The cut that a trainer makes. Megatron saves sharded inputs, torch's DTensor gathered ones.

    >>> choose_layer_cut(4, 1, is_megatron=True, has_sequence_parallel=True).sequence_shards
    4
    >>> choose_layer_cut(1, 1, is_megatron=True, has_sequence_parallel=True) == LayerCut()
    True
    """
    shares_rows = has_sequence_parallel and tp > 1
    return LayerCut(tp, expert_tp if is_megatron else tp, shares_rows, shares_rows and is_megatron)


Traits = dict[str, Any]

_TABLES: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))


def _read_traits(table: str) -> dict[str, Traits]:
    traits: dict[str, Traits] = {}
    for entry in _TABLES[table]:
        norm = {"norm": Norm(entry["traits"]["norm"])} if "norm" in entry["traits"] else {}
        traits |= dict.fromkeys(entry["families"], entry["traits"] | norm)
    return traits


TRAITS = _read_traits("transformers")
"""Fields of `Block` in which each family's layers differ from Llama's, by architecture."""

OTHER_MODULES = _read_traits("other_modules")
"""The same for trainers that run modules of their own instead of transformers' (Megatron, torchtitan)."""

REFUSED: dict[str, str] = _TABLES["refused"]
"""Families without a closed formula, and the reason."""

PARALLEL: Traits = {"num_norms": 1, "norms_feed_linears": 1, "num_branches": 1}
"""Traits of layers whose attention and MLP read the same normed rows."""

GPT_OSS_WIDTHS = 7
"""gpt-oss clamps gate and up, scales, squashes and adds one in elementary operations (modeling_gpt_oss.py,
`_apply_gate`)."""


def find_traits(model: ModelSpec) -> Traits:
    """Fields of `Block` in which a model's layers differ from Llama's; empty where no table describes them."""
    return TRAITS.get(model.architecture) or OTHER_MODULES.get(model.architecture, {})


@lru_cache(maxsize=256)
def list_blocks(model: ModelSpec, layers: range | None = None, *, has_own_modules: bool = False) -> tuple[Layers, ...]:
    """The kinds of layers of a model (or of some of its layers), in the order in which they first appear.

    has_own_modules: the trainer runs modules of its own instead of transformers' (`OTHER_MODULES`). Raises: SpecError
    for a refused family.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> [(layers.num, layers.block.experts is None) for layers in list_blocks(find_model("deepseek-ai/DeepSeek-V3"))]
    [(3, True), (58, False)]
    """
    if not (has_own_modules and model.architecture in OTHER_MODULES):
        _refuse_unknown(model)
    dense = _build_dense_block(model)
    counts: dict[Block, int] = {}
    with_experts = frozenset(model.experts.layers) if model.experts else frozenset[int]()
    experts = _build_experts(model)
    for layer in layers if layers is not None else range(model.num_layers):
        block = _set_attention(model, dense, model.attention_kind(layer))
        if layer in with_experts:
            block = replace(block, experts=experts)
        if model.reuses_keys(layer) and model.shared_keys:
            widening = 2 if model.shared_keys.widens_mlp else 1
            block = replace(block, has_keys=False, intermediate=widening * block.intermediate)
        counts[block] = counts.get(block, 0) + 1
    return tuple(Layers(num, block) for block, num in counts.items())


def _build_dense_block(model: ModelSpec) -> Block:
    is_wide = "wide_qk_norm" in FAMILIES[model.architecture].conditions
    per_head = model.has_qk_norm or "headed_qk_norm" in model.options
    plain = Block(
        hidden=model.hidden_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        intermediate=model.intermediate_size,
        per_layer_width=model.per_layer_input.width if model.per_layer_input else 0,
        qk_norm="full" if is_wide else "heads" if per_head else "none",
        latent=_build_latent(model),
    )
    block = replace(plain, **find_traits(model))
    block = replace(block, rotary_bytes=block.rotary_bytes * model.head_dim)
    return _adapt_falcon(model, block) if model.architecture == "FalconForCausalLM" else block


def _adapt_falcon(model: ModelSpec, block: Block) -> Block:
    """Set the norms and keys of the three Falcon generations. The newest repeats keys and values for every head.

    Source: transformers 5.19, modeling_falcon.py.
    """
    has_two_norms, is_sequential = "new" in model.options, "sequential" in model.options
    if has_two_norms or 1 < model.num_kv_heads < model.num_heads:
        block = replace(block, num_kv_heads=model.num_heads)
    else:
        block = replace(block, packs_qkv=True)
    if has_two_norms:
        return replace(block, norms_share_input=True)
    return block if is_sequential else replace(block, **PARALLEL)


def _set_attention(model: ModelSpec, block: Block, kind: str) -> Block:
    """Set the attention of a layer. Sliding layers save as much as full ones: flash attention saves no scores."""
    if NONE in model.attention_kinds:
        block = replace(block, has_attention=kind != NONE, has_mlp=kind == NONE)
    if kind == LINEAR and (rule := model.linear_attention):
        keys, values = rule.num_key_heads * rule.key_head_dim, rule.num_value_heads * rule.value_head_dim
        if rule.is_short_conv:
            return replace(block, short_conv=values, qk_norm="none")
        if rule.is_mamba:
            return replace(block, state_space=StateSpace(rule.num_value_heads, keys, values))
        delta = DeltaRule(rule.num_value_heads, rule.key_head_dim, keys, values)
        return replace(block, delta_rule=delta, gates_attention=False, qk_norm="none")
    if kind == FULL and (attention := model.global_attention):
        return replace(block, num_kv_heads=attention.num_kv_heads, head_dim=attention.head_dim)
    return block


def _build_experts(model: ModelSpec) -> Experts | None:
    spec = model.experts
    if spec is None:
        return None
    return Experts(
        num=spec.num_experts,
        top_k=spec.num_active,
        width=spec.intermediate_size,
        shared_width=spec.shared_intermediate_size,
        saved_widths=GPT_OSS_WIDTHS if model.architecture == "GptOssForCausalLM" else 4 if spec.is_gated else 2,
        row_width=spec.latent_size or model.hidden_size,
        has_fp32_router=model.architecture in _TABLES["fp32_routers"],
        gates_shared=model.architecture in _TABLES["gated_shared_experts"],
    )


def _build_latent(model: ModelSpec) -> Latent | None:
    spec = model.latent_attention
    if spec is None:
        return None
    width = spec.nope_head_dim + spec.rope_head_dim
    return Latent(spec.q_rank, spec.kv_rank, width, spec.value_head_dim, spec.nope_head_dim)


def explain_refusal(model: ModelSpec) -> str | None:
    """The reason why a model's activations are not modelled; None if they are."""
    why = REFUSED.get(model.architecture)
    if why is None and model.architecture not in TRAITS:
        why = "no formula describes its layers"
    if why is None and model.global_attention and model.experts:
        why = "it runs experts beside a dense MLP in every layer"
    if why is None and model.architecture == "FalconForCausalLM" and 1 == model.num_kv_heads < model.num_heads:
        unfused = REFUSED["BloomForCausalLM"]
        why = f"no fused kernel shares one key head among {model.num_heads}, so {unfused}"  # modeling_falcon.py
    return why


def _refuse_unknown(model: ModelSpec) -> None:
    if why := explain_refusal(model):
        raise SpecError(
            f"activations of {model.architecture} are not modelled: {why}",
            where="model",
            rule=f"one of the {len(TRAITS)} families of rlplan.memory.model.block_families",
            way_out=f"policy={find_modelled(model)}, the nearest that is; or trace yours with rlplan estimate --trace",
        )


def find_modelled(model: ModelSpec) -> str:
    """The bundled model with modelled activations that is nearest in architecture, then in size.

    >>> find_modelled(find_model("deepseek-ai/DeepSeek-V3.2"))
    'deepseek-ai/DeepSeek-V3'
    """

    family = model.architecture.removesuffix("ForCausalLM")

    def order(known: str) -> tuple[float, float]:
        entry = load_catalogue()[known]
        own = entry.config["architectures"][0].removesuffix("ForCausalLM")
        near = SequenceMatcher(None, own, family).ratio()
        return -near, abs(log(entry.num_parameters / model.num_parameters))

    return next(known for known in sorted(load_catalogue(), key=order) if not explain_refusal(find_model(known)))


@lru_cache(maxsize=1024)
def cut_layers(
    model: ModelSpec, layers: range | None, cut: LayerCut, *, is_fused: bool = False, has_own_modules: bool = False
) -> tuple[Layers, ...]:
    """The kinds of layers of a stage on one rank. layers: None for all. is_fused: fused kernels. Raises: SpecError."""
    kinds = list_blocks(model, layers, has_own_modules=has_own_modules)
    return cut.cut_layers(replace(kind, block=kind.block.fuse()) if is_fused else kind for kind in kinds)
