"""Models by the names that logs and papers use: quantized checkpoints, fine-tunes, spellings such as `Llama 2 7B`.

In: a point. Out: its ModelSpec, and the `policy` of its job. Left out: models that are neither in the catalogue nor in
data/model_shapes.json, nor given as a config with the point; they are refused, never guessed.

A name is looked up literally first, then by its key: the last part in lower case, without spaces, dashes and words that
do not change the shape. A fine-tune that names its base (`Hermes-3-Llama-3.1-8B`) has the base's shape.
"""

import json
import re
from functools import cache
from importlib import resources
from typing import Any

from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.predictions import CannotPredict
from rlplan.spec.base import shorten_value
from rlplan.spec.model import ModelSpec, model_from_config
from rlplan.spec.models.catalogue import load_catalogue

SHAPELESS = frozenset(
    {
        *("meta", "class", "instruct", "chat", "it", "hf", "base", "pt", "thinking", "params", "model"),
        *("beta", "terminus", "preview", "reasoning", "1m", "nvidia", "bf16"),
    }
)
"""Words of a name that do not change the model's shape."""
OTHER_MODELS = re.compile(
    r"^tiny$|embed|rerank|reward|draft|eagle|medusa|speculat|prun|minitron|vision|gguf|merge|depth|upscal|moe|mtp|adapter|lora"
)
"""Words in a name that rule out the shape of the base model in the same name."""
_SUFFIX = re.compile(
    r"-(fp8-dynamic|fp8-kv|fp8|nvfp4|mxfp4|fp4|awq-int4|awq|gptq-int8|gptq-int4|gptq|bnb-4bit|nf4|int8"
    r"|(quantized\.)?(w8a8|w8a16|w4a16(-g128)?))$",
    re.IGNORECASE,
)
"""Suffixes that name the format of a quantized checkpoint."""
QUANTIZED_AS_PUBLISHED = re.compile(r"gpt-oss-\d|deepseek-(v3|r1)(?!-distill)|kimi-k2")
"""Names of models that are published quantized, without a suffix."""
QUANTIZATION_KEYS = ("quantization", "quant", "weights", "precision", "dtype")
"""Settings that name a format of weights."""


def find_point_model(point: MeasuredPoint) -> ModelSpec:
    """The model of a point, from its setting `config` or by name. Raises: CannotPredict, SpecError."""
    config = point.settings.get("config")
    if isinstance(config, dict):
        return model_from_config(config, where=f"{point.id}: config")
    if point.settings.get("is_tiny") is True:
        raise CannotPredict("a dry run's model is cut down to a size that the point does not state")
    if not point.model:
        raise CannotPredict("the model is not named")
    if cut := _LAYERS.search(point.model):
        return model_from_config(_cut_layers(point, _LAYERS.sub("", point.model), int(cut.group(1))), where=point.id)
    return model_by_name(point.model)


def make_policy(point: MeasuredPoint, *, longest: int = 0) -> dict[str, Any]:
    """The `policy` of the point's job: a bundled model by its id, any other by its config. Raises: CannotPredict.

    longest: tokens of the longest sequence; a model with a shorter limit gets this one.
    """
    model = find_point_model(point)
    policy: dict[str, Any] = {"path": point.model or "model"}
    config = point.settings.get("config")
    cut = _LAYERS.search(point.model or "")
    if isinstance(config, dict):
        policy["config"] = config
    elif cut:
        policy["config"] = _cut_layers(point, _LAYERS.sub("", point.model or ""), int(cut.group(1)))
    elif point.model not in load_catalogue():
        policy["config"] = find_config(point.model or "")
    if longest > model.max_position_embeddings:
        policy["max_position_embeddings"] = longest
    return policy


_LAYERS = re.compile(r"\s*\((\d{1,3}) layers?\)")
"""Marks a run with only the first layers of a published model."""


def _cut_layers(point: MeasuredPoint, name: str, num_layers: int) -> dict[str, Any]:
    """The config of a model's first layers; the setting `dense_layers` gives the dense layers before the experts."""
    config = dict(find_config(name))
    stated = point.settings.get("layers")
    if stated is not None and stated != num_layers:
        raise CannotPredict(
            f"the model has {num_layers} layers by its name, setting 'layers' is {shorten_value(stated)}"
        )
    key = next((key for key in ("num_hidden_layers", "n_layer", "n_layers") if key in config), "num_hidden_layers")
    config[key] = num_layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:num_layers]
    dense = point.settings.get("dense_layers")
    if dense is not None and "first_k_dense_replace" in config:
        config["first_k_dense_replace"] = dense
    return config


def unquantized_name(name: str) -> str:
    """The name of a quantized checkpoint's original model.

    >>> unquantized_name("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4"), unquantized_name("Qwen/Qwen3-8B")
    ('Qwen/Qwen2.5-7B-Instruct', 'Qwen/Qwen3-8B')
    """
    return _SUFFIX.sub("", name)


