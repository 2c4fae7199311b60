"""Conversion of a foreign configuration to a job, row by row of its table, with an account of every key.

In: Settings, hardware. Out: Imported: the job's keys, the origin of each, and the foreign keys without a counterpart.
Left out: reading files (source.py), planning the job (check.py).
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from math import ceil
from pathlib import Path, PurePosixPath
from typing import Any

from rlplan.errors import SpecError
from rlplan.foreign.settings import MAX_SHOWN, Settings
from rlplan.foreign.table import Row
from rlplan.foreign.unknown import is_known, strip_marks
from rlplan.foreign.unread.roles import find_differing_roles
from rlplan.frameworks.rules import format_value
from rlplan.reading import MAX_INTEGER
from rlplan.spec.base import shorten_value
from rlplan.spec.files.job_forms import expand_hardware
from rlplan.spec.hardware.typed import has_count
from rlplan.spec.models.catalogue import find_bundled_id, find_model_path, find_nearest_id, list_similar_ids
from rlplan.units import MIB

_PACKED = re.compile(r"[-_](FP8|NVFP4|MXFP4|AWQ|(GPTQ-)?INT[48]|GPTQ|AQLM[\w-]*|(unsloth-)?bnb-4bit)$", re.IGNORECASE)
"""Suffixes in the names of quantized checkpoints."""
_FP8 = re.compile(
    r"(?!.*bf16)(.*-FP8|DeepSeek-(V3|R1)(\.\d)?(-Base|-Zero|-Exp|-Terminus|-\d{4})?|Kimi-K2-(Instruct|Base)(-\d{4})?"
    r"|MiniMax-M2(\.\d)?)$",
    re.IGNORECASE,
)
"""Names of fp8 checkpoints: by suffix, and models that are published in fp8 only."""
_INT4 = re.compile(r"(?!.*bf16)Kimi-K2(-Thinking|\.5)(-INT4)?$", re.IGNORECASE)
"""Models that are published with routed experts in int4 only. Source: their model cards."""
SHARES = ("gpu_share", "static_share", "shared_share")
MEMORY = "rollout.kv_cache_memory"


@dataclass(frozen=True)
class Taken:
    """A job key and its origin."""

    ours: str
    """The job key."""
    value: Any
    key: str
    """The foreign key."""
    theirs: Any
    """The foreign value."""
    place: str
    """Place of the foreign key in the file; empty for upstream's default."""


@dataclass(frozen=True)
class Left:
    """A foreign key without a counterpart, and the reason."""

    key: str
    value: str
    place: str
    why: str


@dataclass(frozen=True)
class Share:
    """The fraction of a GPU's memory that an engine may use."""

    value: float
    is_static: bool
    """Whether the fraction covers weights and KV cache only (SGLang), not the whole engine (vLLM)."""
    taken: Taken
    is_of_shared_weights: bool = False
    """Whether the engine computes with the trainer's weights, which its fraction covers."""


@dataclass(frozen=True)
class Imported:
    """A foreign configuration as the keys of a job."""

    settings: Settings
    data: dict[str, Any]
    """The job's keys, nested."""
    taken: tuple[Taken, ...]
    left: tuple[Left, ...]
    notes: tuple[str, ...]
    share: Share | None
    """The engine's memory fraction, which decides the KV cache."""
    not_counted: tuple[str, ...] = ()
    """Settings that may need more memory than the plan counts for them, with their values."""

    def as_json(self) -> dict[str, Any]:
        """The account of every key, as `rlplan import --json` prints it."""
        table = self.settings.table
        taken = [vars(entry) | {"is_default": bool(entry.key) and not entry.place} for entry in self.taken]
        return {
            "source": {"name": table.title, "version": table.version, "repository": table.repository}
            | {"commit": table.commit, "file": self.settings.file},
            "taken": taken,
            "without_counterpart": [vars(entry) for entry in self.left],
            "notes": list(self.notes),
            "not_counted": list(self.not_counted),
        }


