"""Readers for a single family: Gemma 4, hybrids with a state beside attention, and families of the first generation.

In: a Config and the number of layers. Out: fields of a ModelSpec by name. Left out: readers shared by families
(readers.py). Source: configuration and modeling files of transformers 5.19, named at each reader.
"""

from rlplan.spec.models.config import Config
from rlplan.spec.models.families import readers
from rlplan.spec.models.families.readers import Fields
from rlplan.spec.models.parts import (
    FULL,
    LINEAR,
    NONE,
    PARALLEL,
    GlobalAttentionSpec,
    LinearAttentionSpec,
    PerLayerInputSpec,
    SharedKeysSpec,
)
from rlplan.units import round_up


def words_as_wide_as_layers(config: Config, num_layers: int) -> Fields:
    """Embeddings as wide as the layers; OPT-350m's projections around the layers are not modelled (modeling_opt.py)."""
    config.refuse_unless("word_embed_proj_dim", config.read_count("hidden_size"))
    return {}


def four_times_hidden(config: Config, num_layers: int) -> Fields:
    """`n_inner`, or four times the hidden size (modeling_gpt2.py)."""
    key = "n_embd" if config.get("n_embd") is not None else "hidden_size"
    return {"intermediate_size": config.read_optional_count("n_inner") or 4 * config.read_count(key)}


def falcon(config: Config, num_layers: int) -> Fields:
    """One key head, one per query head, or `num_kv_heads` of the new architecture (modeling_falcon.py)."""
    heads = config.read_count("num_attention_heads")
    is_new = config.read_flag("new_decoder_architecture", default=False)
    if is_new:
        kv_heads = config.read_optional_count("num_kv_heads") or heads
    else:
        kv_heads = 1 if config.read_flag("multi_query", default=True) else heads
    conditions = {"new"} if is_new and config.get("num_ln_in_parallel_attn") in (None, 2) else set()
    if not is_new and not config.read_flag("parallel_attn", default=True):
        conditions.add("sequential")
    width = config.read_optional_count("ffn_hidden_size") or 4 * config.read_count("hidden_size")
    return {"num_kv_heads": kv_heads, "intermediate_size": width, "options": tuple(sorted(conditions))}


def mpt(config: Config, num_layers: int) -> Fields:
    """`expansion_ratio` times the hidden size. The library's model has no `kv_n_heads` (modeling_mpt.py)."""
    if (
        config.get("attn_config") is not None
        and config.read_child("attn_config").get("attn_type") == "multiquery_attention"
    ):
        config.refuse("attn_config.attn_type", "multiquery_attention", "multihead_attention")
    return {"intermediate_size": config.read_count("expansion_ratio") * config.read_count("d_model")}


def gemma4_small(config: Config, num_layers: int) -> Fields:
    """Keys and values shared by the last layers, and per-layer embeddings (E2B, E4B)."""
    fields: Fields = {}
    if shared := config.read_optional_count("num_kv_shared_layers", minimum=0, maximum=num_layers - 1):
        widens = config.read_flag("use_double_wide_mlp", default=False)
        fields["shared_keys"] = SharedKeysSpec(num_layers=shared, widens_mlp=widens)
    if width := config.read_optional_count("hidden_size_per_layer_input", minimum=0):
        words = config.read_optional_count("vocab_size_per_layer_input") or config.read_count("vocab_size")
        fields["per_layer_input"] = PerLayerInputSpec(width=width, vocab_size=words)
    return fields


def gemma4_windows(config: Config, num_layers: int) -> Fields:
    """Five sliding layers per full one; the last layer is always full (configuration_gemma4.py)."""
    fields = readers.window_every_layer_but(6)(config, num_layers)
    kinds = fields.get("attention_kinds", ())
    return fields | {"attention_kinds": (*kinds[:-1], FULL)} if kinds else fields


def global_attention(config: Config, num_layers: int) -> Fields:
    """Full layers have their own head_dim and key heads, and may use keys as values (configuration_gemma4.py).

    Older configs have `global_head_dim` and `num_global_key_value_heads`; the latter only counts if keys serve as
    values. Newer configs have a `per_layer_config` for each full layer.
    """
    shares_kv = config.read_flag("attention_k_eq_v", default=False)
    kv_heads, head_dim = config.read_count("num_key_value_heads"), config.read_optional_count("global_head_dim") or 512
    if shares_kv:
        kv_heads = config.read_optional_count("num_global_key_value_heads") or kv_heads
    if config.get("per_layer_config") is not None:
        layers = config.read_child("per_layer_config")
        full = [layers.read_child(name) for name in layers.data]
        sizes = {
            (
                layer.read_optional_count("num_key_value_heads") or kv_heads,
                layer.read_optional_count("head_dim") or head_dim,
            )
            for layer in full
        }
        if len(sizes) != 1:
            config.refuse("per_layer_config", layers.data, "the same sizes for every full layer")
        kv_heads, head_dim = sizes.pop()
    spec = GlobalAttentionSpec(num_kv_heads=kv_heads, head_dim=head_dim, shares_kv=shares_kv)
    return {"global_attention": spec, "options": ("shares_kv",) if shares_kv else ()}