def has_quantized_name(point: MeasuredPoint) -> bool:
    """Whether a point's checkpoint is quantized by its config or its name."""
    name = point.model or ""
    is_named = unquantized_name(name) != name or QUANTIZED_AS_PUBLISHED.search(name.lower()) is not None
    return is_named or find_point_model(point).quantization is not None


@cache
def model_by_name(name: str) -> ModelSpec:
    """The model of a name: exact, by its key, without its quantization suffix, or the base that it names.

    >>> [model_by_name(name).num_layers for name in ("Qwen/Qwen3-32B-FP8", "Qwen2.5-1.5B-class", "Llama 2 7B")]
    [64, 28, 32]
    """
    return model_from_config(dict(find_config(name)), where=f"model {shorten_value(name)}")


def find_config(name: str) -> dict[str, Any]:
    """The config of the model of a name. Raises: CannotPredict.

    >>> find_config("NousResearch/Hermes-3-Llama-3.1-8B") == find_config("meta-llama/Llama-3.1-8B")
    True
    """
    if len(name) <= 200:  # the search for a base model is quadratic in the words of a name
        configs = _load_configs()
        if name in configs:
            return configs[name]
        by_key, plain = _index_by_key(), unquantized_name(name)
        bare = re.sub(r"\s*\((?:hybrid|dense|mamba\d?|moe|[\s-])+\)\s*$", "", plain, flags=re.IGNORECASE)  # a remark
        for wanted in (make_key(name), make_key(plain), make_key(plain, has_dates=False), make_key(bare)):
            if wanted in by_key:
                return configs[by_key[wanted]]
        if base := _find_base(plain):
            return configs[base]
    raise CannotPredict(
        f"model {shorten_value(name)} is not in the catalogue; give its config.json as the setting `config`"
    )


def make_key(name: str, *, has_dates: bool = True) -> str:
    """The key of a name. has_dates: dates and releases (`2507`, `v1.0`) stay part of it.

    >>> make_key("meta-llama/Meta-Llama-3.1-8B-Instruct"), make_key("Llama3.1 8B"), make_key("vicuna-7b-v1.5")
    ('llama3.18b', 'llama3.18b', 'vicuna7bv1.5')
    >>> make_key("Mistral-Small-24B-Instruct-2501", has_dates=False)
    'mistralsmall24b'
    """
    words = [word for word in _split_words(name) if word not in SHAPELESS]
    if not has_dates:
        words = [word for word in words if not re.fullmatch(r"\d{4}|v\d+(\.\d+)*", word)]
    return "".join(words)


def _split_words(name: str) -> list[str]:
    return [word for word in re.split(r"[\s\-_()]+", name.lower().rstrip("/").rpartition("/")[2]) if word]


def _find_base(name: str) -> str | None:
    """The longest known model name, with a size, within the words of a name; None without one."""
    words = [word for word in _split_words(name) if word not in SHAPELESS]
    if any(OTHER_MODELS.search(word) for word in words):
        return None
    by_key = _index_by_key()
    spans = ((first, last) for first in range(len(words)) for last in range(first + 2, len(words) + 1))
    for first, last in sorted(spans, key=lambda span: span[0] - span[1]):
        part = words[first:last]
        has_size = any(re.fullmatch(r"(\d+x)?\d+(\.\d+)?[bm]", word) for word in part)
        if has_size and (known := by_key.get("".join(part))):
            return known
    return None


@cache
def _load_configs() -> dict[str, dict[str, Any]]:
    """Configs by name, from the catalogue and data/model_shapes.json."""
    configs = {name: entry.config for name, entry in load_catalogue().items()}
    shapes = shape_entries()

    def merge(name: str) -> dict[str, Any]:
        if name not in shapes:
            return configs[name]
        entry = shapes[name]
        base = merge(entry["like"]) if "like" in entry else {}
        return {**base, **entry.get("config", {})}

    return configs | {name: merge(name) for name in shapes if name not in configs}


@cache
def shape_entries() -> dict[str, dict[str, Any]]:
    """The entries of data/model_shapes.json: `config`, `like` (a base entry), and `num_parameters` if published."""
    text = (resources.files("rlplan.accuracy") / "data" / "model_shapes.json").read_text("utf-8")
    models: dict[str, dict[str, Any]] = json.loads(text)["models"]
    return models


@cache
def _index_by_key() -> dict[str, str]:
    """Names by key. The first name of a key wins, and a key with dates wins over one without."""
    names = list(_load_configs())
    undated = {make_key(name, has_dates=False): name for name in reversed(names)}
    return undated | {make_key(name): name for name in reversed(names)}
