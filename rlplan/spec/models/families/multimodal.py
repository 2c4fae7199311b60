"""Families whose language model sits beside a vision tower: which tower, and how its config is spelled.

In: nothing. Out: `MULTIMODAL`, architecture -> Family. Left out: Gemma 3n.
Source: transformers 5.19, configuration and modeling files of that name.
"""

from dataclasses import replace

from rlplan.spec.models.config import MAX_LAYERS, Config
from rlplan.spec.models.families import readers, tables
from rlplan.spec.models.families.dense import GEMMA3, MISTRAL, QWEN2, QWEN3
from rlplan.spec.models.families.family import Family
from rlplan.spec.models.families.mixtures import DEEPSEEK_V3, LLAMA4, QWEN3_5, QWEN3_5_MOE, QWEN3_MOE
from rlplan.spec.models.families.readers import Fields
from rlplan.spec.models.families.towers import VisionReader
from rlplan.spec.models.parts import FULL, GlobalAttentionSpec, PerLayerInputSpec, SharedKeysSpec, VisionSpec


def _patches(config: Config, *, channels: str) -> dict[str, int]:
    patch, count = config.count("patch_size"), config.optional_count(channels) or 3
    return {"c": count, "s": patch, "p": count * patch * patch}


def _qwen2_5(config: Config, text_hidden: int) -> VisionSpec:
    width, merge = config.count("hidden_size"), config.count("spatial_merge_size")
    sizes = {
        "v": width,
        "w": config.count("intermediate_size"),
        "t": config.count("temporal_patch_size"),
        "u": width * merge * merge,
        "o": config.count("out_hidden_size"),
    }
    channels = "in_chans" if config.get("in_chans") is not None else "in_channels"
    layers = config.count("depth", maximum=MAX_LAYERS)
    return VisionSpec(tower="qwen2_5", sizes=sizes | _patches(config, channels=channels), num_layers=layers)


def _qwen3(config: Config, text_hidden: int) -> VisionSpec:
    vision = _qwen2_5(config, text_hidden)
    sizes = vision.sizes | {"n": config.count("num_position_embeddings")}
    mergers = len(config.indices("deepstack_visual_indexes"))
    return vision.model_copy(update={"tower": "qwen3", "sizes": sizes, "num_mergers": mergers})


def _siglip(config: Config, text_hidden: int) -> VisionSpec:
    patches = config.count("image_size") // config.count("patch_size")
    sizes = {
        "v": config.count("hidden_size"),
        "w": config.count("intermediate_size"),
        "n": patches * patches,
        "o": text_hidden,
    }
    config.refuse_unless("vision_use_head", False)
    layers = config.count("num_hidden_layers", maximum=MAX_LAYERS)
    return VisionSpec(tower="siglip", sizes=sizes | _patches(config, channels="num_channels"), num_layers=layers)


def _pixtral(config: Config, text_hidden: int) -> VisionSpec:
    width = config.count("hidden_size")
    sizes = {"v": width, "w": config.count("intermediate_size"), "u": 4 * width, "o": text_hidden}
    layers = config.count("num_hidden_layers", maximum=MAX_LAYERS)
    return VisionSpec(tower="pixtral", sizes=sizes | _patches(config, channels="num_channels"), num_layers=layers)


def _llama4(config: Config, text_hidden: int) -> VisionSpec:
    patches = config.count("image_size") // config.count("patch_size")
    sizes = {
        "v": config.count("hidden_size"),
        "w": config.count("intermediate_size"),
        "n": patches * patches + 1,
        "m": config.count("projector_input_dim"),
        "m2": config.count("projector_output_dim"),
        "m3": config.count("vision_output_dim"),
        "o": text_hidden,
    }
    layers = config.count("num_hidden_layers", maximum=MAX_LAYERS)
    return VisionSpec(tower="llama4", sizes=sizes | _patches(config, channels="num_channels"), num_layers=layers)


def _kimi_k25(config: Config, text_hidden: int) -> VisionSpec:
    """The published config's names, or those of configuration_kimi_k25.py, which renames them."""

    def named(published: str, renamed: str) -> int:
        return config.count(published if config.get(published) is not None else renamed)

    config.refuse_unless("merge_kernel_size", [2, 2])
    width = named("vt_hidden_size", "hidden_size")
    sizes = {
        "v": width,
        "w": named("vt_intermediate_size", "intermediate_size"),
        "n": named("init_pos_emb_height", "pos_emb_height"),
        "nw": named("init_pos_emb_width", "pos_emb_width"),
        "m": config.optional_count("mm_hidden_size") or width,
        "u": 4 * width,
        "o": text_hidden,
    }
    layers = named("vt_num_hidden_layers", "num_hidden_layers")
    return VisionSpec(tower="kimi_k25", sizes=sizes | _patches(config, channels="num_channels"), num_layers=layers)


