"""Quantized weights: the format of a published checkpoint, and bytes of its tensors, scales and zero points included.

`quantized_checkpoints.json` maps published names and the words of other stacks to formats. An unknown method is an
error, never a guess.

In: a checkpoint's `quantization_config`, or a name such as `Qwen/Qwen3-32B-FP8`; tensors. Out: a Quantization (None for
an unquantized model), bytes. Left out: repacking after loading (Marlin keeps the size), dequantized copies during a
matmul, KV caches (serving/kv.py).

Symbols: N rows (outputs) and K columns (inputs) of a weight, E experts in one stacked tensor.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from rlplan.errors import SpecError
from rlplan.memory.model import quantization as q
from rlplan.spec.base import shorten_value
from rlplan.spec.model import Parameter
from rlplan.spec.models.config import QuantizationSpec
from rlplan.units import ceil_div

NF4_BLOCK = 64
"""Weights per scale. Source: bitsandbytes 0.45, functional.quantize_4bit, default blocksize on CUDA."""
NF4_SCALE_GROUP = 256
"""Scales per second-level scale of double quantization. Source: QLoRA (Dettmers 2023), section 3; same file."""


@dataclass(frozen=True)
class WeightFormat:
    """Storage format of one quantized matrix."""

    name: str
    bits: int
    """Bits of each weight."""

    block: tuple[int, int] = (0, 0)
    """(rows, columns) that share one scale; 0 means all of them."""

    scale_bytes: int = 0
    """Bytes of each scale."""

    zero_bits: int = 0
    """Bits of each zero point; there is one per scale."""

    tensor_bytes: int = 0
    """Bytes that are stored once per matrix (a global scale)."""

    scale_group: int = 0
    """Scales that share one further fp32 scale; 0 for none."""

    column_bytes: int = 0
    """Bytes that are stored once per column (GPTQ's g_idx)."""

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of one weight of that shape. Leading dimensions count matrices (stacked experts).

        Counts: N*K*bits/8 + scales + zero points + the bytes per column and per matrix. Source: the format's own
        constant below. Assumes: blocks do not cross rows, or columns, of a matrix; a last, partial block has a scale.

        >>> FP8_BLOCK.num_bytes((256, 128)), NF4.num_bytes((64, 64)), MXFP4.num_bytes((2, 32, 64))
        (32776, 2304, 2176)
        """
        rows, columns = (shape[-2], shape[-1]) if len(shape) > 1 else (1, shape[0])
        if self.name.startswith("nf4"):  # bitsandbytes quantizes the flattened tensor
            scales = ceil_div(rows * columns, NF4_BLOCK)
        else:
            scales = ceil_div(rows, self.block[0] or rows) * ceil_div(columns, self.block[1] or columns)
        grouped = 4 * ceil_div(scales, self.scale_group) if self.scale_group else 0
        matrix = ceil_div(rows * columns * self.bits, 8) + scales * self.scale_bytes + grouped
        matrix += ceil_div(scales * self.zero_bits, 8) + columns * self.column_bytes + self.tensor_bytes
        return prod(shape[:-2]) * matrix


FP8_TENSOR = WeightFormat("fp8", 8, scale_bytes=4, tensor_bytes=4)
"""One fp32 scale for the weights, one for the inputs. Source: vLLM 0.32 quantization/fp8.py (static per-tensor)."""
FP8_CHANNEL = WeightFormat("fp8-channel", 8, block=(1, 0), scale_bytes=4)
"""One fp32 scale per row. Source: vLLM 0.32 quantization/fbgemm_fp8.py and compressed-tensors W8A8 (channel)."""
FP8_BLOCK = WeightFormat("fp8-block", 8, block=(128, 128), scale_bytes=4)
"""One fp32 scale per 128 x 128 weights. Source: DeepSeek-V3 report 3.3.2; `weight_scale_inv` of its checkpoints."""
INT8_CHANNEL = WeightFormat("int8", 8, block=(1, 0), scale_bytes=4)
"""One fp32 scale per row. Source: compressed-tensors W8A8 int8; LLM.int8() keeps the same number of fp32 statistics."""
NF4 = WeightFormat("nf4", 4, scale_bytes=4)
"""4.5 bits a weight: one fp32 scale per 64. Source: QLoRA section 3, bitsandbytes 0.45."""
NF4_DOUBLE = WeightFormat("nf4-dq", 4, scale_bytes=1, scale_group=NF4_SCALE_GROUP, tensor_bytes=4)
"""4.127 bits a weight: 8-bit scales, an fp32 scale per 256 of them, one offset. Source: as NF4."""
AWQ = WeightFormat("awq", 4, block=(1, 128), scale_bytes=2, zero_bits=4)
"""4.156 bits a weight: fp16 scale and 4-bit zero point per 128. Source: AutoAWQ `qweight`, `scales`, `qzeros`."""
GPTQ = WeightFormat("gptq", 4, block=(1, 128), scale_bytes=2, zero_bits=4, column_bytes=4)
"""AWQ's layout with an int32 `g_idx` per column. Source: AutoGPTQ; vLLM 0.32 quantization/gptq_marlin.py."""
GPTQ_8 = WeightFormat("gptq-8", 8, block=(1, 128), scale_bytes=2, zero_bits=8, column_bytes=4)
"""GPTQ with 8 bits. Source: the same as GPTQ's."""
INT4_GROUP_32 = WeightFormat("int4-g32", 4, block=(1, 32), scale_bytes=2)
"""4.5 bits a weight, symmetric: one bf16 scale per 32. Source: compressed-tensors pack-quantized (Kimi-K2-Thinking)."""
INT4_GROUP_128 = WeightFormat("int4-g128", 4, block=(1, 128), scale_bytes=2)
"""4.125 bits a weight, symmetric: one bf16 scale per 128. Source: compressed-tensors W4A16."""
MXFP4 = WeightFormat("mxfp4", 4, block=(1, 32), scale_bytes=1)
"""4.25 bits a weight: one E8M0 scale per 32. Source: OCP Microscaling Formats 1.0, section 5."""
NVFP4 = WeightFormat("nvfp4", 4, block=(1, 16), scale_bytes=1, tensor_bytes=8)
"""4.5 bits a weight: one E4M3 scale per 16, two fp32 per matrix. Source: NVIDIA ModelOpt; vLLM 0.32 modelopt.py."""


@dataclass(frozen=True)
class Quantization:
    """The tensors that a checkpoint quantizes, and their format. Only matrices other than embeddings, norms and routers
    are ever quantized."""

    form: WeightFormat
    only: str = ""
    """Pattern that the name of a quantized tensor must match; empty for any name."""

    left_out: str = ""
    """Pattern that the name of a quantized tensor must not match; empty for none."""

    ignored: frozenset[str] = frozenset()
    """Modules that are not quantized, or parts of their names between dots."""

    def covers(self, parameter: Parameter) -> bool:
        """Whether a tensor is quantized.

        >>> from rlplan.spec.model import Component, Parameter
        >>> scheme = Quantization(FP8_BLOCK)
        >>> [scheme.covers(Parameter(name, (8, 8))) for name in ("lm_head.weight", "model.layers.0.mlp.up_proj.weight")]
        [False, True]
        """

        if len(parameter.shape) < 2 or _NEVER.search(parameter.name) or not _INSIDE.search(parameter.name):
            return False
        if self.only and not re.search(self.only, parameter.name):
            return False
        if self.left_out and re.search(self.left_out, parameter.name):
            return False
        return not (self.ignored and self._is_ignored(parameter.name))

    def _is_ignored(self, name: str) -> bool:
        words = name.split(".")
        spans = ((start, end) for start in range(len(words)) for end in range(start + 1, len(words) + 1))
        return any(".".join(words[start:end]) in self.ignored for start, end in spans)

    def num_bytes(self, parameter: Parameter, element_bytes: int) -> int:
        """Bytes of a tensor: in this format if it is quantized, otherwise `element_bytes` an element."""
        return self.form.num_bytes(parameter.shape) if self.covers(parameter) else parameter.numel * element_bytes


_INSIDE = re.compile(r"(^|\.)(layers|h|blocks|block|decoder)\.\d+\.")
"""Names of tensors inside the decoder's layers, as the families of transformers spell them."""
_NEVER = re.compile(
    r"embed|lm_head|norm|(^|\.)(ln_\w+|router|gate|shared_expert_gate|wte|wpe)\.|vision|visual|conv|A_log"
    r"|\.lora_[AB]\."
)
"""Names of tensors that no published scheme quantizes."""


def weight_bytes(parameters: Iterable[Parameter], element_bytes: int, quantization: Quantization | None = None) -> int:
    """Bytes of tensors, resident while a model is loaded.

    Counts: the format's bytes for quantized tensors, `element_bytes` for each other element.
    Source: the checkpoint's layout, see each format. Assumes: tied tensors are listed once.
    Differs: "one byte a parameter" is 18 % too low for Llama-3.1-405B-FP8, which quantizes only its MLP.

    >>> from rlplan.spec.model import Component, Parameter
    >>> tensors = [Parameter(name, (128, 128)) for name in ("model.embed_tokens.weight", "model.layers.0.up.weight")]
    >>> weight_bytes(tensors, 2), weight_bytes(tensors, 2, Quantization(FP8_BLOCK))
    (65536, 49156)
    """
    if quantization is None:
        return sum(parameter.numel for parameter in parameters) * element_bytes
    return sum(quantization.num_bytes(parameter, element_bytes) for parameter in parameters)


BASE_FORMATS = {"nf4": Quantization(NF4_DOUBLE)}
"""Formats of `training.lora.base_dtype` for a frozen base. Source: `rlplan.runtime.models.quantized_base`."""
CODE_BYTES = 4 * 16 + 4 * 256
"""Bytes of the two code tables that each 4-bit weight stores: 16 values for its weights, 256 for its scales.

Source: bitsandbytes 0.50, functional.py, `quantize_4bit`, `quantize_blockwise` (`code.to(copy=True)`)."""


def frozen_bytes(frozen: Iterable[Parameter], element_bytes: int, base: Quantization | None) -> int:
    """Bytes of a frozen base beside adapters. base: its format; None for the model's type.

    Counts: its elements in the training type; in 4 bits `NF4_DOUBLE`, and the codes 4 * (16 + 256) of each weight.
    Source: `rlplan.runtime.models.quantized_base`; bitsandbytes 0.50, functional.py, `QuantState`.
    Assumes: only the decoder's linear layers are quantized.

    >>> weights = (Parameter("model.layers.0.mlp.up_proj.weight", (64, 64)), Parameter("model.norm.weight", (64,)))
    >>> frozen_bytes(weights, 4, BASE_FORMATS["nf4"])  # 64*64/2 + 64 scales + 4 + 4 + 1088, and 4*64
    3464
    """
    if base is None:
        return weight_bytes(frozen, element_bytes)
    return sum(CODE_BYTES * base.covers(weight) + base.num_bytes(weight, element_bytes) for weight in frozen)


def dequantized_numel(frozen: Iterable[Parameter], base: Quantization | None) -> int:
    """Elements of the largest 4-bit weight of a base, which a matmul dequantizes; 0 without one."""
    return max((weight.numel for weight in frozen if base and base.covers(weight)), default=0)


EXPERTS = r"\.experts(\.|$)"
"""Pattern of routed experts' tensors, stacked or single."""

_TABLES: dict[str, Any] = json.loads(Path(__file__).with_name("quantized_checkpoints.json").read_text("utf-8"))


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
