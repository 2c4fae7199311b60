"""Which tensors a published checkpoint quantises, and how: from its `quantization_config`, or from its name.

In: the config's mapping as data, or a name such as `Qwen/Qwen3-32B-FP8`. Out: a Quantization, or None for none.
Left out: the bytes (quantization.py). An unknown method is an error, never a guess.
"""

import re
from collections.abc import Mapping
from typing import Any

from rlplan.errors import SpecError
from rlplan.memory import quantization as q
from rlplan.memory.quantization import Quantization, WeightFormat
from rlplan.spec.base import shorten

EXPERTS = r"\.experts(\.|$)"
"""Names of routed experts' tensors, stacked or one by one."""

_NAMES: tuple[tuple[str, Quantization | None], ...] = (
    (r"llama-3\.1-405b(-instruct)?-fp8$", Quantization(q.FP8_CHANNEL, r"\.mlp\.", r"\.layers\.(0|125)\.")),
    (r"gpt-oss-\d+b$", Quantization(q.MXFP4, EXPERTS, r"bias")),
    (r"kimi-k2-thinking$", Quantization(q.INT4_GROUP_32, EXPERTS)),
    (r"deepseek-(v3|r1)(\.\d)?(-0\d+)?(-base|-zero|-terminus)?$", Quantization(q.FP8_BLOCK)),
    (r"kimi-k2-(instruct|base)(-0\d+)?$", Quantization(q.FP8_BLOCK)),
    (r"^qwen/.*-fp8$", Quantization(q.FP8_BLOCK)),
    (r"^(deepseek-ai|zai-org|minimaxai)/.*-fp8$", Quantization(q.FP8_BLOCK)),
    (r"-fp8-dynamic$", Quantization(q.FP8_CHANNEL)),
    (r"-fp8(-kv)?$", Quantization(q.FP8_TENSOR)),
    (r"-(nvfp4|fp4)$", Quantization(q.NVFP4)),
    (r"-mxfp4$", Quantization(q.MXFP4)),
    (r"-awq(-int4)?$", Quantization(q.AWQ)),
    (r"-gptq-int8$", Quantization(q.GPTQ_8)),
    (r"-gptq(-int4)?$", Quantization(q.GPTQ)),
    (r"-(bnb-4bit|nf4)$", Quantization(q.NF4_DOUBLE)),
    (r"-(int8|w8a8|quantized\.w8a8)$", Quantization(q.INT8_CHANNEL)),
)
"""Published names, most particular first. Source: each checkpoint's `quantization_config` on the Hugging Face hub:
Llama-3.1-405B-Instruct-FP8 (fbgemm_fp8) leaves attention, layer 0 and layer 125 alone; gpt-oss quantises its experts;
Kimi-K2-Thinking (compressed-tensors, groups of 32) its routed experts; Qwen and DeepSeek scale 128 x 128 blocks."""

_WORDS: dict[str, Quantization] = {
    "fp8": Quantization(q.FP8_TENSOR),
    "fp8_block": Quantization(q.FP8_BLOCK),
    "int8": Quantization(q.INT8_CHANNEL),
    "nf4": Quantization(q.NF4),
    "nf4-dq": Quantization(q.NF4_DOUBLE),
    "awq": Quantization(q.AWQ),
    "gptq": Quantization(q.GPTQ),
    "int4": Quantization(q.GPTQ),
    "mxfp4": Quantization(q.MXFP4),
    "nvfp4": Quantization(q.NVFP4),
    "bitsandbytes": Quantization(q.NF4_DOUBLE),
}
_NONE = ("", "none", "null", "bf16", "bfloat16", "fp16", "float16", "fp32", "float32", "half")
_SUFFIX = re.compile(
    r"-(fp8-dynamic|fp8-kv|fp8|nvfp4|mxfp4|fp4|awq-int4|awq|gptq-int8|gptq-int4|gptq|bnb-4bit|nf4|int8|w8a8"
    r"|quantized\.w8a8)$",
    re.IGNORECASE,
)


def quantization_by_name(name: str) -> Quantization | None:
    """What a published checkpoint of that name quantises; None where the name says nothing.

    >>> quantization_by_name("Qwen/Qwen3-32B-FP8").form.name, quantization_by_name("Qwen/Qwen3-32B")
    ('fp8-block', None)
    """
    for pattern, scheme in _NAMES:
        if re.search(pattern, name.lower()):
            return scheme
    return None