def gemma4_experts(config: Config, num_layers: int) -> Fields:
    """Experts in addition to the dense MLP of every layer, if enabled."""
    if not config.read_flag("enable_moe_block", default=False):
        return {}
    return readers.experts(number="num_experts", active="top_k_experts", width="moe_intermediate_size")(
        config, num_layers
    )


def _read_mamba(config: Config) -> LinearAttentionSpec:
    """Mamba-2 in the spelling of Granite and Falcon; a missing `mamba_d_head` is `auto`."""
    heads = config.read_count("mamba_n_heads")
    width = config.read_optional_count("mamba_d_ssm") or (
        config.read_count("mamba_expand") * config.read_count("hidden_size")
    )
    if width % heads:
        config.refuse("mamba_n_heads", heads, f"a divisor of the layer's inner width, {width}")
    return LinearAttentionSpec(
        num_key_heads=config.read_count("mamba_n_groups"),
        num_value_heads=heads,
        key_head_dim=config.read_count("mamba_d_state"),
        value_head_dim=width // heads,
        conv_kernel=config.read_count("mamba_d_conv"),
        is_mamba=True,
        chunk=config.read_count("mamba_chunk_size"),
    )


def granite_hybrid(config: Config, num_layers: int) -> Fields:
    """Layers of Mamba-2 or attention, each with experts and a shared MLP, or with that MLP alone
    (configuration_granitemoehybrid.py).
    """
    named = readers.list_hybrid_names(config)
    kinds = tuple(readers.HYBRID_LAYERS.get(name, NONE) for name in named)
    if len(kinds) != num_layers or NONE in kinds:
        config.refuse("layer_types", named, f"mamba or attention for each of {num_layers} layers")
    fields: Fields = {"attention_kinds": kinds, "linear_attention": _read_mamba(config)}
    if config.read_optional_count("num_local_experts", minimum=0):
        routed = readers.experts(
            number="num_local_experts", width="intermediate_size", shared="shared_intermediate_size"
        )
        return fields | routed(config, num_layers)
    return fields | {"intermediate_size": config.read_count("shared_intermediate_size")}


def falcon_h1(config: Config, num_layers: int) -> Fields:
    """Every layer has Mamba-2 and attention side by side (configuration_falcon_h1.py)."""
    return {"attention_kinds": (PARALLEL,) * num_layers, "linear_attention": _read_mamba(config)}


def short_convolutions(config: Config, num_layers: int) -> Fields:
    """Layers of a short convolution or of attention, and an adjusted width of the MLP (configuration_lfm2.py,
    modeling_lfm2.py).
    """
    names = config.read_words("layer_types", ["conv", "full_attention"], length=num_layers)
    if names is None:
        full = config.read_indices("full_attn_idxs") or tuple(range(num_layers))
        names = tuple("full_attention" if layer in full else "conv" for layer in range(num_layers))
    hidden, heads = config.read_count("hidden_size"), config.read_count("num_attention_heads")
    convolution = LinearAttentionSpec(
        num_key_heads=0,
        num_value_heads=heads,
        key_head_dim=0,
        value_head_dim=hidden // heads,
        conv_kernel=config.read_count("conv_L_cache"),
    )
    width = config.read_count(config.choose_key("block_ff_dim|intermediate_size"))
    if config.read_flag("block_auto_adjust_ff_dim", default=True):
        multiplier = config.get("block_ffn_dim_multiplier") or 1.0
        if isinstance(multiplier, bool) or not isinstance(multiplier, int | float) or not 0 < multiplier <= 1000:
            config.refuse("block_ffn_dim_multiplier", multiplier, "a factor from 0 to 1000")
        width = round_up(int(multiplier * (2 * width // 3)), config.read_count("block_multiple_of"))
    kinds = tuple(FULL if name == "full_attention" else LINEAR for name in names)
    return {"attention_kinds": kinds, "linear_attention": convolution, "intermediate_size": width}


def kimi_linear(config: Config, num_layers: int) -> Fields:
    """Layers of Kimi Delta Attention or of latent attention, counted from 1 in `linear_attn_config`
    (configuration_kimi_linear.py).
    """
    nested = config.get("linear_attn_config") is not None
    sizes = config.read_child("linear_attn_config") if nested else config
    heads = sizes.read_count("num_heads" if nested else "linear_num_heads")
    width = sizes.read_count("head_dim" if nested else "linear_head_dim")
    names = config.read_words("layer_types", ["linear_attention", "full_attention"], length=num_layers)
    if names is None:
        full = sizes.read_indices("full_attn_layers")
        names = tuple("full_attention" if layer + 1 in full else "linear_attention" for layer in range(num_layers))
    linear = LinearAttentionSpec(
        num_key_heads=heads,
        num_value_heads=heads,
        key_head_dim=width,
        value_head_dim=width,
        conv_kernel=sizes.read_count("short_conv_kernel_size" if nested else "linear_conv_kernel_dim"),
    )
    kinds = tuple(FULL if name == "full_attention" else LINEAR for name in names)
    return {"attention_kinds": kinds, "linear_attention": linear}