def convert(settings: Settings, hardware: str, model: str | None) -> Imported:
    """The configuration as a job's keys. model: replaces the file's. hardware: `H100`, `8xH100`. Raises: SpecError."""
    taken: dict[str, Taken] = {}
    notes, share = list(settings.notes), None
    settings.ours.clear()  # rows read job keys that rows above them have converted
    if model is not None:
        taken["policy.path"] = Taken("policy.path", model, "", model, "--model")
    for ours, alternatives in _order_rows(settings):
        if alternatives is None:
            counted = {entry.ours: entry for entry in _read_hardware(settings, hardware, notes)}
            taken |= counted
            settings.ours.update({key: entry.value for key, entry in counted.items()})
            find_first(settings, "", settings.table.refusals, notes)
            continue
        match = None if ours in taken else find_first(settings, ours, alternatives, notes)
        if match is None:
            continue
        entry, row = match
        settings.ours[ours] = entry.value
        if row.convert in SHARES:
            share = Share(_read_fraction(entry), row.convert == "static_share", entry, row.convert == "shared_share")
        else:
            taken[ours] = entry
    if "policy.path" not in taken:
        raise SpecError(
            f"{settings.file} does not say which model is trained",
            where=settings.file,
            rule=f"a job has a policy; {settings.table.title} takes its model from elsewhere",
            way_out="--model Qwen/Qwen2.5-7B-Instruct, or another hub id, folder or config.json",
        )
    warmup, steps = taken.get("algorithm.lr_warmup_steps"), taken.get("workload.num_steps")
    if warmup is not None and steps is not None and warmup.value >= steps.value > 0:
        # stacks accept a run that ends before its warm-up does; neither memory nor time depends on it
        taken[warmup.ours] = replace(warmup, value=steps.value - 1)
        notes.append(f"{warmup.key} = {warmup.value} lasts longer than the run of {steps.value} steps")
    roles = find_differing_roles(settings)
    notes += [role.note for role in roles]
    data: dict[str, Any] = {"name": _make_name(settings.file), "framework": settings.table.framework}
    for ours, entry in taken.items():
        _put(data, ours.split("."), entry.value)
    left = _list_left(settings)
    larger = [words for role in roles for words in role.not_counted]
    larger += [f"{entry.key}={entry.value[:MAX_SHOWN]}" for entry in left if _may_take_more(settings, entry)]
    return Imported(settings, data, tuple(taken.values()), left, tuple(dict.fromkeys(notes)), share, tuple(larger))


def _order_rows(settings: Settings) -> Iterator[tuple[str, tuple[Row, ...] | None]]:
    """The table's rows in order; the hardware stands where the table has it, else first, without alternatives."""
    rows = settings.table.rows
    of_hardware = next((ours for ours in rows if ours.startswith("hardware.")), None)
    if of_hardware is None:
        yield "hardware", None
    for ours, alternatives in rows.items():
        if ours == of_hardware:
            yield "hardware", None
        elif not ours.startswith("hardware."):
            yield ours, alternatives


def find_first(
    settings: Settings, ours: str, alternatives: tuple[Row, ...], notes: list[str]
) -> tuple[Taken, Row] | None:
    """The first alternative whose condition holds and that has a value; None without one. Raises: SpecError."""
    for row in alternatives:
        if not settings.holds(row.when):
            continue
        if row.refused:
            raise _refuse(settings, row.key, settings.value(row.key), row.refused, row.way_out)
        theirs = row.value
        if row.key:  # an unknown part of a model's path does not matter: its last part names the model
            theirs = settings.resolve(row.key) if row.convert in ("model", "packed") else settings.value(row.key)
        value = _convert_value(settings, row, theirs, notes) if row.key or row.times else theirs
        if value is not None and _is_within(settings, row, value):
            if row.note:
                notes.append(row.note)
            return Taken(ours, value, row.key, theirs, settings.place(row.key)), row
    return None


def _is_within(settings: Settings, row: Row, value: Any) -> bool:
    """Whether a value lies within the bounds of its row."""
    is_below = row.below is None or value < row.below
    is_under = not row.under or value < _require_number(settings, row.under, settings.value(row.under))
    return is_below and is_under and (row.above is None or value > row.above)


def _convert_value(settings: Settings, row: Row, value: Any, notes: list[str]) -> Any:
    if value is None:
        return None
    if row.map is not None:
        word = format_value(value)
        if word in row.map:
            return row.map[word]
        if row.otherwise is None:
            raise _refuse(settings, row.key, value, f"one of {', '.join(row.map)}")
        notes.append(f"{row.key} = {word} is counted as {row.otherwise}")
        return row.otherwise
    if row.convert == "model":
        return _find_model(settings, row, str(value), notes)
    if row.convert == "packed":
        return _find_engine_format(str(value))
    if row.convert == "count":
        return len(str(value).strip("[]").split(","))
    if row.convert == "names":
        return _list_layers(row, value, notes)
    if row.convert == "mebibytes":
        return int(_require_number(settings, row.key, value) * MIB)
    if row.part:
        return max(1, int(_require_number(settings, row.key, value) * row.part))
    if row.times or row.over or row.minus or row.plus or row.least:
        return _scale(settings, row, value, notes)
    return value


