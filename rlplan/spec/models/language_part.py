"""The language part of a vision-language model, as a plain decoder without the vision tower.

In: a `config.json` as data, names of stored tensors. Out: the decoder's config, its tensors' names. Left out: families
whose decoder equals no causal language model; they are refused by name where they would run.

Text alone never reaches the tower. Positions for time, height and width (M-RoPE) then are three equal numbers, that is,
plain rotary positions. Source: transformers 5.19, configuration_*.py of these models; names of tensors in older
checkpoints: its conversion_mapping.py.
"""

from typing import Any

from rlplan.spec.models.families.family import FAMILIES

_QWEN2 = ("Qwen2ForCausalLM", "qwen2", {"rms_norm_eps": 1e-5, "rope_theta": 1e6})
_QWEN3 = ("Qwen3ForCausalLM", "qwen3", {"rope_theta": 5e5})
_DECODERS: dict[tuple[str, str], tuple[str, str, dict[str, float]]] = {
    ("Qwen2_5_VLForConditionalGeneration", ""): _QWEN2,
    ("Qwen3VLForConditionalGeneration", ""): _QWEN3,
    ("Gemma3ForConditionalGeneration", ""): ("Gemma3ForCausalLM", "gemma3_text", {}),
    ("Mistral3ForConditionalGeneration", "mistral"): ("MistralForCausalLM", "mistral", {}),
    ("Mistral3ForConditionalGeneration", "ministral3"): ("Ministral3ForCausalLM", "ministral3", {}),
}
"""Decoder of each vision-language architecture, with the type of its text_config if there are several. A decoder has an
architecture, a type, and the defaults that differ between the two config classes."""

_OF_IMAGES = ("image_", "video_", "vision_", "mm_")
_THREE_AXES = ("mrope_section", "mrope_interleaved")
_DECODER = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")
_ONE_LEVEL_DOWN = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)


def is_vision_language(config: dict[str, Any]) -> bool:
    """Whether a config is that of a vision-language model whose language part is a known decoder."""
    return _find_decoder(config) is not None


def language_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the language part; for any other model, the config itself.

    >>> language_config({"architectures": ["Qwen2_5_VLForConditionalGeneration"], "hidden_size": 8,
    ...                  "rope_scaling": {"type": "mrope", "mrope_section": [1]}, "vision_config": {}})
    {'rms_norm_eps': 1e-05, 'rope_theta': 1000000.0, 'architectures': ['Qwen2ForCausalLM'], 'hidden_size': 8, \
'tie_word_embeddings': False, 'model_type': 'qwen2'}
    """
    decoder = _find_decoder(config)
    if decoder is None:
        return config
    architecture, kind, assumed = decoder
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else config
    around = {key: config[key] for key in ("dtype", "torch_dtype", "eos_token_id", "bos_token_id") if key in config}
    own = {key: value for key, value in text.items() if not key.startswith(_OF_IMAGES) and key != "_name_or_path"}
    family = FAMILIES[config["architectures"][0]]
    tied = next((level["tie_word_embeddings"] for level in (config, text) if "tie_word_embeddings" in level), None)
    named: dict[str, Any] = {
        "tie_word_embeddings": family.is_tied if tied is None else tied,
        "architectures": [architecture],
        "model_type": kind,
    }
    return _use_plain_positions(assumed | own | around) | named


def decoder_name(stored: str) -> str | None:
    """The decoder's name of a tensor in a vision-language model's file; None if it is not the decoder's.

    >>> stored = "model.language_model.norm.weight", "language_model.lm_head.weight", "visual.merger.ln_q.weight"
    >>> [decoder_name(name) for name in stored]
    ['model.norm.weight', 'lm_head.weight', None]
    """
    for outer, plain in _ONE_LEVEL_DOWN:
        if stored.startswith(outer):
            return plain + stored.removeprefix(outer)
    return stored if stored.startswith(_DECODER) else None


def _find_decoder(config: dict[str, Any]) -> tuple[str, str, dict[str, float]] | None:
    names, text = config.get("architectures"), config.get("text_config")
    name = names[0] if isinstance(names, list) and names else None
    kind = text.get("model_type", "mistral") if isinstance(text, dict) else "mistral"
    if not isinstance(name, str) or not isinstance(kind, str):
        return None
    return _DECODERS.get((name, "")) or _DECODERS.get((name, kind))


def _use_plain_positions(text: dict[str, Any]) -> dict[str, Any]:
    """A text config with one position per token instead of three."""
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(text.get(key), dict):
            continue
        rope = {name: value for name, value in text[key].items() if name not in _THREE_AXES}
        rope |= {name: "default" for name in ("type", "rope_type") if rope.get(name) == "mrope"}
        is_plain = key == "rope_scaling" and rope.get("rope_type", rope.get("type")) == "default"
        text = {name: value for name, value in text.items() if name != key} | ({} if is_plain else {key: rope})
    if "rope_theta" in (text.get("rope_parameters") or {}):
        text.pop("rope_theta", None)
    return text
