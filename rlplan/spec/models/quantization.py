"""The quantization of a checkpoint's weights, from `quantization_config`.

In: a level of a config. Out: a QuantizationSpec. Left out: bytes (memory/model/quantization.py), scales of activations
and caches, supported methods: an unknown name is kept, and refused where its bytes are needed.
"""

from typing import Any

from pydantic import Field

from rlplan.spec.base import Spec
from rlplan.spec.models.config import Config

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
