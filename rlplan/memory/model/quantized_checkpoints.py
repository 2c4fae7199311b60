"""Quantization of published checkpoints, read from their `quantization_config`, or derived from their name.

`quantized_checkpoints.json` maps published names and the words of other stacks to formats.

In: a checkpoint's config, or a name such as `Qwen/Qwen3-32B-FP8`. Out: a Quantization; None for an unquantized model.
Left out: the bytes (quantization.py). An unknown method is an error, never a guess.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlplan.errors import SpecError
from rlplan.memory.model import quantization as q
from rlplan.memory.model.quantization import Quantization, WeightFormat
from rlplan.spec.base import shorten_value
from rlplan.spec.models.quantization import QuantizationSpec

EXPERTS = r"\.experts(\.|$)"
"""Pattern of routed experts' tensors, stacked or single."""

_TABLES: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))


def _read_scheme(entry: str | list[str]) -> Quantization:
    """A scheme of the tables: the constant of a format, or [constant, `only`, `left_out`]."""
    constant, only, left_out = (*([entry] if isinstance(entry, str) else entry), "", "")[:3]
    return Quantization(getattr(q, constant), only, left_out)


_NAMES = tuple((pattern, _read_scheme(entry)) for pattern, entry in _TABLES["names"])
"""Patterns of published names, the most specific first. Source: each checkpoint's `quantization_config` on the Hugging
Face hub. Llama-3.1-405B-Instruct-FP8 (fbgemm_fp8) excludes attention, layer 0 and layer 125. gpt-oss quantizes its
experts, Kimi-K2-Thinking (compressed-tensors, groups of 32) its routed experts. Qwen and DeepSeek scale blocks of
128 x 128."""

_WORDS = {word: _read_scheme(entry) for word, entry in _TABLES["words"].items()}
"""Formats by the exact word."""

_PATTERNS = tuple((pattern, _read_scheme(entry)) for pattern, entry in _TABLES["patterns"])
"""Patterns for longer texts without spaces, dashes, dots and underscores, the most specific first."""

_CONFIGS: tuple[tuple[dict[str, list[Any]], WeightFormat], ...] = tuple(
    (entry["when"], getattr(q, entry["format"])) for entry in _TABLES["configs"]
)
"""Formats by the fields of a `quantization_config`, each with its allowed values; the first match counts."""

_UNQUANTIZED = frozenset(_TABLES["unquantized"])
"""Words that mean no quantization."""

_SPELLINGS = re.compile(r"^bnb[. ]|(?<=.)[ -.](w8a8|int4|4-?bit)$")
"""Redundant parts of a word: litgpt's prefix (`bnb.nf4`), and repeated bits (`AWQ 4-bit`, `fp8 W8A8`)."""


def find_quantization_by_name(name: str) -> Quantization | None:
    """The quantization of a published checkpoint by its name; None where the name implies none.

    >>> find_quantization_by_name("Qwen/Qwen3-32B-FP8").form.name, find_quantization_by_name("Qwen/Qwen3-32B")
    ('fp8-block', None)
    """
    for pattern, scheme in _NAMES:
        if re.search(pattern, name.lower()):
            return scheme
    return None


def parse_quantization(word: str, *, where: str) -> Quantization | None:
    """The usual scheme of a format, applied to every linear layer. Raises: SpecError for an unknown word.

    >>> parse_quantization("nf4-dq", where="here").form.name, parse_quantization("bf16", where="here")
    ('nf4-dq', None)
    >>> [parse_quantization(word, where="here").form.name for word in ("fp8 dynamic", "w4a16_awq", "gptq int4")]
    ['fp8-channel', 'awq', 'gptq']
    """
    text = _SPELLINGS.sub("", word.strip().lower())
    text = text.removeprefix("torch.")
    if text in _UNQUANTIZED:
        return None
    squeezed = re.sub(r"[\s._\-]+", "", text)
    scheme = _WORDS.get(text) or next((scheme for pattern, scheme in _PATTERNS if re.search(pattern, squeezed)), None)
    if scheme is None:
        raise SpecError(
            f"quantisation '{shorten_value(word)[1:-1]}' is unknown",
            where=where,
            rule=f"known: {', '.join(_WORDS)}, or none",
            way_out="use one of them, or the checkpoint's published name",
        )
    return scheme


def convert_quantization_spec(spec: QuantizationSpec, *, where: str) -> Quantization:
    """The quantization that a checkpoint's own config states: method, group size and excluded modules.

    Raises: SpecError for a method that is not counted.

    >>> spec = QuantizationSpec(method="fp8", strategy="block", left_out=("lm_head",))
    >>> convert_quantization_spec(spec, where="config.json").form.name
    'fp8-block'
    """
    left_out = frozenset(name.removeprefix("re:").strip(".*^$\\").replace("\\.", ".") for name in spec.left_out)
    return Quantization(_find_format(spec, where), ignored=left_out - {""})


def _find_format(spec: QuantizationSpec, where: str) -> WeightFormat:
    form = next((form for when, form in _CONFIGS if all(getattr(spec, key) in when[key] for key in when)), None)
    if form is None:
        words = f"{spec.method}, {spec.bits} bits, {spec.strategy or 'no strategy'}"
        methods = dict.fromkeys(method for when, _ in _CONFIGS for method in when["method"])
        named = ", ".join(method for method in methods if method != "compressed-tensors")
        raise SpecError(
            f"quantisation '{shorten_value(words)[1:-1]}' is not counted",
            where=f"{where}: quantization_config",
            rule=f"counted: {named}, and compressed-tensors of 8 bits or 4-bit groups",
            way_out="use another checkpoint, or the unquantised model",
        )
    if form in (q.AWQ, q.GPTQ, q.GPTQ_8) and spec.group_size:
        return replace(form, block=(1, spec.group_size))
    return form
