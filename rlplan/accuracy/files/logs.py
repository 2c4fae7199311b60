"""Points from a vLLM start-up log: the engine's own measurements, with the settings that it printed.

In: the text of a log of engine V0 or V1. Out: points of the kinds that the formulas predict. Left out: throughput
lines, requests, errors. Lines of all ranks are combined as the engine does: the largest weights, the smallest cache.
"""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlplan.accuracy.points import Measured, MeasuredPoint
from rlplan.errors import SpecError

MAX_LINE = 20_000
"""Characters of a line that are read: a configuration line has a few thousand."""

_SIZE = r"(\d+(?:\.\d+)?) ?(?:GiB|GB)"
_WEIGHTS = re.compile(rf"(?:Model loading took|Loading model weights took|model weights take) {_SIZE}")
_CACHE = re.compile(rf"(?:Available KV cache memory: |reserved for KV Cache is ){_SIZE}")
_TOKENS = re.compile(r"GPU KV cache size: ([\d,]+) tokens")
_BLOCKS = re.compile(r"# (?:GPU|cuda) blocks: (\d+)")
_CONCURRENCY = re.compile(r"Maximum concurrency for ([\d,]+) tokens per request: (\d+(?:\.\d+)?)x")
_GRAPHS = re.compile(rf"Graph capturing finished in \d+ secs?, took {_SIZE}")
_PEAK = re.compile(rf"PyTorch activation peak memory takes {_SIZE}")
_TOTAL = re.compile(rf"total_gpu_memory \({_SIZE}\) x gpu_memory_utilization \((\d\.\d+)\)")
_FREE = re.compile(r"Free memory on device[^(]{0,40}\(\d+(?:\.\d+)?/(\d+(?:\.\d+)?) GiB\) on startup")
_NON_TORCH = re.compile(rf"non_torch_memory takes {_SIZE}")
_BATCHED = re.compile(r"max_num_batched_tokens=(\d+)")
_VERSION = re.compile(r"(?:version |LLM engine \(v)(\d+\.\d+(?:\.\d+)?)")
_ENGINE = re.compile(r"Initializing a (V\d) LLM engine|\b(V\d) LLM engine")
_ARGUMENTS = re.compile(r"non-default args: (\{.{0,8000}\})")
_CONFIG = re.compile(r"(?<![\w.])(\w+)=('[^']{0,300}'|[\w.+-]{1,80})")

