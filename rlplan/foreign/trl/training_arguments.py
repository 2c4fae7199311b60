"""Settings of DeepSpeed and FSDP for transformers and `accelerate launch`, as keys of accelerate's file.

In: the keys of a script or file. Out: the same with `accelerate.` keys, which the table's rows ask for.
Left out: the meaning of these keys (frameworks/keys/trl_training.yaml).
Source: transformers 5.19 training_args.py (`deepspeed`, `fsdp`); accelerate 1.15 commands/launch.py.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlplan.foreign.documents import read_document
from rlplan.foreign.settings import Given
from rlplan.foreign.table import Table
from rlplan.frameworks.rules import format_value
from rlplan.reading import is_file

KIND, DEEPSPEED, FSDP = "accelerate.distributed_type", "accelerate.deepspeed_config.", "accelerate.fsdp_config."
PARALLEL = "accelerate.parallelism_config."
_SIZE = "parallelism_config_"
STRATEGY = f"{FSDP}fsdp_reshard_after_forward"
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""FSDP's sharding strategies in the order in which accelerate and torch number them, from 1."""
_ZERO = {
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.offload_optimizer.device": "offload_optimizer_device",
    "zero_optimization.offload_param.device": "offload_param_device",
}
"""Keys of DeepSpeed's file, with accelerate's names."""
_FLAGS = ("zero_stage", "offload_optimizer_device", "offload_param_device")
_FILES = ("deepspeed", "accelerate.deepspeed_config_file", f"{DEEPSPEED}deepspeed_config_file")
Shipped = Mapping[str, Mapping[str, Any]]
"""Accelerate's keys by the names of the files that a stack ships."""
_WRAPPED = {f"{FSDP}fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}


def add_accelerate(entries: Mapping[str, Given], folder: Path, table: Table) -> tuple[dict[str, Given], list[str]]:
    """The keys with accelerate's, and notes on missing files. folder: base of relative paths."""
    notes: list[str] = []
    converted = dict(_convert_flags(entries))
    for key in _FILES:
        named = entries.get(key)
        if named is not None and isinstance(named.value, str):
            converted |= _read_deepspeed_file(folder, named, notes, table.shipped)
    inner = {key.removeprefix("deepspeed."): entry for key, entry in entries.items() if key.startswith("deepspeed.")}
    converted |= _convert_deepspeed(inner)
    if isinstance(words := entries.get("fsdp"), Given) and words.value not in (None, "", False):
        converted |= find_known(words, table.shipped) or dict(_convert_fsdp(words))
    for key, entry in entries.items():
        if key.startswith("fsdp_config."):
            converted |= {KIND: Given("FSDP", entry.place)} if table.fsdp_by_config else {}
            converted[f"{FSDP}fsdp_{key.removeprefix('fsdp_config.').removeprefix('fsdp_')}"] = entry
    own = {key: entry for key, entry in entries.items() if not _is_read(key)}
    return dict(_normalize_strategy(converted | own)), notes


def _normalize_strategy(entries: Mapping[str, Given]) -> Iterator[tuple[str, Given]]:
    """The keys with FSDP's strategy under one key and by name, for its numbers, FSDP2's `true` and the older key."""
    older = f"{FSDP}fsdp_sharding_strategy"
    for key, entry in entries.items():
        if key == older or (key == STRATEGY and older not in entries):
            yield STRATEGY, Given(_name_strategy(entry.value), entry.place)
        elif key != STRATEGY:
            yield key, entry


def _name_strategy(value: Any) -> Any:
    """The name of an FSDP strategy.

    >>> _name_strategy(2), _name_strategy(True), _name_strategy("false"), _name_strategy("hybrid_shard")
    ('SHARD_GRAD_OP', 'FULL_SHARD', 'SHARD_GRAD_OP', 'HYBRID_SHARD')
    """
    word = str(value).upper()
    if word in ("TRUE", "FALSE"):
        return _STRATEGIES[word == "FALSE"]
    return _STRATEGIES[int(word) - 1] if word in ("1", "2", "3", "4", "5") else word


def _is_read(key: str) -> bool:
    """Whether accelerate's keys carry the whole meaning of a key."""
    is_flag = key.startswith("accelerate.fsdp_") and not key.startswith(FSDP)
    is_flag = is_flag or key.startswith((f"accelerate.{_SIZE}", "parallelism_config."))
    is_flag = is_flag or key.removeprefix("accelerate.") in ("use_deepspeed", "use_fsdp", *_FLAGS)
    return is_flag or key in (*_FILES, "fsdp") or key.startswith(("deepspeed.", "fsdp_config."))


def _convert_flags(entries: Mapping[str, Given]) -> Iterator[tuple[str, Given]]:
    """Flags of `accelerate launch` under the section that they have in its file."""
    for flag, kind in (("accelerate.use_deepspeed", "DEEPSPEED"), ("accelerate.use_fsdp", "FSDP")):
        if flag in entries:
            yield KIND, Given(kind, entries[flag].place)
    for name in _FLAGS:
        if (entry := entries.get(f"accelerate.{name}")) is not None:
            yield DEEPSPEED + name, entry
    for key, entry in entries.items():
        if key.startswith("accelerate.fsdp_") and not key.startswith(FSDP):
            yield FSDP + key.removeprefix("accelerate."), entry
        elif key.startswith(f"accelerate.{_SIZE}") and not key.startswith(PARALLEL):
            yield PARALLEL + key.removeprefix("accelerate."), entry
        elif key.startswith("parallelism_config."):
            yield PARALLEL + _SIZE + key.removeprefix("parallelism_config."), entry


def find_known(named: Given, shipped: Shipped) -> dict[str, Given]:
    """Accelerate's keys for a file that the stack ships, by its name; empty for another file."""
    return {key: Given(value, named.place) for key, value in shipped.get(Path(str(named.value)).stem, {}).items()}


def _read_deepspeed_file(folder: Path, named: Given, notes: list[str], shipped: Shipped) -> dict[str, Given]:
    """Accelerate's keys for DeepSpeed's file: one on this machine, or one that the stack ships, or by its name."""
    file = folder / str(named.value)
    if is_file(file):
        inner, more = read_document(file)
        notes += more
        return _convert_deepspeed(inner)
    if known := find_known(named, shipped):
        return known
    stage = re.search(r"(?:z|zero|stage)[-_]?([0-3])(?!\d)", file.stem.lower())
    counted = f"{stage[1]} by its name" if stage else "2 is counted"
    inner = {"zero_optimization.stage": Given(int(counted[0]), named.place)}
    if "offload" in file.stem.lower():
        counted += ", with the optimizer on the CPU"
        inner["zero_optimization.offload_optimizer.device"] = Given("cpu", named.place)
    notes.append(f"{named.place}: '{named.value}' was not found and not read; ZeRO stage {counted}")
    return _convert_deepspeed(inner)


def _convert_deepspeed(inner: Mapping[str, Given]) -> dict[str, Given]:
    converted = {DEEPSPEED + ours: inner[key] for key, ours in _ZERO.items() if key in inner}
    place = next((entry.place for entry in inner.values()), "")
    return {KIND: Given("DEEPSPEED", place), **converted} if inner else {}


def _convert_fsdp(words: Given) -> Iterator[tuple[str, Given]]:
    """Accelerate's keys for `fsdp="full_shard auto_wrap offload"`, or for a list of these words."""
    text: Any = format_value(words.value)
    yield KIND, Given("FSDP", words.place)
    if "auto_wrap" in text:
        yield from ((key, Given(value, words.place)) for key, value in _WRAPPED.items())
    strategies = [
        strategy for strategy in _STRATEGIES if strategy.lower() in text.replace(",", " ").replace("'", " ").split()
    ]
    if strategies:
        yield STRATEGY, Given(strategies[-1], words.place)
    if "offload" in text:
        yield f"{FSDP}fsdp_offload_params", Given(True, words.place)
