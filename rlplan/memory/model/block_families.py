"""Which block the layers of each model family are: what its Hugging Face module is made of, as data.

In: a ModelSpec. Out: its kinds of layers, each with a Block. Left out: what a table here does not describe, which is
refused by name: families whose attention keeps tensors of T squared, or that run every expert on every token.

Source: modeling files of transformers 5.19; tensors saved by each family's layers, listed one by one under fake tensors
(tests/memory/model/test_block_families.py holds every family to its own module).
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any

from rlplan.errors import SpecError
from rlplan.memory.model.block import Block, DeltaRule, Experts, Latent, Layers, Norm, StateSpace
from rlplan.memory.model.layer_cut import LayerCut
from rlplan.spec.model import FAMILIES, ModelSpec
from rlplan.spec.models.parts import FULL, LINEAR, NONE

Traits = dict[str, Any]

LLAMA: Traits = {}
GEMMA: Traits = {"norm": Norm.RMS_FP32}
GEMMA2 = GEMMA | {"num_norms": 4}
OLMO2 = GEMMA | {"norms_feed_linears": 0, "has_fp32_rotary": True}
PARALLEL: Traits = {"num_norms": 1, "norms_feed_linears": 1, "num_branches": 1}
COHERE = PARALLEL | {"norm": Norm.LAYER_BY_HAND}
LAYER_NORM: Traits = {"norm": Norm.LAYER}
PLAIN_MLP: Traits = {"mlp_saved_widths": 2}
TANH_MLP: Traits = {"mlp_saved_widths": 5}
QWEN3_NEXT = GEMMA | {"qk_norm": "heads", "gates_attention": True}
ERNIE: Traits = {"rotary_bytes": 8}
NO_ROTARY: Traits = {"has_rotary": False}

TRAITS: dict[str, Traits] = {
    **dict.fromkeys(
        (
            *("LlamaForCausalLM", "MistralForCausalLM", "Ministral3ForCausalLM", "Qwen2ForCausalLM"),
            *("Qwen3ForCausalLM", "GlmForCausalLM", "SmolLM3ForCausalLM", "GraniteForCausalLM", "SeedOssForCausalLM"),
            *("MixtralForCausalLM", "OlmoeForCausalLM", "MiniMaxM2ForCausalLM", "GraniteMoeForCausalLM"),
            *("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM"),
            *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Qwen2_5_VLForConditionalGeneration"),
            *("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
            *(
                "Mistral3ForConditionalGeneration",
                "Kimi_K25ForConditionalGeneration",
                "KimiK25ForConditionalGeneration",
            ),
        ),
        LLAMA,
    ),
    **dict.fromkeys(("Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM"), ERNIE),
    **dict.fromkeys(("GemmaForCausalLM", "GptOssForCausalLM"), GEMMA),
    **dict.fromkeys(("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), GEMMA2),
    "Gemma4ForConditionalGeneration": GEMMA2 | {"qk_norm": "heads", "norms_values": True},
    **dict.fromkeys(("Olmo2ForCausalLM", "Olmo3ForCausalLM"), OLMO2),
    "OlmoForCausalLM": {"norm": Norm.LAYER_FP32, "has_fp32_rotary": True},
    "Phi3ForCausalLM": {"packs_qkv": True},
    "Glm4ForCausalLM": {"num_norms": 4},
    **dict.fromkeys(("CohereForCausalLM", "Cohere2ForCausalLM"), COHERE),
    "Starcoder2ForCausalLM": LAYER_NORM | PLAIN_MLP,
    **dict.fromkeys(("StableLmForCausalLM", "PhimoeForCausalLM", "PhiMoEForCausalLM"), LAYER_NORM),
    "ArceeForCausalLM": PLAIN_MLP,
    **dict.fromkeys(
        (
            *("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
            *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
        ),
        QWEN3_NEXT,
    ),
    "OPTForCausalLM": LAYER_NORM | NO_ROTARY | {"mlp_saved_widths": 1},
    "GPT2LMHeadModel": LAYER_NORM | NO_ROTARY | TANH_MLP,
    "GPTNeoXForCausalLM": LAYER_NORM | PLAIN_MLP | {"norms_share_input": True, "packs_qkv": True},
    "FalconForCausalLM": LAYER_NORM | PLAIN_MLP,
    "PhiForCausalLM": LAYER_NORM | PARALLEL | TANH_MLP,
}
"""What sets each family's layers apart from Llama's, by architecture."""

OTHER_MODULES: dict[str, Traits] = {
    **dict.fromkeys(("Llama4ForCausalLM", "Llama4ForConditionalGeneration"), LLAMA),
    "NemotronHForCausalLM": PARALLEL | NO_ROTARY | {"mlp_saved_widths": 2},
}
"""Families whose layers are described as trainers with modules of their own run them (Megatron, torchtitan)."""

_UNFUSED = "its attention keeps the scores of every pair of tokens"
REFUSED = {
    "BloomForCausalLM": _UNFUSED,
    "MptForCausalLM": _UNFUSED,
    "MPTForCausalLM": _UNFUSED,
    "GPTJForCausalLM": _UNFUSED,
    "DeepseekV32ForCausalLM": "its indexer scores every pair of tokens",
    "GlmMoeDsaForCausalLM": "its indexer scores every pair of tokens",
    "Llama4ForCausalLM": "transformers runs every expert on every token",
    "Llama4ForConditionalGeneration": "transformers runs every expert on every token",
    "NemotronHForCausalLM": "its Mamba layers run without kernels in transformers",
}
"""Families without a closed formula, and why."""

FP32_ROUTERS = frozenset(
    {
        *("Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
        *("Ernie4_5_MoeForCausalLM", "Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration"),
    }
)
GATED_SHARED_EXPERTS = frozenset(
    {
        *("Qwen2MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM"),
        "Qwen3_5MoeForConditionalGeneration",
    }
)
GPT_OSS_WIDTHS = 7
"""gpt-oss clamps gate and up, scales, squashes and adds one by hand (modeling_gpt_oss.py, `_apply_gate`)."""


def traits_of(model: ModelSpec) -> Traits:
    """What sets a model's layers apart from Llama's; nothing where no table describes them."""
    return TRAITS.get(model.architecture) or OTHER_MODULES.get(model.architecture, {})


@lru_cache(maxsize=256)
def blocks_of(model: ModelSpec, layers: range | None = None, *, has_own_modules: bool = False) -> tuple[Layers, ...]:
    """The kinds of layers of a model (or of some of its layers), in the order in which they first appear.

    has_own_modules: the trainer has not transformers' (`OTHER_MODULES`). Raises: SpecError where refused.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> [(layers.num, layers.block.experts is None) for layers in blocks_of(find_model("deepseek-ai/DeepSeek-V3"))]
    [(3, True), (58, False)]
    """
    if not (has_own_modules and model.architecture in OTHER_MODULES):
        _refuse_unknown(model)
    dense = _dense_block(model)
    counts: dict[Block, int] = {}
    with_experts = frozenset(model.experts.layers) if model.experts else frozenset[int]()
    experts = _experts(model)
    for layer in layers if layers is not None else range(model.num_layers):
        block = _with_attention(model, dense, model.attention_kind(layer))
        if layer in with_experts:
            block = replace(block, experts=experts)
        if model.takes_keys(layer) and model.shared_keys:
            wide = 2 if model.shared_keys.widens_mlp else 1
            block = replace(block, has_keys=False, intermediate=wide * block.intermediate)
        counts[block] = counts.get(block, 0) + 1
    return tuple(Layers(num, block) for block, num in counts.items())


def _dense_block(model: ModelSpec) -> Block:
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
        latent=_latent(model),
    )
    block = replace(plain, **traits_of(model))
    block = replace(block, rotary_bytes=block.rotary_bytes * model.head_dim)
    return _falcon(model, block) if model.architecture == "FalconForCausalLM" else block


def _falcon(model: ModelSpec, block: Block) -> Block:
    """The three generations of Falcon; the newest repeats its keys and values for every head (modeling_falcon.py)."""
    has_two_norms, is_sequential = "new" in model.options, "sequential" in model.options
    if has_two_norms or 1 < model.num_kv_heads < model.num_heads:
        block = replace(block, num_kv_heads=model.num_heads)
    else:
        block = replace(block, packs_qkv=True)
    if has_two_norms:
        return replace(block, norms_share_input=True)
    return block if is_sequential else replace(block, **PARALLEL)


def _with_attention(model: ModelSpec, block: Block, kind: str) -> Block:
    """The block of a layer that attends in this way. Sliding layers save what full ones do: flash keeps no scores."""
    if NONE in model.attention_kinds:
        block = replace(block, has_attention=kind != NONE, has_mlp=kind == NONE)
    if kind == LINEAR and (rule := model.linear_attention):
        if rule.is_mamba:
            keys, values = rule.num_key_heads * rule.key_head_dim, rule.num_value_heads * rule.value_head_dim
            return replace(block, state_space=StateSpace(rule.num_value_heads, keys, values))
        keys, values = rule.num_key_heads * rule.key_head_dim, rule.num_value_heads * rule.value_head_dim
        delta = DeltaRule(rule.num_value_heads, rule.key_head_dim, keys, values)
        return replace(block, delta_rule=delta, gates_attention=False, qk_norm="none")
    if kind == FULL and (wide := model.global_attention):
        return replace(block, num_kv_heads=wide.num_kv_heads, head_dim=wide.head_dim)
    return block


def _experts(model: ModelSpec) -> Experts | None:
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
        has_fp32_router=model.architecture in FP32_ROUTERS,
        gates_shared=model.architecture in GATED_SHARED_EXPERTS,
    )


def _latent(model: ModelSpec) -> Latent | None:
    spec = model.latent_attention
    if spec is None:
        return None
    width = spec.nope_head_dim + spec.rope_head_dim
    return Latent(spec.q_rank, spec.kv_rank, width, spec.value_head_dim, spec.nope_head_dim)


def _refuse_unknown(model: ModelSpec) -> None:
    why = REFUSED.get(model.architecture)
    if why is None and model.architecture not in TRAITS:
        why = "no formula describes its layers"
    if why is None and model.global_attention and model.experts:
        why = "it runs experts beside a dense MLP in every layer"
    if why is None and model.architecture == "FalconForCausalLM" and 1 == model.num_kv_heads < model.num_heads:
        why = f"no fused kernel shares one key head among {model.num_heads}, so {_UNFUSED}"  # modeling_falcon.py
    if why is not None:
        raise SpecError(
            f"activations of {model.architecture} are not modelled: {why}",
            where="model",
            rule=f"one of the {len(TRAITS)} families of rlplan.memory.model.block_families",
            way_out="trace the model instead: rlplan estimate --trace",
        )


@lru_cache(maxsize=1024)
def cut_layers(
    model: ModelSpec, layers: range | None, cut: LayerCut, *, is_fused: bool = False, has_own_modules: bool = False
) -> tuple[Layers, ...]:
    """The kinds of layers of a stage (None: of all) on one rank. is_fused: under fused kernels. Raises: SpecError."""
    found = blocks_of(model, layers, has_own_modules=has_own_modules)
    kinds = (replace(kind, block=kind.block.fused()) if is_fused else kind for kind in found)
    return cut.layers_of(kinds)
