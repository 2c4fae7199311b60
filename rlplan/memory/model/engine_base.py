"""The frozen base of a LoRA job on the engine's side: the 4-bit base that engines load instead of the trainer's own
(`rollout.base_path`), or a base of which trainer and engine share one copy (`rollout.shares_base`).

Of a shared base the trainer's row counts the memory, and the engine's parameters are views of it. Each tensor begins on
a cache line. A 4-bit base must be the policy's weights in 4 bits. Configs, names and shapes are compared here; the
values are not, so every step measures the log-prob mismatch (runtime/learning/logprob_mismatch.py).

In: a policy's ModelSpec, a folder. Out: the layout of shared tensors; the Quantization as an engine holds it, or the
reason why the folder does not match the policy. Left out: formats that an engine creates while it loads. Source: vLLM
0.32.0, layers/quantization/auto_awq.py, auto_gptq.py, compressed_tensors_wNa16.py. Kernels repack weights into as many
bytes. No GPTQ kernel keeps `g_idx` or the zero points, which are all equal.

Symbols: N rows (outputs) and K columns (inputs) of a weight, G columns behind one scale.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from rlplan.errors import SpecError
from rlplan.memory.model.quantization import (
    AWQ,
    GPTQ,
    INT4_GROUP_128,
    Quantization,
    WeightFormat,
    convert_quantization_spec,
    parse_quantization,
)
from rlplan.memory.serving.weights import list_fused_members
from rlplan.spec.model import ModelSpec, Parameter
from rlplan.spec.models.catalogue import find_model_path, resolve_model
from rlplan.spec.models.config import QuantizationSpec, read_config
from rlplan.spec.models.headers import has_weights, read_checkpoint
from rlplan.spec.models.parts import LINEAR
from rlplan.spec.resolved import SettledRollout
from rlplan.units import round_up

KEY = "rollout.base_path"
METHODS = ("awq", "gptq", "compressed-tensors")
MARLIN_GROUPS = (None, 32, 64, 128)
"""Group sizes G that vLLM's AWQ and GPTQ kernels support, on CPUs too; None for a whole row. Source: marlin_utils.py,
`MARLIN_SUPPORTED_GROUP_SIZES`."""
SHAPE_BYTES = 16
"""Bytes of `weight_shape`, two int64, which compressed-tensors keeps for each matrix."""
SIZES = (
    *("architecture", "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    *("intermediate_size", "has_tied_embeddings", "has_qkv_bias", "has_qk_norm", "has_output_bias"),
    *("options", "attention_kinds", "window"),
)
VALUES = ("rope_theta", "rope_scaling", "rope_parameters", "rms_norm_eps", "hidden_act")
"""Keys of config.json that change the output of the same weights."""


def find_engine_quantization(rollout: SettledRollout, word: str | None) -> Quantization | None:
    """The format of an engine's weights: that of `rollout.base_path`, otherwise the one that `word` names.

    Raises: SpecError.
    """
    if rollout.base_path is not None:
        return read_base_quantization(rollout.base_path)
    return parse_quantization(word or "", where="rollout.quantization")


def read_base_quantization(path: str) -> Quantization:
    """The format of a 4-bit base, as an engine holds it. Raises: SpecError."""
    return _read_base_quantization(path, _read_stamp(path))


def _read_stamp(path: str) -> int:
    """Modification time of a model's config, a cache key that expires with the file; 0 for a bundled model."""
    location = find_model_path(path)
    config = None if location is None else location / "config.json" if location.is_dir() else location
    return config.stat().st_mtime_ns if config is not None and config.is_file() else 0


@lru_cache(maxsize=8)
def _read_base_quantization(path: str, stamp: int) -> Quantization:
    model = resolve_model(path, where=KEY)
    spec = model.quantization
    if spec is None:
        raise _build_error(path, "its weights are not quantized")
    if reason := _find_unsupported_part(spec):
        raise _build_error(path, reason)
    plain = frozenset(name.removesuffix(".weight") for name in _read_shapes(path) if name.endswith(".weight"))
    listed = convert_quantization_spec(spec, where=path).ignored
    return Quantization(_convert_format(spec), ignored=plain or listed)


