"""Readers for a single family: Gemma 4, and families of the first generation.

In: a Config and the number of layers. Out: fields of a ModelSpec by name. Left out: readers shared by families
(readers.py). Source: configuration and modeling files of transformers 5.19, named at each reader.
"""

from rlplan.spec.models.config import Config
from rlplan.spec.models.families import readers
from rlplan.spec.models.families.readers import Fields
from rlplan.spec.models.parts import FULL, GlobalAttentionSpec, PerLayerInputSpec, SharedKeysSpec


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
