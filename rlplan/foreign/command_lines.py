"""Command lines of a stack: Hydra's `key=value`, flags, and the files that they name.

In: the words of a command, a table. Out: keys with their places. Left out: finding commands (shell/script.py,
source.py), TRL's launchers (trl/launched.py).
"""

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from rlplan.errors import SpecError
from rlplan.foreign.documents import SUFFIXES, flatten_keys, read_named_file
from rlplan.foreign.settings import Given, add_parts, parse_word, read_flags
from rlplan.foreign.shell.script import Command
from rlplan.foreign.table import Identity, Table
from rlplan.foreign.trl.launched import Launch, read_launch
from rlplan.foreign.unknown import strip_marks
from rlplan.reading import is_file
from rlplan.spec.files.yaml import parse_yaml


def read_command(
    words: Sequence[tuple[str, str]], table: Table, folder: Path, notes: list[str], outside: Mapping[str, str]
) -> Launch:
    """The keys that a command sets after its entry, and whether it is a command of the table's stack."""
    if table.syntax == "python":
        return read_launch(words, folder, notes, outside)
    if table.syntax == "overrides":
        entries = _read_configuration(words, table, folder, notes, outside)
        entries |= {key: Given(value, place) for key, value, place in _read_overrides(words)}
        return Launch(entries, is_known=True)
    entries = _read_flags(words, table, folder, notes)
    is_known = any(table.is_root(key, entry.value) for key, entry in entries.items()) and entries.keys() >= {
        *table.needs
    }
    is_known = is_known or not entries.keys().isdisjoint({*table.shared_roots, table.positional})
    return Launch(entries, is_known or any(word == FILE_FOLLOWS for word, _ in words))


def find_entry(command: Command, stack: Identity) -> int | None:
    """Index of the last word of the first entry of a stack that a command has."""
    positions = (find_word(command, entry) for entry in stack.entries)
    return next((at for at in positions if at is not None), None)


def find_word(command: Command, entry: str) -> int | None:
    """Index of the last word of an entry in a command; None without it."""
    first, *others = entry.split()
    for at, word in enumerate(command.words):
        end = at + len(others)
        name = word.rpartition("/")[2].partition(":")[0] if "/" in word else word  # a path, or an image with its tag
        is_named = word == first or word.endswith("/" + first) or name == first
        if is_named and list(command.words[at + 1 : end + 1]) == others:
            return end
    return None


def find_server(command: Command, stack: Identity) -> int | None:
    """Index of the last word by which a command starts the engine of a stack; None where it starts none."""
    positions = (find_word(command, server) for server in stack.servers)
    return next((at for at in positions if at is not None), None)


def read_server(commands: Iterable[Command], table: Table) -> dict[str, Given]:
    """Flags of the engine that the same script starts: `trl vllm-serve --tensor-parallel-size 2`."""
    for command in commands:
        at = find_server(command, table)
        if at is not None:
            words = tuple(zip(command.words[at + 1 :], command.places[at + 1 :], strict=True))
            entries = {f"vllm_serve.{key}": Given(value, place) for key, value, place in read_flags(words)}
            return {key: Given(1, command.places[at]) for key in _SIZES} | entries
    return {}


_SIZES = ("vllm_serve.tensor_parallel_size", "vllm_serve.data_parallel_size")
"""Sizes of an engine, 1 by default."""
LEAST_WRAPPED = 5
"""Fewest known keys by which another project's program counts as a wrapper of the table's stack."""


def may_wrap(command: Command, stack: Identity) -> bool:
    """Whether another project's program may take a stack's overrides: it has one of the stack's roots."""
    keys = _list_override_keys(command) if stack.syntax == "overrides" else []
    return any(key.startswith(f"{root}.") for key in keys for root in stack.roots)


def is_wrapped(command: Command, table: Table) -> bool:
    """Whether another project's program takes a table's overrides, as rllm and SkyRL-Agent take verl's."""
    keys = _list_override_keys(command)
    known = [key for key in keys if table.knows(key)]
    return may_wrap(command, table) and len(known) >= LEAST_WRAPPED and 2 * len(known) >= len(keys)