def _convert_format(spec: QuantizationSpec) -> WeightFormat:
    """A matrix as an engine holds it.

    >>> _convert_format(QuantizationSpec(method="gptq", bits=4, group_size=32)).num_bytes((64, 64))  # 64*64/2, 2*64*2
    2304
    """
    block = (1, spec.group_size or 0)
    if spec.method == "awq":
        return replace(AWQ, block=block)
    if spec.method == "gptq":
        return replace(GPTQ, block=block, zero_bits=0, column_bytes=0)
    zero_bits = 4 if spec.has_zero_points else 0
    return replace(INT4_GROUP_128, name="int4", block=block, zero_bits=zero_bits, tensor_bytes=SHAPE_BYTES)


def _find_unsupported_part(spec: QuantizationSpec) -> str:
    """Why vLLM cannot serve adapters on a format; empty where it can."""
    if spec.method not in METHODS or spec.bits != 4 or spec.is_float:
        stated = f"{spec.method}, {spec.bits or 'unstated'} bits"
        return f"its format is {stated}; engines load only 4-bit integers of {', '.join(METHODS)}"
    if spec.has_act_order:
        return "its format is GPTQ with desc_act, which vLLM no longer supports"
    if spec.method == "gptq" and spec.has_zero_points is not False:
        return "its format is GPTQ without sym, which vLLM does not support"
    if spec.method == "awq" and spec.has_zero_points is not True:
        return "its format is AWQ without zero_point, which vLLM does not support"
    if spec.method != "compressed-tensors" and spec.group_size not in MARLIN_GROUPS:
        return f"its groups have {spec.group_size} weights; vLLM's kernels support 32, 64, 128 and whole rows"
    return ""


@lru_cache(maxsize=64)
def list_packed_tensors(model: ModelSpec, scheme: Quantization | None) -> tuple[Parameter, ...]:
    """The engine's 4-bit tensors, fused as the engine fuses them.

    All members of a fused tensor are quantized, or none. Source: vLLM 0.32.0, quant_utils.py, `is_layer_skipped`, which
    rejects a mixture.
    """
    if scheme is None:
        return ()
    return tuple(tensor for tensor, members in list_fused_members(model) if scheme.covers(members[0]))


def find_loaded_form(scheme: Quantization) -> WeightFormat:
    """A matrix as loaded, before kernels repack it. GPTQ's zero points are dropped only then."""
    return replace(scheme.form, zero_bits=4) if scheme.form.name == "gptq" else scheme.form


def repacking_bytes(model: ModelSpec, scheme: Quantization | None) -> int:
    """Bytes in addition to all weights while the largest matrix is repacked on a CPU.

    Counts: each of its weights as an int32, twice (unpacked, and shifted). Source: vLLM 0.32.0, auto_awq.py,
    `_convert_awq_to_standard_format`, and kernels/linear/mixed_precision/cpu.py, `_process_gptq_weights_w4a16`.
    """
    return 2 * 4 * max((tensor.numel for tensor in list_packed_tensors(model, scheme)), default=0)


def find_base_mismatch(model: ModelSpec, policy: str, path: str) -> str:
    """The difference, with both values, that shows that a folder is not the policy in 4 bits; empty if there is none.

    policy: the policy's own folder. Raises: SpecError where one of the two cannot be read.
    """
    return _find_base_mismatch(model, (policy, path), (_read_stamp(policy), _read_stamp(path)))


@lru_cache(maxsize=8)
def _find_base_mismatch(model: ModelSpec, paths: tuple[str, str], stamps: tuple[int, int]) -> str:
    policy, path = paths
    scheme, base = read_base_quantization(path), resolve_model(path, where=KEY)
    for name in SIZES:
        own, theirs = getattr(model, name), getattr(base, name)
        if own != theirs:
            return f"{name} is {theirs} there and {own} in the policy"
    for name, (own, theirs) in _compare_values(policy, path):
        if own != theirs:
            return f"{name} is {theirs} there and {own} in the policy"
    return next(_find_wrong_tensors(model, _read_shapes(path), scheme), "")


def _compare_values(policy: str, path: str) -> Iterator[tuple[str, tuple[object, object]]]:
    """(key, (the policy's value, the base's value)) of keys that both configs have."""
    folders = [find_model_path(place) for place in (policy, path)]
    if None in folders:
        return
    own, theirs = (read_config(f / "config.json" if f.is_dir() else f) for f in folders if f is not None)
    for key in VALUES:
        if own.get(key) is not None and theirs.get(key) is not None:
            yield key, (own[key], theirs[key])


def _read_shapes(path: str) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a checkpoint's tensors by name; empty for a config without weights. Raises: SpecError."""
    folder = find_model_path(path)
    if folder is None or not folder.is_dir() or not has_weights(folder):
        return {}
    return {tensor.name: tensor.shape for tensor in read_checkpoint(folder)}