def _gemma4(config: Config, text_hidden: int) -> VisionSpec:
    sizes = {
        "v": config.count("hidden_size"),
        "w": config.count("intermediate_size"),
        "n": config.count("position_embedding_size"),
        "d": config.count("head_dim"),
        "o": text_hidden,
    }
    layers = config.count("num_hidden_layers", maximum=MAX_LAYERS)
    conditions = ("standardized",) if config.flag("standardize", default=False) else ()
    patches = _patches(config, channels="num_channels")
    return VisionSpec(tower="gemma4", sizes=sizes | patches, num_layers=layers, conditions=conditions)


def _gemma4_audio(config: Config, text_hidden: int) -> VisionSpec:
    hidden, channels = config.count("hidden_size"), config.get("subsampling_conv_channels")
    if channels != [128, 32]:
        config.refuse("subsampling_conv_channels", channels, "[128, 32]")
    sizes = {
        "v": hidden,
        "d": hidden // config.count("num_attention_heads"),
        "k": config.count("conv_kernel_size"),
        "m": config.count("output_proj_dims"),
        "o": text_hidden,
    }
    layers = config.count("num_hidden_layers", maximum=MAX_LAYERS)
    conditions = ("clipped",) if config.flag("use_clipped_linears", default=True) else ()
    return VisionSpec(tower="gemma4_audio", sizes=sizes, num_layers=layers, conditions=conditions)


def _gemma4_small(config: Config, num_layers: int) -> Fields:
    """Keys shared by the last layers, and embeddings for every layer (E2B, E4B)."""
    fields: Fields = {}
    if shared := config.optional_count("num_kv_shared_layers", minimum=0, maximum=num_layers - 1):
        widens = config.flag("use_double_wide_mlp", default=False)
        fields["shared_keys"] = SharedKeysSpec(num_layers=shared, widens_mlp=widens)
    if width := config.optional_count("hidden_size_per_layer_input", minimum=0):
        words = config.optional_count("vocab_size_per_layer_input") or config.count("vocab_size")
        fields["per_layer_input"] = PerLayerInputSpec(width=width, vocab_size=words)
    return fields


def _gemma4_windows(config: Config, num_layers: int) -> Fields:
    """Five sliding layers to a full one; the last is full whatever the config says (configuration_gemma4.py)."""
    fields = readers.window_every_layer_but(6)(config, num_layers)
    kinds = fields.get("attention_kinds", ())
    return fields | {"attention_kinds": (*kinds[:-1], FULL)} if kinds else fields


def _global_attention(config: Config, num_layers: int) -> Fields:
    """Full layers have their own head_dim and key heads and may use keys as values (configuration_gemma4.py).

    Older configs say so in `global_head_dim` and `num_global_key_value_heads` (which counts only where keys are used as
    values), newer ones in a `per_layer_config` of each full layer.
    """
    shares_kv = config.flag("attention_k_eq_v", default=False)
    kv_heads, head_dim = config.count("num_key_value_heads"), config.optional_count("global_head_dim") or 512
    if shares_kv:
        kv_heads = config.optional_count("num_global_key_value_heads") or kv_heads
    if config.get("per_layer_config") is not None:
        layers = config.child("per_layer_config")
        full = [layers.child(name) for name in layers.data]
        sizes = {
            (layer.optional_count("num_key_value_heads") or kv_heads, layer.optional_count("head_dim") or head_dim)
            for layer in full
        }
        if len(sizes) != 1:
            config.refuse("per_layer_config", layers.data, "the same sizes for every full layer")
        kv_heads, head_dim = sizes.pop()
    spec = GlobalAttentionSpec(num_kv_heads=kv_heads, head_dim=head_dim, shares_kv=shares_kv)
    return {"global_attention": spec, "options": ("shares_kv",) if shares_kv else ()}


def _gemma4_experts(config: Config, num_layers: int) -> Fields:
    """Experts beside the dense MLP in every layer, if there are any."""
    if not config.flag("enable_moe_block", default=False):
        return {}
    return readers.experts(number="num_experts", active="top_k_experts", width="moe_intermediate_size")(
        config, num_layers
    )


