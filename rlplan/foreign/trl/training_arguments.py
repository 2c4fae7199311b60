"""DeepSpeed and FSDP as transformers and `accelerate launch` are told of them, as keys of accelerate's file.

In: what a script or a file gives TRL. Out: the same with `accelerate.` keys, which rows of the table ask for.
Left out: what these keys mean (frameworks/keys/trl_training.yaml).
Source: transformers 5.19 training_args.py (`deepspeed`, `fsdp`); accelerate 1.15 commands/launch.py.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlplan.foreign.documents import read_document
from rlplan.foreign.settings import Given
from rlplan.frameworks.rules import word_of
from rlplan.reading import is_file

KIND, DEEPSPEED, FSDP = "accelerate.distributed_type", "accelerate.deepspeed_config.", "accelerate.fsdp_config."
PARALLEL = "accelerate.parallelism_config."
_SIZE = "parallelism_config_"
STRATEGY = f"{FSDP}fsdp_reshard_after_forward"
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Of FSDP, in the order in which accelerate and torch number them, from 1 on."""
_ZERO = {
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.offload_optimizer.device": "offload_optimizer_device",
    "zero_optimization.offload_param.device": "offload_param_device",
}
"""Keys of DeepSpeed's file, and of accelerate's."""
_FLAGS = ("zero_stage", "offload_optimizer_device", "offload_param_device")
_FILES = ("deepspeed", "accelerate.deepspeed_config_file", f"{DEEPSPEED}deepspeed_config_file")
_WRAPPED = {f"{FSDP}fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}


def with_accelerate(given: Mapping[str, Given], folder: Path) -> tuple[dict[str, Given], list[str]]:
    """The keys, and notes on files that are not there. folder: what paths are relative to."""
    notes: list[str] = []
    found = dict(_launched(given))
    for key in _FILES:
        named = given.get(key)
        if named is not None and isinstance(named.value, str):
            found |= _of_file(folder, named, notes)
    inner = {key.removeprefix("deepspeed."): one for key, one in given.items() if key.startswith("deepspeed.")}
    found |= _zero(inner)
    if isinstance(words := given.get("fsdp"), Given) and words.value not in (None, "", False):
        found |= dict(_sharded(words))
    for key, one in given.items():
        if key.startswith("fsdp_config."):
            found[f"{FSDP}fsdp_{key.removeprefix('fsdp_config.').removeprefix('fsdp_')}"] = one
    own = {key: one for key, one in given.items() if not _is_read(key)}
    return dict(_with_strategy(found | own)), notes


def _with_strategy(given: Mapping[str, Given]) -> Iterator[tuple[str, Given]]:
    """What FSDP shards by one key and one name: numbers, FSDP2's `true` and the older key say the same."""
    older = f"{FSDP}fsdp_sharding_strategy"
    for key, one in given.items():
        if key == older or (key == STRATEGY and older not in given):
            yield STRATEGY, Given(_strategy(one.value), one.place)
        elif key != STRATEGY:
            yield key, one


def _strategy(value: Any) -> Any:
    """FSDP's strategy by its name.

    >>> _strategy(2), _strategy(True), _strategy("false"), _strategy("hybrid_shard")
    ('SHARD_GRAD_OP', 'FULL_SHARD', 'SHARD_GRAD_OP', 'HYBRID_SHARD')
    """
    word = str(value).upper()
    if word in ("TRUE", "FALSE"):
        return _STRATEGIES[word == "FALSE"]
    return _STRATEGIES[int(word) - 1] if word in ("1", "2", "3", "4", "5") else word


def _is_read(key: str) -> bool:
    """Whether a key's whole meaning is in accelerate's keys."""
    is_flag = key.startswith("accelerate.fsdp_") and not key.startswith(FSDP)
    is_flag = is_flag or key.startswith((f"accelerate.{_SIZE}", "parallelism_config."))
    is_flag = is_flag or key.removeprefix("accelerate.") in ("use_deepspeed", "use_fsdp", *_FLAGS)
    return is_flag or key in (*_FILES, "fsdp") or key.startswith(("deepspeed.", "fsdp_config."))


def _launched(given: Mapping[str, Given]) -> Iterator[tuple[str, Given]]:
    """Flags of `accelerate launch`, which its file has in parts of their own."""
    for flag, kind in (("accelerate.use_deepspeed", "DEEPSPEED"), ("accelerate.use_fsdp", "FSDP")):
        if flag in given:
            yield KIND, Given(kind, given[flag].place)
    for name in _FLAGS:
        if (one := given.get(f"accelerate.{name}")) is not None:
            yield DEEPSPEED + name, one
    for key, one in given.items():
        if key.startswith("accelerate.fsdp_") and not key.startswith(FSDP):
            yield FSDP + key.removeprefix("accelerate."), one
        elif key.startswith(f"accelerate.{_SIZE}") and not key.startswith(PARALLEL):
            yield PARALLEL + key.removeprefix("accelerate."), one
        elif key.startswith("parallelism_config."):
            yield PARALLEL + _SIZE + key.removeprefix("parallelism_config."), one


def _of_file(folder: Path, named: Given, notes: list[str]) -> dict[str, Given]:
    """What DeepSpeed's own file says."""
    file = folder / str(named.value)
    if not is_file(file):
        notes.append(f"{named.place}: '{named.value}' is not beside it and was not read; ZeRO stage 2 is counted")
        return _zero({"zero_optimization.stage": Given(2, named.place)})
    inner, more = read_document(file)
    notes += more
    return _zero(inner)


def _zero(inner: Mapping[str, Given]) -> dict[str, Given]:
    found = {DEEPSPEED + ours: inner[key] for key, ours in _ZERO.items() if key in inner}
    place = next((one.place for one in inner.values()), "")
    return {KIND: Given("DEEPSPEED", place), **found} if inner else {}


def _sharded(words: Given) -> Iterator[tuple[str, Given]]:
    """`fsdp="full_shard auto_wrap offload"`, or a list of these."""
    said: Any = word_of(words.value)
    yield KIND, Given("FSDP", words.place)
    if "auto_wrap" in said:
        yield from ((key, Given(value, words.place)) for key, value in _WRAPPED.items())
    strategies = [one for one in _STRATEGIES if one.lower() in said.replace(",", " ").replace("'", " ").split()]
    if strategies:
        yield STRATEGY, Given(strategies[-1], words.place)
    if "offload" in said:
        yield f"{FSDP}fsdp_offload_params", Given(True, words.place)