def _find_wrong_tensors(model: ModelSpec, stored: Mapping[str, tuple[int, ...]], scheme: Quantization) -> Iterator[str]:
    """Messages about tensors that a checkpoint lacks or has in another shape; none for a config without weights."""
    for parameter in model.parameters if stored else ():
        for name, shape in _list_expected_tensors(parameter, scheme):
            if name not in stored:
                yield f"it has no {name}"
            elif stored[name] != shape:
                yield f"{name} has shape {list(stored[name])}; {parameter.name} of the policy needs {list(shape)}"


def _list_expected_tensors(parameter: Parameter, scheme: Quantization) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a parameter's tensors in a checkpoint.

    >>> from rlplan.spec.model import Parameter
    >>> dict(_list_expected_tensors(Parameter("model.layers.0.mlp.up_proj.weight", (64, 32)), Quantization(AWQ)))
    ... # doctest: +NORMALIZE_WHITESPACE
    {'model.layers.0.mlp.up_proj.qweight': (32, 8), 'model.layers.0.mlp.up_proj.scales': (1, 64),
     'model.layers.0.mlp.up_proj.qzeros': (1, 8)}
    """
    if not scheme.covers(parameter):
        yield parameter.name, parameter.shape
        return
    (rows, columns), form, stem = parameter.shape, scheme.form, parameter.name.removesuffix("weight")
    groups = max(1, columns // (form.block[1] or columns))
    if form.name == "int4":
        yield f"{stem}weight_packed", (rows, columns // 8)
        yield f"{stem}weight_scale", (rows, groups)
        return
    yield f"{stem}qweight", (columns, rows // 8) if form.name == "awq" else (columns // 8, rows)
    yield f"{stem}scales", (groups, rows)
    yield f"{stem}qzeros", (groups, rows // 8)


def _build_error(path: str, reason: str) -> SpecError:
    return SpecError(
        f"{path}: {reason}",
        where=KEY,
        rule=f"the policy's weights in 4 bits, quantized by {', '.join(METHODS)}",
        way_out=f"{KEY}=FOLDER of such a checkpoint, or {KEY}=null",
    )


CACHE_LINE = 64


@dataclass(frozen=True)
class SharedTensor:
    """One parameter of the engine."""

    name: str
    """Name in `list_engine_tensors`."""
    shape: tuple[int, ...]
    start: int
    """Offset in bytes."""
    num_bytes: int
    members: tuple[Parameter, ...]
    """The trainer's tensors that are stacked in it. Rows of a vocabulary table are padded."""


@lru_cache(maxsize=8)
def build_shared_layout(model: ModelSpec, element_bytes: int) -> tuple[SharedTensor, ...]:
    """The engine's tensors in the order of `list_engine_tensors`, each starting on the next cache line."""
    layout, end = [], 0
    for tensor, members in list_fused_members(model):
        size = tensor.numel * element_bytes
        layout.append(SharedTensor(tensor.name, tensor.shape, end, size, members))
        end = round_up(end + size, CACHE_LINE)
    return tuple(layout)


def shared_base_bytes(model: ModelSpec, element_bytes: int) -> int:
    """Bytes of the memory that trainer and engine share.

    Counts: `engine_parameter_bytes`, each tensor rounded up to 64 bytes. Differs: the trainer's own base has no padded
    rows in its vocabulary tables.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> shared_base_bytes(find_model("Qwen/Qwen3-0.6B"), 2)  # 2 * 596,049,920: 151,936 words are 64 * 2374
    1192099840
    """
    last = build_shared_layout(model, element_bytes)[-1]
    return round_up(last.start + last.num_bytes, CACHE_LINE)


def find_unshareable_part(model: ModelSpec) -> str:
    """The part of a model that vLLM stores differently from the trainer; empty if every weight is the same on both
    sides.

    Source: vLLM 0.32.0: fused_moe/ packs experts, attention/mla takes `kv_b_proj` apart, the convolutions of linear
    attention are packed (layers/utils.py), models/gpt2.py transposes.
    """
    return next(
        (
            what
            for what, has_it in (
                ("experts", model.experts is not None),
                ("latent attention", model.latent_attention is not None),
                ("linear attention", LINEAR in model.attention_kinds),
                ("transposed projections", model.architecture == "GPT2LMHeadModel"),
                ("weights that are fp32 in every dtype", any(tensor.is_buffer for tensor in model.tensors)),
            )
            if has_it
        ),
        "",
    )
