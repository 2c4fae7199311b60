"""Which tensors a published checkpoint quantises, and how: from its `quantization_config`, or from its name.

In: what the config says, or a name such as `Qwen/Qwen3-32B-FP8`. Out: a Quantization, or None for none.
Left out: the bytes (quantization.py). An unknown method is an error, never a guess.
"""

import re
from dataclasses import replace

from rlplan.errors import SpecError
from rlplan.memory.model import quantization as q
from rlplan.memory.model.quantization import Quantization, WeightFormat
from rlplan.spec.base import shorten
from rlplan.spec.models.quantization import QuantizationSpec

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
    (r"-(int8|w8a8|w8a16|quantized\.w8a8|quantized\.w8a16)$", Quantization(q.INT8_CHANNEL)),
    (r"-(quantized\.)?w4a16(-g128)?$", Quantization(q.INT4_GROUP_128)),
)
"""Published names, most particular first. Source: each checkpoint's `quantization_config` on the Hugging Face hub:
Llama-3.1-405B-Instruct-FP8 (fbgemm_fp8) leaves attention, layer 0 and layer 125 alone; gpt-oss quantises its experts;
Kimi-K2-Thinking (compressed-tensors, groups of 32) its routed experts; Qwen and DeepSeek scale 128 x 128 blocks."""

_WORDS: dict[str, Quantization] = {
    "fp8": Quantization(q.FP8_TENSOR),
    "fp8_block": Quantization(q.FP8_BLOCK),
    "fbgemm_fp8": Quantization(q.FP8_CHANNEL),
    "w8a8": Quantization(q.INT8_CHANNEL),
    "w4a16": Quantization(q.INT4_GROUP_128),
    "int8": Quantization(q.INT8_CHANNEL),
    "nf4": Quantization(q.NF4),
    "nf4-dq": Quantization(q.NF4_DOUBLE),
    "awq": Quantization(q.AWQ),
    "awq_marlin": Quantization(q.AWQ),
    "gptq": Quantization(q.GPTQ),
    "gptq_marlin": Quantization(q.GPTQ),
    "int4": Quantization(q.GPTQ),
    "mxfp4": Quantization(q.MXFP4),
    "nvfp4": Quantization(q.NVFP4),
    "bitsandbytes": Quantization(q.NF4_DOUBLE),
    "4bit": Quantization(q.NF4_DOUBLE),
    "fp4": Quantization(q.NF4),
    "fp4-dq": Quantization(q.NF4_DOUBLE),
    "int4_wo": Quantization(q.INT4_GROUP_128),
    "int8_wo": Quantization(q.INT8_CHANNEL),
}
_FORMATS: tuple[tuple[str, Quantization], ...] = (
    (r"nf4.*(dq|double)", Quantization(q.NF4_DOUBLE)),
    (r"nf4", Quantization(q.NF4)),
    (r"gptq.*(8bit|int8)|w8a16", Quantization(q.GPTQ_8)),
    (r"gptq", Quantization(q.GPTQ)),
    (r"w4a16(?!.*awq)|int4wo", Quantization(q.INT4_GROUP_128)),
    (r"awq", Quantization(q.AWQ)),
    (r"mxfp4", Quantization(q.MXFP4)),
    (r"nvfp4", Quantization(q.NVFP4)),
    (r"(fp8|float8).*block", Quantization(q.FP8_BLOCK)),
    (r"(fp8|float8).*(channel|dynamic|row)", Quantization(q.FP8_CHANNEL)),
    (r"fp8|float8", Quantization(q.FP8_TENSOR)),
    (r"int8|w8a8", Quantization(q.INT8_CHANNEL)),
)
"""What words in a longer text mean, without its spaces, dashes, dots and underscores; most particular first."""
_NONE = (
    "",
    "none",
    "null",
    "auto",
    "bf16",
    "bfloat16",
    "bf16-true",
    "16-true",
    "32-true",
    "amp_bf16",
    "fp16",
    "float16",
    "fp32",
    "float32",
    "half",
)

_SPELLINGS = re.compile(r"^bnb[. ]|(?<=.)[ -.](w8a8|int4|4-?bit)$")
"""litgpt's prefix, and what only repeats the bits of AWQ, GPTQ and fp8: `bnb.nf4`, `AWQ 4-bit`, `fp8 W8A8`."""