_GEMMA4_LAYER = (
    """[attention]
self_attn.q_proj.weight   q h    ? sliding
self_attn.q_proj.weight   qg h   ? full
[norms]
self_attn.q_norm.weight   d      ? sliding
self_attn.q_norm.weight   dg     ? full
self_attn.k_norm.weight   d      ? sliding !shared_keys
self_attn.k_norm.weight   dg     ? full !shared_keys
[attention]
self_attn.k_proj.weight   kv h   ? sliding !shared_keys
self_attn.k_proj.weight   kvg h  ? full !shared_keys
self_attn.v_proj.weight   kv h   ? sliding !shared_keys
self_attn.v_proj.weight   kvg h  ? full !shares_kv !shared_keys
self_attn.o_proj.weight   h q    ? sliding
self_attn.o_proj.weight   h qg   ? full
"""
    """[mlp]
mlp.gate_proj.weight   I h     ? !wide
mlp.gate_proj.weight   2*I h   ? wide
mlp.up_proj.weight     I h     ? !wide
mlp.up_proj.weight     2*I h   ? wide
mlp.down_proj.weight   h I     ? !wide
mlp.down_proj.weight   h 2*I   ? wide
"""
    + tables.NORMS
    + tables.FEEDFORWARD_NORMS
    + """[mlp ? per_layer]
per_layer_input_gate.weight   p h
per_layer_projection.weight   h p
[norms ? per_layer]
post_per_layer_input_norm.weight   h
"""
    + """[router ? experts]
router.scale               h
router.per_expert_scale    =E
[router linear ? experts]
router.proj.weight         =E h
[experts ? experts]
experts.gate_up_proj       E 2*Ie h
experts.down_proj          E h Ie
[norms ? experts]
post_feedforward_layernorm_1.weight   h
post_feedforward_layernorm_2.weight   h
pre_feedforward_layernorm_2.weight    h
[norms buffer]
layer_scalar   1
"""
)
_INSIDE = (("model.", "model.language_model."),)
_AROUND = (("model.", "language_model.model."), ("lm_head.", "language_model.lm_head."))

GEMMA4 = Family(
    before=tables.EMBEDDINGS
    + """[embeddings ? per_layer]
model.embed_tokens_per_layer.weight       Vp pl
[mlp ? per_layer]
model.per_layer_model_projection.weight   pl h
[norms ? per_layer]
model.per_layer_projection_norm.weight    p
""",
    layer=_GEMMA4_LAYER,
    is_tied=True,
    required=("num_key_value_heads", "head_dim"),
    fixed={
        "attention_bias": False,
    },
    reads=(_gemma4_windows, _global_attention, _gemma4_experts, _gemma4_small),
    text_key="text_config",
    vision=_gemma4,
    audio=_gemma4_audio,
    wrapper=_INSIDE,
    has_layer_overrides=True,
)


def _with_tower(family: Family, vision: VisionReader) -> Family:
    return replace(family, text_key="text_config", vision=vision, wrapper=_INSIDE)


QWEN2_5_VL = _with_tower(QWEN2, _qwen2_5)
KIMI_K25 = replace(_with_tower(DEEPSEEK_V3, _kimi_k25), is_tied=True)
MULTIMODAL = {
    "Qwen2_5_VLForConditionalGeneration": QWEN2_5_VL,
    "Qwen3VLForConditionalGeneration": _with_tower(QWEN3, _qwen3),
    "Qwen3VLMoeForConditionalGeneration": _with_tower(QWEN3_MOE, _qwen3),
    "Qwen3_5ForConditionalGeneration": _with_tower(QWEN3_5, _qwen3),
    "Qwen3_5MoeForConditionalGeneration": _with_tower(QWEN3_5_MOE, _qwen3),
    "Gemma3ForConditionalGeneration": _with_tower(GEMMA3, _siglip),
    "Gemma4ForConditionalGeneration": GEMMA4,
    "Kimi_K25ForConditionalGeneration": KIMI_K25,
    "KimiK25ForConditionalGeneration": KIMI_K25,
    "Mistral3ForConditionalGeneration": _with_tower(
        replace(MISTRAL, required=("num_key_value_heads", "head_dim")), _pixtral
    ),
    "Llama4ForConditionalGeneration": replace(LLAMA4, text_key="text_config", vision=_llama4, wrapper=_AROUND),
}
