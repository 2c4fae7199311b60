"""Readers of config keys beyond the plain decoder. Each returns fields of a ModelSpec.

In: a Config and the number of layers. Out: fields by name. Left out: which family uses which reader. Source:
configuration and modeling files of transformers 5.19, named at each reader.
"""

from collections.abc import Callable
from typing import Any

from rlplan.spec.models.config import MAX_LAYERS, Config
from rlplan.spec.models.parts import (
    CHUNKED,
    FULL,
    LINEAR,
    NONE,
    SLIDING,
    ExpertsSpec,
    IndexerSpec,
    LatentAttentionSpec,
    LinearAttentionSpec,
)

Fields = dict[str, Any]
Reader = Callable[[Config, int], Fields]
LayerChoice = Callable[[Config, int], tuple[int, ...]]
MAX_WINDOW = 1 << 30

_LAYER_TYPES = {
    "full_attention": FULL,
    "sliding_attention": SLIDING,
    "chunked_attention": CHUNKED,
    "linear_attention": LINEAR,
    "indexed_attention": FULL,
    "deepseek_sparse_attention": FULL,
}


def _named_kinds(config: Config, num_layers: int, *kinds: str) -> tuple[str, ...] | None:
    """The kinds in `layer_types`, if the config has it, restricted to those that the family supports."""
    allowed = [name for name, kind in _LAYER_TYPES.items() if kind in kinds]
    names = config.read_words("layer_types", allowed, length=num_layers)
    return None if names is None else tuple(_LAYER_TYPES[name] for name in names)


def _window_fields(config: Config, kinds: tuple[str, ...]) -> Fields:
    if SLIDING not in kinds:
        return {}
    return {"attention_kinds": kinds, "window": config.read_count("sliding_window", maximum=MAX_WINDOW)}


def window_everywhere(config: Config, num_layers: int) -> Fields:
    """Every layer has a sliding window if the config has one (Mistral, Mixtral, Phi-3, Starcoder2)."""
    kinds = _named_kinds(config, num_layers, FULL, SLIDING)
    has_window = config.read_optional_count("sliding_window", maximum=MAX_WINDOW) is not None
    return _window_fields(config, kinds or (SLIDING if has_window else FULL,) * num_layers)


def window_if_used(config: Config, num_layers: int) -> Fields:
    """Layers from `max_window_layers` on have a sliding window if `use_sliding_window` (configuration_qwen2.py)."""
    kinds = _named_kinds(config, num_layers, FULL, SLIDING)
    if kinds is None and config.read_flag("use_sliding_window", default=False):
        first = config.read_count("max_window_layers", minimum=0, maximum=MAX_LAYERS)
        kinds = tuple(SLIDING if layer >= first else FULL for layer in range(num_layers))
    return _window_fields(config, kinds or (FULL,) * num_layers)


def window_every_layer_but(period: int) -> Reader:
    """Sliding layers, with a full one after each `period` - 1; `sliding_window_pattern` overrides the period."""

    def read(config: Config, num_layers: int) -> Fields:
        kinds = _named_kinds(config, num_layers, FULL, SLIDING)
        if kinds is None:
            every = config.read_optional_count("sliding_window_pattern", maximum=MAX_LAYERS) or period
            kinds = tuple(SLIDING if (layer + 1) % every else FULL for layer in range(num_layers))
        return _window_fields(config, kinds)

    return read


def full_only(config: Config, num_layers: int) -> Fields:
    """Every layer has full attention; other `layer_types` are refused."""
    _named_kinds(config, num_layers, FULL)
    if config.read_flag("use_sliding_window", default=False):
        config.refuse("use_sliding_window", True, "this family has no sliding window here")
    return {}


def linear_attention(config: Config, num_layers: int) -> Fields:
    """Linear layers, with a full one every `full_attention_interval` (configuration_qwen3_next.py)."""
    kinds = _named_kinds(config, num_layers, FULL, LINEAR)
    if kinds is None:
        every = config.read_count("full_attention_interval", maximum=MAX_LAYERS)
        kinds = tuple(LINEAR if (layer + 1) % every else FULL for layer in range(num_layers))
    linear = LinearAttentionSpec(
        num_key_heads=config.read_count("linear_num_key_heads"),
        num_value_heads=config.read_count("linear_num_value_heads"),
        key_head_dim=config.read_count("linear_key_head_dim"),
        value_head_dim=config.read_count("linear_value_head_dim"),
        conv_kernel=config.read_count("linear_conv_kernel_dim"),
    )
    return {"attention_kinds": kinds, "linear_attention": linear}


