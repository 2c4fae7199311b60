"""ModelSpec: the shape of a language model, read from a Hugging Face `config.json` as data.

In: a folder with `config.json`. Out: every parameter tensor by name and shape, in the order of the Hugging Face module.
Left out: everything that is not a dense decoder with rotary positions and a gated MLP (refused by name, never guessed).

Symbols: h hidden_size, L num_layers, a num_heads, k num_kv_heads, d head_dim, I intermediate_size, V vocab_size.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from rlplan.errors import SpecError, did_you_mean
from rlplan.spec.base import Spec, read_json, shorten


@dataclass(frozen=True)
class _Family:
    """How an architecture differs from the plain one. Source: transformers 5.19 modeling files of that name.

    reads_attention_bias: `attention_bias: true` gives the four attention projections a bias.
    required: keys whose absence would mean a constant of the library's (8 or 32 heads, 128 wide) rather than
    something that follows from the others.
    """

    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    reads_attention_bias: bool = False
    required: tuple[str, ...] = ("num_key_value_heads",)


FAMILIES = {
    "LlamaForCausalLM": _Family(reads_attention_bias=True, required=()),
    "MistralForCausalLM": _Family(),
    "Qwen2ForCausalLM": _Family(has_qkv_bias=True),
    "Qwen3ForCausalLM": _Family(
        has_qk_norm=True, reads_attention_bias=True, required=("num_key_value_heads", "head_dim")
    ),
}

MAX_DIMENSION = 1 << 24
"""Above any real model's sizes: a config beyond it is broken or hostile."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter tensor: its Hugging Face name and its shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class ModelSpec(Spec):
    """The shape of a dense decoder. All sizes are counts of elements or tokens."""

    architecture: str
    hidden_size: int = Field(ge=1, le=MAX_DIMENSION)
    num_layers: int = Field(ge=1, le=10_000)
    num_heads: int = Field(ge=1, le=MAX_DIMENSION)
    num_kv_heads: int = Field(ge=1, le=MAX_DIMENSION)
    head_dim: int = Field(ge=1, le=MAX_DIMENSION)
    intermediate_size: int = Field(ge=1, le=MAX_DIMENSION)
    vocab_size: int = Field(ge=1, le=MAX_DIMENSION)
    max_position_embeddings: int = Field(ge=1, le=1 << 30)
    has_tied_embeddings: bool
    has_qkv_bias: bool
    has_qk_norm: bool
    has_output_bias: bool = False

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter tensor, in the order of the Hugging Face module's `named_parameters()`."""
        tensors = [Parameter("model.embed_tokens.weight", (self.vocab_size, self.hidden_size))]
        for layer in range(self.num_layers):
            tensors += self._layer_parameters(f"model.layers.{layer}.")
        tensors.append(Parameter("model.norm.weight", (self.hidden_size,)))
        if not self.has_tied_embeddings:
            tensors.append(Parameter("lm_head.weight", (self.vocab_size, self.hidden_size)))
        return tuple(tensors)

    @property
    def num_parameters(self) -> int:
        """Number of parameters; tied tensors count once."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def q_size(self) -> int:
        """Width of the query projection, a*d."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of one of the key and value projections, k*d."""
        return self.num_kv_heads * self.head_dim

    def _layer_parameters(self, prefix: str) -> list[Parameter]:
        h, attention, mlp = self.hidden_size, f"{prefix}self_attn.", f"{prefix}mlp."
        tensors = []
        for name, width in (("q_proj", self.q_size), ("k_proj", self.kv_size), ("v_proj", self.kv_size)):
            tensors.append(Parameter(f"{attention}{name}.weight", (width, h)))
            if self.has_qkv_bias:
                tensors.append(Parameter(f"{attention}{name}.bias", (width,)))
        tensors.append(Parameter(f"{attention}o_proj.weight", (h, self.q_size)))
        if self.has_output_bias:
            tensors.append(Parameter(f"{attention}o_proj.bias", (h,)))
        if self.has_qk_norm:
            tensors += [Parameter(f"{attention}{name}.weight", (self.head_dim,)) for name in ("q_norm", "k_norm")]
        tensors += [Parameter(f"{mlp}{name}.weight", (self.intermediate_size, h)) for name in ("gate_proj", "up_proj")]
        tensors.append(Parameter(f"{mlp}down_proj.weight", (h, self.intermediate_size)))
        norms = ("input_layernorm", "post_attention_layernorm")
        return tensors + [Parameter(f"{prefix}{name}.weight", (h,)) for name in norms]