def quantization_by_name(name: str) -> Quantization | None:
    """What a published checkpoint of that name quantises; None where the name says nothing.

    >>> quantization_by_name("Qwen/Qwen3-32B-FP8").form.name, quantization_by_name("Qwen/Qwen3-32B")
    ('fp8-block', None)
    """
    for pattern, scheme in _NAMES:
        if re.search(pattern, name.lower()):
            return scheme
    return None


def quantization_by_word(word: str, *, where: str) -> Quantization | None:
    """The usual scheme of a format's name, applied to every linear layer. Raises: SpecError for an unknown word.

    >>> quantization_by_word("nf4-dq", where="here").form.name, quantization_by_word("bf16", where="here")
    ('nf4-dq', None)
    >>> [quantization_by_word(word, where="here").form.name for word in ("fp8 dynamic", "w4a16_awq", "gptq int4")]
    ['fp8-channel', 'awq', 'gptq']
    """
    text = _SPELLINGS.sub("", word.strip().lower())
    text = text.removeprefix("torch.")
    if text in _NONE:
        return None
    squeezed = re.sub(r"[\s._\-]+", "", text)
    found = _WORDS.get(text) or next((form for pattern, form in _FORMATS if re.search(pattern, squeezed)), None)
    if found is None:
        raise SpecError(
            f"quantisation '{shorten(word)[1:-1]}' is unknown",
            where=where,
            rule=f"known: {', '.join(_WORDS)}, or none",
            way_out="use one of them, or the checkpoint's published name",
        )
    return found


def quantization_of_spec(spec: QuantizationSpec, *, where: str) -> Quantization:
    """What a checkpoint's own config says: method, group size and the modules left alone.

    Raises: SpecError for a method that is not counted.

    >>> spec = QuantizationSpec(method="fp8", strategy="block", left_out=("lm_head",))
    >>> quantization_of_spec(spec, where="config.json").form.name
    'fp8-block'
    """
    left_out = frozenset(name.removeprefix("re:").strip(".*^$\\").replace("\\.", ".") for name in spec.left_out)
    return Quantization(_format(spec, where), ignored=left_out - {""})


def _format(spec: QuantizationSpec, where: str) -> WeightFormat:
    eight = spec.bits == 8
    by_method = {
        "fp8": q.FP8_BLOCK if spec.strategy == "block" else q.FP8_TENSOR,
        "fbgemm_fp8": q.FP8_CHANNEL,
        "bitsandbytes": q.INT8_CHANNEL if eight else q.NF4_DOUBLE if spec.has_double_quant else q.NF4,
        "gptq": q.GPTQ_8 if eight else q.GPTQ,
        "awq": q.AWQ,
        "mxfp4": q.MXFP4,
        "nvfp4": q.NVFP4,
        "modelopt": q.FP8_TENSOR if eight else q.NVFP4,
    }
    by_strategy = {
        (True, 8, "tensor"): q.FP8_TENSOR,
        (True, 8, "channel"): q.FP8_CHANNEL,
        (True, 8, "block"): q.FP8_BLOCK,
        (False, 8, "channel"): q.INT8_CHANNEL,
        (True, 4, "tensor_group"): q.NVFP4,
        (False, 4, "group"): q.INT4_GROUP_32 if spec.group_size == 32 else q.AWQ,
    }
    if spec.method in by_method and not (spec.method in ("gptq", "awq") and spec.bits not in (None, 4, 8)):
        form = by_method[spec.method]
    elif spec.method == "compressed-tensors" and (spec.is_float, spec.bits, spec.strategy) in by_strategy:
        form = by_strategy[spec.is_float, spec.bits or 0, spec.strategy]
    else:
        words = f"{spec.method}, {spec.bits} bits, {spec.strategy or 'no strategy'}"
        raise SpecError(
            f"quantisation '{shorten(words)[1:-1]}' is not counted",
            where=f"{where}: quantization_config",
            rule=f"counted: {', '.join(by_method)}, and compressed-tensors of 8 bits or 4-bit groups",
            way_out="use another checkpoint, or the unquantised model",
        )
    if form in (q.AWQ, q.GPTQ, q.GPTQ_8) and spec.group_size:
        return replace(form, block=(1, spec.group_size))
    return form