HYBRID_LAYERS = {
    **dict.fromkeys(("M", "mamba", "linear_attention"), LINEAR),
    **dict.fromkeys(("*", "attention", "full_attention"), FULL),
    **dict.fromkeys(("E", "moe", "-", "mlp"), NONE),
}


def hybrid_layers(config: Config, num_layers: int) -> Fields:
    """Layers that are Mamba-2, attention, an MLP or experts, each named by a list or a pattern of letters
    (configuration_nemotron_h.py).
    """
    named = list_hybrid_names(config)
    if len(named) != num_layers or not set(named) <= HYBRID_LAYERS.keys():
        config.refuse("layers_block_type", named, f"mamba, attention, mlp or moe for each of {num_layers} layers")
    kinds = tuple(HYBRID_LAYERS[name] for name in named)
    linear = LinearAttentionSpec(
        num_key_heads=config.read_count("n_groups"),
        num_value_heads=config.read_count("mamba_num_heads"),
        key_head_dim=config.read_count("ssm_state_size"),
        value_head_dim=config.read_count("mamba_head_dim"),
        conv_kernel=config.read_count("conv_kernel"),
        is_mamba=True,
        chunk=config.read_count("chunk_size"),
    )
    fields: Fields = {"attention_kinds": kinds, "linear_attention": linear}
    sparse = tuple(layer for layer, name in enumerate(named) if name in ("E", "moe"))
    if sparse:
        routed = experts(
            number="n_routed_experts", width="moe_intermediate_size", shared="moe_shared_expert_intermediate_size"
        )(config, num_layers)["experts"]
        latent = config.read_optional_count("moe_latent_size") or 0
        fields["experts"] = routed.model_copy(update={"layers": sparse, "is_gated": False, "latent_size": latent})
    fields["options"] = tuple(["latent_experts"] if sparse and latent else [])
    return fields


def list_hybrid_names(config: Config) -> tuple[str, ...]:
    """The kind of each layer, in the config's words."""
    keys = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    key = next((key for key in keys if config.get(key) is not None), None)
    if key is None:
        config.refuse_missing("layers_block_type")
    value = config.get(key)
    if not isinstance(value, str | list) or not all(isinstance(word, str) for word in value):
        config.refuse(key, value, "a word or letter for each layer")
    return tuple(value)


def chunked_attention(config: Config, num_layers: int) -> Fields:
    """Layers with rotary positions attend within chunks, the others to all tokens (configuration_llama4.py)."""
    kinds = _named_kinds(config, num_layers, FULL, CHUNKED)
    if kinds is None:
        rotary = config.get("no_rope_layers") or [
            (layer + 1) % config.read_count("no_rope_layer_interval", maximum=MAX_LAYERS) for layer in range(num_layers)
        ]
        if not isinstance(rotary, list) or len(rotary) != num_layers:
            config.refuse("no_rope_layers", rotary, f"a number for each of the {num_layers} layers")
        kinds = tuple(CHUNKED if has_rotary else FULL for has_rotary in rotary)
    if CHUNKED not in kinds:
        return {}
    return {"attention_kinds": kinds, "window": config.read_count("attention_chunk_size", maximum=MAX_WINDOW)}


def latent_attention(config: Config, num_layers: int) -> Fields:
    """MLA (modeling_deepseek_v2.py, modeling_deepseek_v3.py). A null `q_lora_rank` means queries without a latent."""
    spec = LatentAttentionSpec(
        q_rank=config.read_optional_count("q_lora_rank") or 0,
        kv_rank=config.read_count("kv_lora_rank"),
        nope_head_dim=config.read_count("qk_nope_head_dim"),
        rope_head_dim=config.read_count("qk_rope_head_dim"),
        value_head_dim=config.read_count("v_head_dim"),
    )
    return {"latent_attention": spec, "head_dim": spec.nope_head_dim + spec.rope_head_dim}