def _list_layers(row: Row, value: Any, notes: list[str]) -> Any:
    """Names of layers with adapters: a list, or a text of names; all linear layers for a pattern."""
    names = value if isinstance(value, list) else re.split(r"[ ,]+", str(value).strip("[]"))
    if all(isinstance(name, str) and re.fullmatch(r"\w+_proj|experts|gate|up|down", name) for name in names):
        return names
    if value not in ("all-linear", "all", ["all-linear"]):
        notes.append(f"{row.key} = {shorten_value(value)}: adapters are counted on all linear layers")
    return "all-linear"


def _scale(settings: Settings, row: Row, value: Any, notes: list[str]) -> int:
    product = Fraction(_require_number(settings, row.key, value))
    for key in row.times:
        product *= Fraction(_require_number(settings, key, settings.value(key)))
    for key in row.over:
        product /= Fraction(_require_number(settings, key, settings.value(key)) or 1)
    if product.denominator != 1:
        raise _refuse_indivisible(settings, row, value)
    scaled = int(product) + _sum(settings, row.plus) - _sum(settings, row.minus)
    scaled = min(scaled, _sum(settings, row.most)) if row.most else scaled
    least = _sum(settings, row.least)
    if scaled < least and row.raised:
        notes.append(f"{row.key} = {scaled} is counted as {least}: {row.raised}")
    return max(scaled, least)


def _sum(settings: Settings, terms: Iterable[str]) -> int:
    """The sum of keys, products `a * b` and quotients `a / b`, each rounded up."""
    return sum(_evaluate_term(settings, words) for words in terms)


def _evaluate_term(settings: Settings, words: str) -> int:
    key, *operations = words.split(" ")
    total = Fraction(_require_number(settings, key, settings.value(key)))
    for sign, other in zip(operations[::2], operations[1::2], strict=True):
        factor = Fraction(_require_number(settings, other, settings.value(other)))
        total = total * factor if sign == "*" else total / (factor or 1)
    return ceil(total)