def load_model(folder: Path) -> ModelSpec:
    """ModelSpec of a Hugging Face folder. Raises: SpecError naming the key, never runs code from the folder."""
    path = folder / "config.json"
    config = read_json(path, "the model's config.json")
    if not isinstance(config, dict):
        raise SpecError(
            f"config.json holds a {type(config).__name__}",
            where=str(path),
            rule="one JSON object",
            way_out="give a Hugging Face model folder",
        )
    return model_from_config(config, where=str(path))


def model_from_config(config: dict[str, Any], *, where: str) -> ModelSpec:
    """ModelSpec of a parsed `config.json`. Raises: SpecError."""
    architectures = config.get("architectures")
    found = architectures[0] if isinstance(architectures, list) and architectures else None
    name = found if isinstance(found, str) else ""
    family = FAMILIES.get(name)
    if family is None:
        raise SpecError(
            f"architecture {shorten(found)} is not known",
            where=f"{where}: architectures",
            rule=f"one of {', '.join(FAMILIES)}." + did_you_mean(name[:60], FAMILIES),
            way_out="use a model of one of these families",
        )
    for key in family.required:
        if config.get(key) is None:
            raise _missing(key, where)
    _refuse_unmodelled(name, config, where)
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    head_dim = config.get("head_dim")
    if head_dim is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        if hidden % heads:
            raise SpecError(
                f"hidden_size {hidden} does not divide by num_attention_heads {heads}",
                where=where,
                rule="head_dim is hidden_size / num_attention_heads unless given",
                way_out="give head_dim",
            )
        head_dim = hidden // heads
    has_attention_bias = config.get("attention_bias", False) if family.reads_attention_bias else False
    fields = {
        "architecture": name,
        "hidden_size": hidden,
        "num_layers": config.get("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads", heads),
        "head_dim": head_dim,
        "intermediate_size": config.get("intermediate_size"),
        "vocab_size": config.get("vocab_size"),
        "max_position_embeddings": config.get("max_position_embeddings"),
        "has_tied_embeddings": config.get("tie_word_embeddings", False),
        "has_qkv_bias": family.has_qkv_bias or has_attention_bias,
        "has_qk_norm": family.has_qk_norm,
        "has_output_bias": has_attention_bias,
    }
    return _checked(fields, where)


def _refuse_unmodelled(architecture: str, config: dict[str, Any], where: str) -> None:
    """Raises: SpecError for what would change the parameters or the attention, and is not counted here."""
    layer_types = config.get("layer_types")
    has_window = architecture == "MistralForCausalLM" and config.get("sliding_window", 4096) is not None
    plain_layers = layer_types is None or (
        isinstance(layer_types, list) and all(kind == "full_attention" for kind in layer_types)
    )
    for key, is_refused, rule in (
        ("use_sliding_window", config.get("use_sliding_window") not in (None, False), "full attention only"),
        ("sliding_window", has_window, "full attention only: null, for a Mistral without the key has a window of 4096"),
        ("layer_types", not plain_layers, "every layer is 'full_attention'"),
        ("mlp_bias", config.get("mlp_bias") not in (None, False), "an MLP without biases"),
        ("quantization_config", config.get("quantization_config") is not None, "weights that are not quantised"),
    ):
        if is_refused:
            raise SpecError(
                f"{key} is {shorten(config.get(key))}",
                where=f"{where}: {key}",
                rule=rule,
                way_out="use another model",
            )


def _missing(key: str, where: str) -> SpecError:
    return SpecError(
        f"key '{key}' is missing",
        where=f"{where}: {key}",
        rule="the key is required",
        way_out="repair or replace the config",
    )


_CONFIG_KEYS = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "has_tied_embeddings": "tie_word_embeddings",
    "has_qkv_bias": "attention_bias",
    "has_output_bias": "attention_bias",
}


def _checked(fields: dict[str, Any], where: str) -> ModelSpec:
    try:
        model = ModelSpec.model_validate(fields, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        key = _CONFIG_KEYS.get(field, field)
        if fields.get(field) is None:
            raise _missing(key, where) from None
        what = f"{key} is {shorten(first['input'])}"
        raise SpecError(
            what, where=f"{where}: {key}", rule=first["msg"], way_out="repair or replace the config"
        ) from None
    if model.num_heads % model.num_kv_heads:
        raise SpecError(
            f"num_attention_heads {model.num_heads} does not divide by num_key_value_heads {model.num_kv_heads}",
            where=f"{where}: num_key_value_heads",
            rule="each key-value head serves a whole number of query heads",
            way_out="repair or replace the config",
        )
    return model