def _list_override_keys(command: Command) -> list[str]:
    return [word.lstrip("+").partition("=")[0] for word in command.words if "=" in word and not word.startswith("-")]


LARGE = 1_000
"""Smallest whole float that is read as a count: `5e8` is one, `1.0` stays a float."""
_SUFFIX = re.compile(r"(\d+(?:\.\d+)?)([kmgt])", re.IGNORECASE)


def normalize_values(entries: Mapping[str, Given], table: Table) -> dict[str, Given]:
    """Values as plain data: null-like values dropped, `16k` as a number, lists by element where rows ask for those."""
    plain_entries: dict[str, Given] = {}
    for key, entry in entries.items():
        if entry.value in table.unsaid and not table.reads_value(key, entry.value):
            continue
        parts = [parse_word(word) for word in entry.value.split()] if isinstance(entry.value, str) else entry.value
        if isinstance(parts, list) and f"{key}.0" in table.keys:
            plain_entries |= {f"{key}.{at}": Given(part, entry.place) for at, part in enumerate(parts)}
        else:
            plain_entries[key] = Given(_expand_number(entry.value, table), entry.place)
    return add_parts(plain_entries, table)


def _expand_number(value: Any, table: Table) -> Any:
    """A count in a short form: `16k`, `5e8`."""
    if isinstance(value, float) and value.is_integer() and abs(value) >= LARGE:
        return int(value)
    size = _SUFFIX.fullmatch(str(value)) if table.has_suffixes else None
    return value if size is None else _parse_size(*size.groups())


def _parse_size(number: str, suffix: str) -> int:
    """The number of a word such as `16k`.

    >>> _parse_size("1.5", "k"), _parse_size("16", "K")
    (1500, 16384)
    """
    base = 1000 if suffix.islower() else 1024
    return int(float(number) * base ** ("kmgt".index(suffix.lower()) + 1))


def _read_overrides(words: Iterable[tuple[str, str]]) -> Iterable[tuple[str, Any, str]]:
    """Hydra's `key=value`, `+key=value` and `++key=value`; `~key` removes a key. words: each with its place."""
    for word, place in words:
        key, separator, value = word.lstrip("+").partition("=")
        if separator and not key.startswith("-"):
            yield key, parse_word(value), place
        elif word.startswith("~"):
            yield word[1:].partition("=")[0], None, place


_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")
"""The beginning of `key=value` behind the file of a command line, as OmegaConf reads it."""
_NAMES = ("--config-name", "-cn", "--config", "--config_name")
"""Flags that name a configuration: Hydra's, NeMo-RL's and ROLL's own."""
_FOLDERS = ("--config-path", "-cp", "--config-dir", "-cd", "--config_path")
"""Flags for the configuration's folder: Hydra's and ROLL's."""


def _find_configuration(words: Sequence[str]) -> tuple[Path, int]:
    """The configuration that a command line names, and the index of its word; an empty path without one."""
    folder, name, at = "", "", 0
    for index, (word, after) in enumerate(pairwise([*words, ""])):
        flag, separator, value = word.partition("=")
        argument = (value if separator else after).strip("'\"")
        if flag in _NAMES:
            name, at = argument, index
        elif flag in _FOLDERS:
            folder = argument
    return Path(folder) / name if name else Path(), at


def _read_configuration(
    words: Sequence[tuple[str, str]], table: Table, folder: Path, notes: list[str], outside: Mapping[str, str]
) -> dict[str, Given]:
    """The keys of the user's own configuration that a command line names; upstream's are the table's defaults.

    Raises: SpecError for a missing file where nothing else names the model.
    """
    named, at = _find_configuration([word for word, _ in words])
    stem = named.name.removesuffix(".yaml")
    if not stem or stem in table.presets or any(stem in file for file in table.files):
        return {}
    if named.suffix not in SUFFIXES:
        named = named.with_name(f"{stem}.yaml")
    is_beside = not is_file(folder / named) and is_file(folder / named.name)
    file = Given(strip_marks(named.name if is_beside else str(named)), words[at][1])
    entries = read_named_file(folder, file, notes)
    models = {row.key for row in table.rows.get("policy.path", ())}
    if not entries and models.isdisjoint([*outside, *(key for key, _, _ in _read_overrides(words))]):
        raise _refuse_missing_file(file, table)
    return entries


