"""Small models of an architecture: configs with few layers and small widths, otherwise unchanged.

In: a `config.json` as data. Out: the small config, which is also part of the key of the model's proof: models with
equal small configs share a proof. Left out: quantization, images.
"""

from typing import Any

NUM_HEADS, HIDDEN, INTERMEDIATE, VOCABULARY, WINDOW, NUM_EXPERTS = 4, 128, 96, 256, 16, 8
MAX_LAYERS = 6
"""Maximum number of layers; enough for one of every kind: Gemma 3's first global-attention layer is its sixth."""

_IGNORED = (
    *("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "initializer_range", "auto_map"),
    *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "output_router_logits", "pad_token_id"),
    *("bos_token_id", "eos_token_id", "max_window_layers", "id2label", "label2id", "num_labels", "name_or_path"),
)
"""Keys that change neither the names of weights nor the results of the probe."""


def shrink_config(config: dict[str, Any]) -> dict[str, Any]:
    """Shrink a config; head size, activations, norms, positions and all multipliers are kept.

    >>> large = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 9999}
    >>> small = shrink_config(large)
    >>> small["num_attention_heads"], small["num_key_value_heads"], small["hidden_size"]
    (4, 2, 512)
    """
    small = {key: value for key, value in config.items() if key not in _IGNORED}
    heads, layers = int(config["num_attention_heads"]), int(config.get("num_hidden_layers") or 2)
    key_heads = int(config.get("num_key_value_heads") or heads)
    head_size = config.get("head_dim") or int(config["hidden_size"]) // heads
    small |= {
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_HEADS if key_heads == heads else 1 if key_heads == 1 else 2,
        "hidden_size": HIDDEN if config.get("head_dim") else NUM_HEADS * head_size,
        "num_hidden_layers": _num_layers(config, layers),
        "vocab_size": VOCABULARY,
    }
    for key, size in (
        *((key, INTERMEDIATE) for key in ("intermediate_size", "moe_intermediate_size", "intermediate_size_mlp")),
        *((key, INTERMEDIATE) for key in ("shared_expert_intermediate_size", "shared_intermediate_size")),
        *((key, WINDOW) for key in ("sliding_window",)),
        *((key, NUM_EXPERTS) for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")),
        *((key, 4) for key in ("num_experts_per_tok", "moe_k")),
        *((key, 2) for key in ("n_group",)),
        *((key, 1) for key in ("topk_group", "first_k_dense_replace", "moe_layer_start_index")),
    ):
        if config.get(key):
            small[key] = min(size, int(config[key]))
    if config.get("layer_types"):
        small["layer_types"] = list(config["layer_types"])[: small["num_hidden_layers"]]
    if config.get("mlp_only_layers"):
        small["mlp_only_layers"] = [n for n in config["mlp_only_layers"] if n < small["num_hidden_layers"]]
    return small | {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}


def _num_layers(config: dict[str, Any], layers: int) -> int:
    """Number of layers that includes every kind once; at least two."""
    kinds = list(config.get("layer_types") or [])
    if kinds:
        wanted = max(kinds.index(kind) for kind in set(kinds)) + 1
    else:
        wanted = int(config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 2)
        wanted = max(wanted, 1 + int(config.get("first_k_dense_replace") or 0) and 2)
    step = int(config.get("decoder_sparse_step") or 1)
    return min(layers, MAX_LAYERS, max(2, wanted, step))