def unquantized_name(name: str) -> str:
    """The name of the model behind a quantised checkpoint.

    >>> unquantized_name("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4"), unquantized_name("Qwen/Qwen3-8B")
    ('Qwen/Qwen2.5-7B-Instruct', 'Qwen/Qwen3-8B')
    """
    return _SUFFIX.sub("", name)


def quantization_by_word(word: str, *, where: str) -> Quantization | None:
    """The usual scheme of a format's name, applied to every linear layer. Raises: SpecError for an unknown word.

    >>> quantization_by_word("nf4-dq", where="here").form.name, quantization_by_word("bf16", where="here")
    ('nf4-dq', None)
    """
    text = word.strip().lower()
    if text in _NONE:
        return None
    if text not in _WORDS:
        raise SpecError(
            f"quantisation '{shorten(word)[1:-1]}' is unknown",
            where=where,
            rule=f"known: {', '.join(_WORDS)}, or none",
            way_out="use one of them, or the checkpoint's published name",
        )
    return _WORDS[text]


def quantization_of_config(config: Mapping[str, Any], *, where: str) -> Quantization | None:
    """What `quantization_config` of a Hugging Face config says: method, group size and the modules left alone.

    Raises: SpecError for a method that is not counted.

    >>> config = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
    >>> quantization_of_config(config, where="config.json").form.name
    'fp8-block'
    """
    method = str(config.get("quant_method", config.get("quant_algo", ""))).lower()
    ignored = config.get("modules_to_not_convert") or config.get("ignore") or config.get("ignored_layers") or []
    if not isinstance(ignored, list) or not all(isinstance(name, str) for name in ignored):
        raise _wrong(f"modules left alone are {shorten(ignored)}", where, "a list of module names")
    return Quantization(_format(method, config, where), left_out=_pattern(ignored))


def _format(method: str, config: Mapping[str, Any], where: str) -> WeightFormat:
    bits = config.get("bits", 4)
    if method == "fp8":
        return q.FP8_BLOCK if config.get("weight_block_size") else q.FP8_TENSOR
    if method == "bitsandbytes":
        if config.get("load_in_8bit"):
            return q.INT8_CHANNEL
        return q.NF4_DOUBLE if config.get("bnb_4bit_use_double_quant") else q.NF4
    if method in ("gptq", "awq") and bits in (4, 8):
        return q.GPTQ_8 if bits == 8 else q.AWQ if method == "awq" else q.GPTQ
    known = {"fbgemm_fp8": q.FP8_CHANNEL, "mxfp4": q.MXFP4, "nvfp4": q.NVFP4, "modelopt": q.NVFP4}
    if method in known:
        return known[method]
    if method == "compressed-tensors":
        return _compressed(config, where)
    raise _wrong(f"quant_method is {shorten(method)}", where, "fp8, fbgemm_fp8, awq, gptq, bitsandbytes, mxfp4, nvfp4")


def _compressed(config: Mapping[str, Any], where: str) -> WeightFormat:
    groups = config.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = first.get("weights") if isinstance(first, dict) else None
    if isinstance(weights, dict):
        kind = (weights.get("type"), weights.get("num_bits"), weights.get("strategy"), weights.get("group_size"))
        formats: dict[tuple[Any, Any, Any], WeightFormat] = {
            ("float", 8, "tensor"): q.FP8_TENSOR,
            ("float", 8, "channel"): q.FP8_CHANNEL,
            ("float", 8, "block"): q.FP8_BLOCK,
            ("int", 8, "channel"): q.INT8_CHANNEL,
            ("float", 4, "tensor_group"): q.NVFP4,
        }
        if kind[:3] in formats:
            return formats[kind[:3]]
        if kind[:3] == ("int", 4, "group") and kind[3] in (32, 128):
            return q.INT4_GROUP_32 if kind[3] == 32 else q.AWQ
    raise _wrong(f"config_groups are {shorten(groups)}", where, "8-bit tensor, channel or block, or 4-bit groups")


def _pattern(names: list[str]) -> str:
    """One pattern for module names; `re:` starts an expression, read as a plain name."""
    plain = [re.escape(name.removeprefix("re:").strip(".*^$\\")) for name in names]
    return "|".join(rf"(^|\.){name}(\.|$)" for name in plain if name)


def _wrong(what: str, where: str, rule: str) -> SpecError:
    return SpecError(
        what,
        where=f"{where}: quantization_config",
        rule=f"counted: {rule}",
        way_out="use another checkpoint, or the unquantised model",
    )