def _refuse_missing_file(file: Given, table: Table) -> SpecError:
    """The refusal of a command whose settings stand in a file that is not there."""
    return SpecError(
        f"'{file.value}' was not found",
        where=file.place,
        rule=f"a command of {table.title} that names a file takes its settings from there",
        way_out="put the file beside the script, or give it in place of the script",
    )


def _read_flags(words: Sequence[tuple[str, str]], table: Table, folder: Path, notes: list[str]) -> dict[str, Given]:
    """Flags of one program: short flags, `--no-key`, JSON values as keys, and a positional word before all flags."""
    entries = _read_files(words, folder, notes)
    if table.positional and words and not words[0][0].startswith("-"):
        entries[table.positional] = Given(*words[0])
        overrides = list(takewhile(lambda pair: _OVERRIDE.match(pair[0]), words[1:]))
        words = [*((f"--{word}", place) for word, place in overrides), *words[1 + len(overrides) :]]
    long = [
        (f"--{table.short[word[1:]]}" if word[:1] == "-" and word[1:] in table.short else word, at)
        for word, at in words
    ]
    for key, value, place in read_flags(long):
        if key.startswith("no_") and key[3:] in table.keys:
            entries[key[3:]] = Given(False, place)
        elif isinstance(value, str) and value.startswith("{"):
            entries |= {
                name: Given(inner, place)
                for name, inner in flatten_keys({key: parse_yaml(value, where=place, what=key)}).items()
            }
        elif not str(value).startswith(f"{FILE_FOLLOWS} "):
            entries[key] = Given(value, place)
    if old := [key for key in entries if key in table.older]:
        notes.append(f"flags of an earlier {table.title}, with defaults of {table.version}: {', '.join(old[:4])} ...")
        entries = {table.older.get(key, key): entry for key, entry in entries.items()}
    named = entries.pop("config", None) if table.positional else None
    inner = read_named_file(folder, named, notes)
    if named is not None and not inner and table.positional == "config":
        raise _refuse_missing_file(named, table)
    return {key.replace("-", "_"): entry for key, entry in inner.items()} | entries


FILE_FOLLOWS = "@"
"""Word of prime-rl's command lines before a file, whose keys stand below the flag before it: `--trainer @ t.toml`."""


def _read_files(words: Sequence[tuple[str, str]], folder: Path, notes: list[str]) -> dict[str, Given]:
    """The keys of the files that follow the word `@`, the last file first in precedence."""
    entries: dict[str, Given] = {}
    for (before, _), (word, _), file in zip([("", ""), *words], words, words[1:], strict=False):
        if word == FILE_FOLLOWS:
            below = f"{before.removeprefix('--')}." if before.startswith("--") else ""
            named = read_named_file(folder, Given(*file), notes)
            entries |= {below + key.replace("-", "_"): entry for key, entry in named.items()}
    return entries


def find_defaults(table: Table, words: Sequence[str], parts: Set[str] = frozenset()) -> dict[str, Any]:
    """Upstream's defaults for the configuration or program that a command line names. parts: of a document."""
    configuration = _find_configuration(words)[0].name.removesuffix(".yaml")
    programs = {word.rpartition("/")[2] for word in words}
    names = {configuration, first_word(configuration), *programs, *parts}
    names |= {name.removeprefix("run_").removesuffix(".py") for name in programs if name.endswith(".py")}
    defaults = dict(table.defaults)
    for name, values in table.presets.items():
        if name in names:
            defaults |= values
    return defaults


def first_word(name: str) -> str:
    """The first word of a configuration's name.

    >>> first_word("ppo_math_1B"), first_word("sft-llama3.1-8b"), first_word("grpo")
    ('ppo', 'sft', 'grpo')
    """
    return re.split(r"[^a-z]", name, maxsplit=1)[0]
