"""A `config.json` read key by key: each value is checked where it is used, and errors name file, key and value.

In: parsed JSON. Out: counts, booleans, lists of names, the QuantizationSpec of a checkpoint's weights. An unknown
method of quantization is kept, and refused where its bytes are needed (memory/model/quantization.py). Left out: keys
that are never read, such as `auto_map` and `trust_remote_code`, so that code named by a config is never looked at.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pydantic import Field

from rlplan.errors import SpecError
from rlplan.reading import read_text
from rlplan.spec.base import Spec, parse_json, shorten_value

MAX_DIMENSION = 1 << 24
"""Limit of a model's sizes, above any real one: a larger value is broken or hostile."""

MAX_LAYERS = 10_000
MAX_CONFIG_BYTES = 2 << 20
"""Size limit of a config. The longest published ones list thousands of unquantized layers in 1.2 MB."""

OTHER_MODEL = "use another model, or measure this one with `rlplan estimate --trace`"
REPAIR = "repair or replace the config"


class Config:
    """The keys of one level of a config.

    where: the file, for messages. path: dotted path of this level, empty at the top. defaults: values that the
    library's config class assumes for missing keys.
    """

    def __init__(
        self, data: Mapping[str, Any], *, where: str, path: str = "", defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.data, self.where, self.path, self.defaults = data, where, path, defaults or {}

    def get(self, key: str) -> Any:
        """The value in the file, else the library's default, else None."""
        return self.data[key] if key in self.data else self.defaults.get(key)

    def read_count(self, key: str, *, maximum: int = MAX_DIMENSION, minimum: int = 1) -> int:
        """An integer. Raises: SpecError where it is missing, not an integer, or out of bounds."""
        value = self.get(key)
        if value is None:
            self.refuse_missing(key)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            self.refuse(key, value, f"a whole number from {minimum} to {maximum}")
        return value

    def read_optional_count(self, key: str, *, maximum: int = MAX_DIMENSION, minimum: int = 1) -> int | None:
        """An integer, or None if the file has null or nothing. Raises: SpecError."""
        return None if self.get(key) is None else self.read_count(key, maximum=maximum, minimum=minimum)

    def read_flag(self, key: str, *, default: bool) -> bool:
        """A boolean, or the default if the file has none. Raises: SpecError."""
        # not self.get(): an explicit null is an error here, not a missing key
        value = self.data.get(key, self.defaults.get(key, default))
        if value is None:
            self.refuse_missing(key)
        if not isinstance(value, bool):
            self.refuse(key, value, "true or false")
        return value

    def read_words(self, key: str, allowed: Sequence[str], *, length: int) -> tuple[str, ...] | None:
        """One word per layer, or None if the file has none. Raises: SpecError."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(word, str) and word in allowed for word in value):
            wrong = next((word for word in value if word not in allowed), value) if isinstance(value, list) else value
            self.refuse(key, wrong, f"a list of one of {', '.join(allowed)} for each layer")
        if len(value) != length:
            self.refuse(key, f"{len(value)} layers", f"one word for each of the {length} layers")
        return tuple(value)

    def read_indices(self, key: str) -> tuple[int, ...]:
        """A list of layer numbers, empty if the file has none. Raises: SpecError."""
        value = self.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(index) is int and 0 <= index < MAX_LAYERS for index in value):
            self.refuse(key, value, f"a list of layer numbers from 0 to {MAX_LAYERS - 1}")
        return tuple(value)

    def read_child(self, key: str, *, defaults: Mapping[str, Any] | None = None) -> "Config":
        """A nested level. Raises: SpecError where it is missing or not an object."""
        value = self.get(key)
        if value is None:
            self.refuse_missing(key)
        if not isinstance(value, dict):
            self.refuse(key, value, "an object of keys and values")
        return Config(value, where=self.where, path=self.key_path(key), defaults=defaults)

    def choose_key(self, names: str) -> str:
        """The first of several spellings, separated by `|`, that has a value; the first if none has."""
        alternatives = names.split("|")
        return next((name for name in alternatives if self.get(name) is not None), alternatives[0])

    def key_path(self, key: str) -> str:
        """Dotted path of a key of this level."""
        return f"{self.path}.{key}" if self.path else key

    def refuse_unless(self, key: str, allowed: Any) -> None:
        """Raises: SpecError where a key has a value that changes tensors beyond what the tables describe."""
        value = self.get(key)
        if value is not None and value != allowed:
            self.refuse(key, value, f"{shorten_value(allowed)}: another value is not modelled", way_out=OTHER_MODEL)

    def refuse(self, key: str, value: Any, rule: str, *, way_out: str = REPAIR) -> NoReturn:
        """Raises: SpecError naming file, key path, value and rule."""
        raise SpecError(
            f"{key} is {shorten_value(value)}", where=f"{self.where}: {self.key_path(key)}", rule=rule, way_out=way_out
        )

    def refuse_missing(self, key: str) -> NoReturn:
        """Raises: SpecError for a missing key without a safe default."""
        raise SpecError(
            f"key '{key}' is {'null' if key in self.data else 'missing'}",
            where=f"{self.where}: {self.key_path(key)}",
            rule="the key is required: a library's default would be a guess",
            way_out=REPAIR,
        )


def read_config(path: Path) -> dict[str, Any]:
    """The top level of a config file. Raises: SpecError unless it is a small JSON object with unique keys."""
    text = read_text(path, "the model's config.json", limit=MAX_CONFIG_BYTES)
    # published configs contain `Infinity` (NemotronH's `time_step_limit`), but never a meaningful NaN
    data = parse_json(text, what="config.json", where=str(path), takes_infinity=True)
    if not isinstance(data, dict):
        raise SpecError(
            f"config.json holds a {type(data).__name__}",
            where=str(path),
            rule="one JSON object",
            way_out="give a Hugging Face model folder or its config.json",
        )
    return data


MAX_WORD = 60
MAX_NAMES = 100_000
UNNAMED = "unnamed"


class QuantizationSpec(Spec):
    """The storage format of weights."""

    method: str
    """Method: `fp8`, `awq`, `gptq`, `bitsandbytes`, `mxfp4`, `compressed-tensors` and others; `unnamed` if it has no
    name."""
    bits: int | None = Field(default=None, ge=1, le=16)
    """Bits per weight."""
    group_size: int | None = Field(default=None, ge=1, le=1 << 20)
    """Weights of a row that share a scale; None for whole rows or matrices."""
    is_float: bool = False
    """Whether the format is floating-point (fp8, fp4) instead of integer."""
    strategy: str = ""
    """Granularity of scales: `tensor`, `channel`, `group`, `block`; empty if the method determines it."""
    has_double_quant: bool = False
    """Whether scales are quantized too."""
    has_zero_points: bool | None = None
    """Whether there are zero points in addition to scales; None if the config does not say."""
    has_act_order: bool = False
    """Whether groups consist of non-adjacent columns (GPTQ's `desc_act`)."""
    left_out: tuple[str, ...] = ()
    """Modules that are not quantized."""


def read_quantization(*levels: Config) -> QuantizationSpec | None:
    """The quantization of the first level that has one; None for plain weights. Raises: SpecError for an invalid
    config.
    """
    for level in levels:
        if level.get("quantization_config") is not None:
            return _read(level.read_child("quantization_config"))
    return None


def _read(config: Config) -> QuantizationSpec:
    method = config.get("quant_method") or config.get("quant_algo") or UNNAMED
    if not isinstance(method, str) or len(method) > MAX_WORD:
        config.refuse("quant_method", method, "the name of a method")
    weights = _group_weights(config)
    is_8bit = config.get("load_in_8bit") is True
    strategy = weights.get("strategy", "")
    return QuantizationSpec(
        method=method.lower(),
        bits=8 if is_8bit else _small(weights.get("num_bits", config.get("bits")), 16),
        group_size=_small(weights.get("group_size", config.get("group_size")), 1 << 20),
        is_float=weights.get("type") == "float",
        strategy="block" if config.get("weight_block_size") else strategy if isinstance(strategy, str) else "",
        has_double_quant=config.get("bnb_4bit_use_double_quant") is True,
        has_zero_points=_has_zero_points(config, weights),
        has_act_order=config.get("desc_act") is True,
        left_out=_names(config),
    )


def _has_zero_points(config: Config, weights: dict[str, Any]) -> bool | None:
    """Whether there are zero points: AWQ's `zero_point`, or the opposite of `sym` (GPTQ) or `symmetric`
    (compressed-tensors).
    """
    if isinstance(zero_point := config.get("zero_point"), bool):
        return zero_point
    is_symmetric = weights.get("symmetric", config.get("sym"))
    return None if not isinstance(is_symmetric, bool) else not is_symmetric


def _group_weights(config: Config) -> dict[str, Any]:
    """The weight settings of the first group of a compressed-tensors or ModelOpt config; empty for other methods."""
    groups = config.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = first.get("weights") if isinstance(first, dict) else None
    return weights if isinstance(weights, dict) else {}


def _small(value: Any, limit: int) -> int | None:
    """A count up to a limit; None for -1 (no groups) and for other values."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= limit else None


def _names(config: Config) -> tuple[str, ...]:
    known = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")
    key = next((key for key in known if config.get(key)), "")
    if not key:
        return ()
    value = config.get(key)
    is_list = isinstance(value, list) and len(value) <= MAX_NAMES
    if not is_list or not all(isinstance(name, str) and len(name) <= 500 for name in value):
        config.refuse(key, value, "a list of module names")
    return tuple(name for name in value if isinstance(name, str))