def _require_number(settings: Settings, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_INTEGER:
        raise _refuse(settings, key, value, "a number below 9.2e18")
    return value


def _refuse_indivisible(settings: Settings, row: Row, value: Any) -> SpecError:
    """The refusal of sizes that do not divide, with their values."""
    words = f"{row.key} = {shorten_value(value)}" + "".join(f" x {key} = {settings.value(key)}" for key in row.times)
    over = {key: size for key in row.over if (size := settings.value(key)) != 1}
    words += "".join(f" / {key} = {size}" for key, size in over.items())
    table = settings.table
    theirs = [key for key in (*over, row.key, *row.times) if key not in table.rows]
    return SpecError(
        f"{words} is not a whole number",
        where=settings.place(row.key) or f"{settings.file} ({table.title}'s default)",
        rule=f"sizes that divide (table of {table.title} {table.version})",
        way_out=" or ".join(f"--set {key}=VALUE" for key in theirs[:2]),
    )


def _refuse(settings: Settings, key: str, value: Any, rule: str, way_out: str = "") -> SpecError:
    table = settings.table
    return SpecError(
        f"{key} is {shorten_value(strip_marks(format_value(value)))}",
        where=settings.place(key) or f"{settings.file} ({table.title}'s default)",
        rule=f"{rule} (table of {table.title} {table.version})",
        way_out=way_out or f"correct it in the file, or --set {key}=VALUE",
    )


def _find_model(settings: Settings, row: Row, name: str, notes: list[str]) -> str:
    """A model by its id, its folder, or the last part of a path that is not on this machine."""
    end = re.sub(r"[-_]bf16$", "", PurePosixPath(name.rstrip("/")).name, flags=re.IGNORECASE)  # 16 bits are the usual
    if find_model_path(name) is not None or find_bundled_id(name):
        return find_bundled_id(name) or name
    known = find_nearest_id(end)
    if known and is_known(end):
        if known != name:
            origin = "" if settings.place(row.key) else f" ({settings.table.title}'s default, for it is not given)"
            notes.append(f"{row.key} = {strip_marks(name)}{origin} is taken for {known}, by its name")
        return known
    unpacked = find_nearest_id(_PACKED.sub("", end)) if _PACKED.search(end) else ""
    if unpacked and is_known(end):
        notes.append(_describe_packed(settings, row, name, unpacked))
        return unpacked
    if name.count("/") == 1 and is_known(name) and not name.startswith(("~", "/", ".")):
        return name
    raise SpecError(
        f"{row.key} is {shorten_value(strip_marks(name))}, which is neither on this machine nor the name of a bundled "
        "model",
        where=settings.place(row.key) or f"{settings.file} ({settings.table.title}'s default)",
        rule="a hub id, a folder with a config.json, or a path that ends with the name of a bundled model",
        way_out=" or ".join(f"--model {known}" for known in list_similar_ids(end) or ["ORG/NAME"])
        + f" for the policy; --set {row.key}=ORG/NAME",
    )


def _find_engine_format(name: str) -> str | None:
    """The format in which an engine loads a checkpoint, by its name; None for 16 bits and unknown formats."""
    end = PurePosixPath(name.rstrip("/")).name
    return "kimi-k2-thinking" if _INT4.match(end) else "fp8" if _FP8.match(end) else None


def _describe_packed(settings: Settings, row: Row, name: str, unpacked: str) -> str:
    """The note on quantized weights: they count in the training dtype, unless a row says that the engine reads them."""
    rows = settings.table.rows
    note = f"{row.key} = {strip_marks(name)} is taken for {unpacked}, by its name: packed weights are counted "
    if "rollout.max_num_batched_tokens" not in rows:
        return note + "in the training's data type, which takes more"
    is_read = any(other.convert == "packed" for other in rows.get("rollout.quantization", ()))
    return (
        note
        + "as they are trained"
        + ", which takes more in the engine" * (not (is_read and _find_engine_format(name)))
    )


def _read_hardware(settings: Settings, hardware: str, notes: list[str]) -> Iterator[Taken]:
    """The GPUs of the command line; their number is the command line's, else the file's."""
    table, where = settings.table, "command line: --hardware"
    rows, count, hosts = table.rows, None, None
    is_counted = "+" in hardware or has_count(hardware)
    try:
        count = find_first(settings, "hardware.num_devices", rows.get("hardware.num_devices", ()), notes)
        hosts = find_first(settings, "hardware.num_hosts", rows.get("hardware.num_hosts", ()), notes)
    except SpecError:
        if not is_counted:
            raise
    if not is_counted and count is None:
        raise SpecError(
            f"{settings.file} does not say how many GPUs there are",
            where=where,
            rule=f"{table.title} takes the number from its launcher",
            way_out=f"--hardware 8x{hardware or 'H100'}",
        )
    if not hardware and count is not None:
        raise SpecError(
            f"{count[0].value} of which GPU?",
            where=where,
            rule="the file has the number of GPUs, the command line their kind",
            way_out=f"rlplan check {settings.file} --gpus {count[0].value}xH100",
        )
    keys = expand_hardware(hardware if count is None or is_counted else f"{count[0].value}x{hardware}", where)
    second = keys.get("generation", {}).get("num_devices", 0)
    if count is not None and not second and keys["num_devices"] == count[0].value + _sum(settings, count[1].aside):
        keys["num_devices"] = count[0].value
    if count is not None and not table.serves and count[0].value != keys["num_devices"] + second:
        notes.append(f"{settings.file} says {count[0].value} GPUs; the plan uses --hardware {hardware}")
    elif hosts is not None and not second:
        keys["num_hosts"] = hosts[0].value
    for key, value in keys.items():
        yield Taken(f"hardware.{key}", value, "", value, "--hardware")


def _list_left(settings: Settings) -> tuple[Left, ...]:
    table = settings.table
    known = frozenset(key for row in table.all_rows for key in row.keys)
    return tuple(
        Left(key, strip_marks(format_value(entry.value)), entry.place, table.why_without_counterpart(key))
        for key, entry in settings.entries.items()
        if key not in known and not any(f"{key}.".startswith(f"{composite}.") for composite in table.parsed)
    )


def _may_take_more(settings: Settings, entry: Left) -> bool:
    """Whether a setting without a counterpart can need more memory than a plan counts."""
    is_set = entry.value.lower() not in ("false", "null", "none", "0", "0.0", "[]", "")
    return is_set and any(fnmatchcase(entry.key, pattern) for pattern in settings.table.uncounted)


def _read_fraction(entry: Taken) -> float:
    value = entry.value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise SpecError(
            f"{entry.key} is {shorten_value(value)}",
            where=entry.place or "upstream's default",
            rule="a fraction of a GPU's memory, above 0 and at most 1",
            way_out=f"--set {entry.key}=0.5",
        )
    return float(value)


def _put(data: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        data = data.setdefault(key, {})
    data[keys[-1]] = value


def _make_name(file: str) -> str:
    """A job's name from a file's: letters, digits, `_`, `.` and `-`."""
    stem = "".join(
        character if character.isascii() and (character.isalnum() or character in "_.-") else "-"
        for character in Path(file).stem
    )
    return (stem.lstrip("_.-") or "imported")[:64]