def indexer(config: Config, num_layers: int) -> Fields:
    """The sparse-attention indexer. A `shared` layer reuses an earlier selection (modeling_glm_moe_dsa.py)."""
    types = config.read_words("indexer_types", ["full", "shared"], length=num_layers)
    if types is None and (config.get("index_topk_freq") or 1) != 1:
        config.refuse_missing("indexer_types")
    spec = IndexerSpec(
        num_heads=config.read_count("index_n_heads"),
        head_dim=config.read_count("index_head_dim"),
        layers=tuple(layer for layer in range(num_layers) if types is None or types[layer] == "full"),
    )
    return {"indexer": spec}


def experts(
    *, number: str, active: str = "num_experts_per_tok", width: str, shared: str = "", layers: LayerChoice | None = None
) -> Reader:
    """Routed experts. Arguments are config keys; `layers` selects the layers with experts, by default all.

    Alternatives are separated by `|`, since config classes renamed keys. shared: a key of the shared width, or
    `key*width` if the key counts experts of `width`; empty for none.
    """

    def read(config: Config, num_layers: int) -> Fields:
        num_experts = config.read_count(config.choose_key(number))
        num_active = config.read_count(config.choose_key(active))
        if num_active > num_experts:
            config.refuse(active, num_active, f"at most the number of experts, {num_experts}")
        intermediate = config.read_count(width)
        keys, _, times = shared.partition("*")
        shared_width = (config.read_optional_count(config.choose_key(keys), minimum=0) or 0) if shared else 0
        spec = ExpertsSpec(
            num_experts=num_experts,
            num_active=num_active,
            intermediate_size=intermediate,
            shared_intermediate_size=shared_width * intermediate if times else shared_width,
            num_groups=config.read_optional_count("n_group") or 1,
            active_groups=config.read_optional_count("topk_group") or 1,
            layers=layers(config, num_layers) if layers else tuple(range(num_layers)),
        )
        return {"experts": spec}

    return read


def after_dense_layers(config: Config, num_layers: int) -> tuple[int, ...]:
    """All but the first `first_k_dense_replace` layers, or those in `mlp_layer_types` (modeling_deepseek_v3.py)."""
    kinds = config.read_words("mlp_layer_types", ["dense", "sparse"], length=num_layers)
    if kinds is not None:
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")
    if (config.get("moe_layer_freq") or 1) != 1:
        config.refuse("moe_layer_freq", config.get("moe_layer_freq"), "1: every layer after the dense ones has experts")
    first = config.read_count("first_k_dense_replace", minimum=0, maximum=num_layers)
    return tuple(range(first, num_layers))


def sparse_step_layers(config: Config, num_layers: int) -> tuple[int, ...]:
    """Each `decoder_sparse_step`th layer that is not in `mlp_only_layers` (modeling_qwen3_moe.py)."""
    step = config.read_count("decoder_sparse_step", maximum=MAX_LAYERS)
    dense = set(config.read_indices("mlp_only_layers"))
    return tuple(x for x in range(num_layers) if x not in dense and (x + 1) % step == 0)


def interleaved_layers(config: Config, num_layers: int) -> tuple[int, ...]:
    """`moe_layers`, or each `interleave_moe_layer_step`th layer (configuration_llama4.py)."""
    listed = config.read_indices("moe_layers")
    if any(layer >= num_layers for layer in listed):
        config.refuse("moe_layers", max(listed), f"layers below num_hidden_layers, {num_layers}")
    step = config.read_count("interleave_moe_layer_step", maximum=MAX_LAYERS)
    return listed or tuple(range(step - 1, num_layers, step))


def between_indices(config: Config, num_layers: int) -> tuple[int, ...]:
    """Every `moe_layer_interval`th layer from `moe_layer_start_index` to `moe_layer_end_index`
    (modeling_ernie4_5_moe.py).
    """
    start = config.read_count("moe_layer_start_index", minimum=0, maximum=MAX_LAYERS)
    end = config.read_count("moe_layer_end_index", minimum=-1, maximum=MAX_LAYERS)
    every = config.read_count("moe_layer_interval", maximum=MAX_LAYERS)
    last = num_layers - 1 if end == -1 else end
    return tuple(x for x in range(num_layers) if (x + 1) % every == 0 and start <= x <= last)
