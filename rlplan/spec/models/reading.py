"""Reads the fields of a ModelSpec from a parsed config, by family.

In: the top level of a `config.json`. Out: field values, checked one by one. Left out: which families exist.
"""

import difflib
from typing import Any, NoReturn

from rlplan.errors import SpecError, did_you_mean
from rlplan.spec.base import shorten_value
from rlplan.spec.models.config import MAX_DIMENSION, MAX_LAYERS, OTHER_MODEL, REPAIR, Config, read_quantization
from rlplan.spec.models.families.family import FAMILIES, Family
from rlplan.spec.models.families.readers import Fields
from rlplan.spec.models.families.towers import read_tower

MAX_POSITIONS = 1 << 30
MAX_WORD = 60


def model_fields(data: dict[str, Any], *, where: str) -> Fields:
    """Fields of a ModelSpec. Raises: SpecError naming file, key path, value and rule."""
    architecture = known_architecture(data, where)
    family = FAMILIES[architecture]
    top = Config(data, where=where)
    text = _text_config(family, top)
    for key in family.required:
        if text.get(key) is None:
            text.refuse_missing(key)
    for key, allowed in family.fixed.items():
        text.refuse_unless(key, allowed)
    if text.get("per_layer_config") and not family.has_layer_overrides:
        text.refuse(
            "per_layer_config", text.get("per_layer_config"), "layers that differ by kind only", way_out=OTHER_MODEL
        )
    fields = _shape(family, text)
    for read in family.reads:
        fields |= read(text, fields["num_layers"])
    if "intermediate_size" not in fields:
        fields["intermediate_size"] = _intermediate_size(family, text, fields)
    if "head_dim" not in fields:
        fields["head_dim"] = _head_dim(family, text, fields)
    if fields["num_heads"] % fields["num_kv_heads"]:
        _refuse_indivisible(family, text, fields)
    options = set(fields.get("options", ())) | _switch_conditions(family, text)
    fields |= {
        "architecture": architecture,
        "has_tied_embeddings": _is_tied(family, top, text),
        "has_qkv_bias": "qkv_bias" in options | family.conditions,
        "has_output_bias": "output_bias" in options | family.conditions,
        "has_qk_norm": "qk_norm" in options | family.conditions,
        "options": tuple(sorted(options - {"qkv_bias", "output_bias", "qk_norm"})),
        "quantization": read_quantization(top, text),
    }
    if family.vision:
        fields["vision"] = read_tower(family.vision, top.read_child("vision_config"), fields["hidden_size"])
    if family.audio and top.get("audio_config") is not None:
        fields["audio"] = read_tower(family.audio, top.read_child("audio_config"), fields["hidden_size"])
    return fields


def known_architecture(data: dict[str, Any], where: str) -> str:
    """The first entry of `architectures`. Raises: SpecError with the nearest known name."""
    names = data.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    name = first if isinstance(first, str) else ""
    if name in FAMILIES:
        return name
    near = difflib.get_close_matches(name[:MAX_WORD], FAMILIES, n=3, cutoff=0) or sorted(FAMILIES)[:3]
    raise SpecError(
        f"architecture {shorten_value(first)} is not known",
        where=f"{where}: architectures",
        rule=f"one of {len(FAMILIES)} known ones; nearest: {', '.join(near)}.{did_you_mean(name[:MAX_WORD], FAMILIES)}",
        way_out=OTHER_MODEL,
    )


def _text_config(family: Family, top: Config) -> Config:
    """The level that describes the language model: nested, or the top in older multimodal configs."""
    if family.text_key and top.get(family.text_key) is not None:
        return top.read_child(family.text_key, defaults=family.defaults)
    return Config(top.data, where=top.where, defaults=family.defaults)


def _shape(family: Family, text: Config) -> Fields:
    hidden = text.read_count(family.key("hidden_size"))
    heads = text.read_count(family.key("num_attention_heads"))
    named = next((text.get(key) for key in ("layers_block_type", "layer_types") if text.get(key) is not None), None)
    key = family.key("num_hidden_layers")
    if text.get(key) is None and isinstance(named, list) and 0 < len(named) <= MAX_LAYERS:
        layers = len(named)
    else:
        layers = text.read_count(key, maximum=MAX_LAYERS)
    kv_heads = text.read_optional_count(family.key("num_key_value_heads")) or heads
    return {
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "vocab_size": text.read_count("vocab_size"),
        "max_position_embeddings": text.read_count(
            text.choose_key(family.key("max_position_embeddings")), maximum=MAX_POSITIONS
        ),
    }


def _head_dim(family: Family, text: Config, fields: Fields) -> int:
    """The config's head_dim, else hidden_size over the number of heads. Raises: SpecError where that does not
    divide.
    """
    head_dim = text.read_optional_count(family.key("head_dim"))
    hidden, heads = fields["hidden_size"], fields["num_heads"]
    if head_dim is None and hidden % heads:
        raise SpecError(
            f"hidden_size {hidden} does not divide by num_attention_heads {heads}",
            where=f"{text.where}: {text.key_path(family.key('num_attention_heads'))}",
            rule="head_dim is hidden_size / num_attention_heads unless config.json has head_dim",
            way_out="give head_dim",
        )
    return head_dim or hidden // heads


def _intermediate_size(family: Family, text: Config, fields: Fields) -> int:
    """Width of the dense MLP; 0 if every layer has experts instead and no key sets it."""
    key = family.key("intermediate_size")
    experts = fields.get("experts")
    if experts is not None and len(experts.layers) == fields["num_layers"]:
        return text.read_optional_count(key, minimum=0) or 0
    return text.read_count(key, maximum=MAX_DIMENSION)


def _switch_conditions(family: Family, text: Config) -> set[str]:
    on = (condition for key, (default, condition) in family.switches.items() if text.read_flag(key, default=default))
    return {word for condition in on for word in condition.split()}


def _is_tied(family: Family, top: Config, text: Config) -> bool:
    """Whether the head shares the embedding's table; the top level decides if both levels have the key (transformers
    5.19).
    """
    for config in (top, text):
        if "tie_word_embeddings" in config.data:
            return config.read_flag("tie_word_embeddings", default=family.is_tied)
    return family.is_tied


def _refuse_indivisible(family: Family, text: Config, fields: Fields) -> NoReturn:
    raise SpecError(
        f"num_attention_heads {fields['num_heads']} does not divide by num_key_value_heads {fields['num_kv_heads']}",
        where=f"{text.where}: {text.key_path(family.key('num_key_value_heads'))}",
        rule="each key-value head serves a whole number of query heads",
        way_out=REPAIR,
    )