_CONFIG_NAMES = {
    "model": "model",
    "dtype": "dtype",
    "max_seq_len": "max_model_len",
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "decode_context_parallel_size": "dcp",
    "quantization": "quantization",
    "enforce_eager": "enforce_eager",
    "kv_cache_dtype": "kv_dtype",
}
_ARGUMENT_NAMES = _CONFIG_NAMES | {
    "model_tag": "model",
    "max_model_len": "max_model_len",
    **{key: key for key in ("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "block_size")},
}


def read_log_points(text: str, path: Path) -> tuple[MeasuredPoint, ...]:
    """The start-up measurements of a log. Raises: SpecError for a log without any."""
    lines = [line[:MAX_LINE] for line in text.splitlines()]
    settings = _read_settings(lines)
    model = settings.pop("model", None)
    points = [
        MeasuredPoint(
            id=f"{path.name}:{name}",
            kind=kind,
            model=model if isinstance(model, str) else None,
            settings=settings | more,
            measured=Measured(value=value, unit=unit),
            source="vLLM start-up log",
            reliability="A",
        )
        for name, kind, value, unit, more in _read_measurements(lines)
    ]
    if not points:
        raise SpecError(
            "no points are in it",
            where=str(path),
            rule="JSON points, a latency CSV, measured jobs in YAML, or a log with vLLM's start-up lines",
            way_out="give the log from the engine's first line on, such as `Available KV cache memory: 19.92 GiB`",
        )
    return tuple(points)


_Found = tuple[str, str, float, str, dict[str, Any]]


def _read_measurements(lines: list[str]) -> Iterator[_Found]:
    weights, cache = _find_numbers(_WEIGHTS, lines), _find_numbers(_CACHE, lines)
    if weights:
        yield "weights", "vllm_weights", max(weights), "GiB/GPU", {}
    if peaks := _find_numbers(_PEAK, lines):
        yield "activation_peak", "vllm_activation_peak", max(peaks), "GiB/GPU", {}
    if cache:
        yield "kv_cache", "vllm_kv", min(cache), "GiB/GPU", {}
        budget = {"available_kv_gib": min(cache)}
        if tokens := _find_numbers(_TOKENS, lines):
            yield "kv_tokens", "kv_per_token", min(tokens), "tokens", budget
        for length, times in _find_pairs(_CONCURRENCY, lines)[-1:]:
            more = budget | {"max_model_len": int(length)}
            yield "max_concurrency", "kv_per_token", times, "max concurrency (sequences)", more
    if blocks := _find_numbers(_BLOCKS, lines):
        yield "kv_blocks", "vllm_kv", min(blocks), "GPU blocks", {}
    if graphs := _find_numbers(_GRAPHS, lines):
        yield "cuda_graphs", "vllm_cuda_graph", max(graphs), "GiB/GPU", {}


def _read_settings(lines: list[str]) -> dict[str, Any]:
    """The engine's settings under the names of points; arguments win over the printed config."""
    settings: dict[str, Any] = {}
    for line in lines:
        if "LLM engine" in line or "with config:" in line:
            settings |= _rename(dict(_CONFIG.findall(line)), _CONFIG_NAMES)
        if match := _ARGUMENTS.search(line):
            settings |= _rename(_parse_literal(match.group(1)), _ARGUMENT_NAMES)
    for key, pattern, kind in (
        ("total_gib", _TOTAL, float),
        ("total_gib", _FREE, float),
        ("non_torch_gib", _NON_TORCH, float),
        ("max_num_batched_tokens", _BATCHED, int),
    ):
        read: Callable[[str], float] = kind
        if matches := [match for line in lines if (match := pattern.search(line))]:
            settings.setdefault(key, read(matches[0].group(1)))
    if shares := _find_pairs(_TOTAL, lines):
        settings.setdefault("gpu_memory_utilization", shares[0][1])
    settings["vllm"] = _read_version(lines)
    return settings


def _read_version(lines: list[str]) -> str:
    number = next((match.group(1) for line in lines if (match := _VERSION.search(line))), "")
    engine = next((match.group(1) or match.group(2) for line in lines if (match := _ENGINE.search(line))), "")
    if not engine and any("# GPU blocks" in line or "# cuda blocks" in line for line in lines):
        engine = "V0"
    return f"{number} {engine or ('V1' if not number else '')}".strip()


def _rename(values: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Settings under the names of points, as numbers, booleans and words; `None` and `auto` mean the default."""
    result = {}
    for key, name in names.items():
        value = values.get(key)
        if isinstance(value, str):
            value = value.strip("'").removeprefix("torch.")
            value = {"True": True, "False": False, "None": None, "auto": None}.get(value, value)
            if isinstance(value, str) and value.isdecimal() and len(value) < 16:
                value = int(value)
        if isinstance(value, bool | int | float | str):
            result[name] = value
    return result


def _parse_literal(text: str) -> dict[str, Any]:
    """A printed dict as data, literals only; empty for a broken one."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return {}
    return {key: item for key, item in value.items() if isinstance(key, str)} if isinstance(value, dict) else {}


def _find_numbers(pattern: re.Pattern[str], lines: list[str]) -> list[float]:
    texts = (match.group(1) for line in lines if (match := pattern.search(line)))
    return [float(text.replace(",", "")) for text in texts if len(text) < 20 and text.strip(",")]


def _find_pairs(pattern: re.Pattern[str], lines: list[str]) -> list[tuple[float, float]]:
    groups = (match.groups() for line in lines if (match := pattern.search(line)))
    return [(float(a.replace(",", "")), float(b)) for a, b in groups if len(a) < 20 and len(b) < 20 and a.strip(",")]
