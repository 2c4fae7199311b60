"""A stack's command lines: `key=value` of Hydra, flags, and what the files that they name say below them.

In: the words of a command, a table. Out: keys with their places. Left out: which commands there are (shell/script.py,
source.py), TRL's launchers (trl/launched.py).
"""

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlplan.foreign.documents import SUFFIXES, flat, read_beside
from rlplan.foreign.settings import Given, flags_of, typed
from rlplan.foreign.shell.script import Command
from rlplan.foreign.table import Table
from rlplan.foreign.trl.launched import Launch, launched
from rlplan.reading import is_file
from rlplan.spec.files.yaml import parse_yaml


def commanded(
    words: Sequence[tuple[str, str]], table: Table, folder: Path, notes: list[str], outside: Mapping[str, str]
) -> Launch:
    """What a command says behind the words that start it, and whether it is one of the table's."""
    if table.syntax == "python":
        return launched(words, folder, notes, outside)
    if table.syntax == "overrides":
        given = _configured(words, table, folder, notes)
        given |= {key: Given(value, place) for key, value, place in _overrides(words)}
        return Launch(given, is_known=True)
    given = _flagged(words, table, folder, notes)
    return Launch(given, not given.keys().isdisjoint({*table.roots, table.positional}))


def entry_at(command: Command, table: Table) -> int | None:
    """Where the last word of one of a table's entries stands."""
    found = (word_at(command, entry) for entry in table.entries)
    return next((at for at in found if at is not None), None)


def word_at(command: Command, entry: str) -> int | None:
    """Where the last of the words of one entry stands."""
    first, *others = entry.split()
    for at, word in enumerate(command.words):
        end = at + len(others)
        name = word.rpartition("/")[2].partition(":")[0] if "/" in word else word  # a path, or an image with its tag
        is_named = word == first or word.endswith("/" + first) or name == first
        if is_named and list(command.words[at + 1 : end + 1]) == others:
            return end
    return None


LEAST_WRAPPED = 5
"""Keys that the table has by name, from which on another project's program is known to start the table's stack."""


def is_wrapped(command: Command, table: Table) -> bool:
    """Whether another project's program is given a table's overrides, as rllm and SkyRL-Agent give verl's."""
    if table.syntax != "overrides":
        return False
    given = [word.lstrip("+").partition("=")[0] for word in command.words if "=" in word and not word.startswith("-")]
    known = [key for key in given if key in table.keys]
    has_root = any(key.startswith(f"{root}.") for key in known for root in table.roots)
    return has_root and len(known) >= LEAST_WRAPPED and 2 * len(known) >= len(given)


LARGE = 1_000
"""From here on `5e8` is a count."""
_SUFFIX = re.compile(r"(\d+(?:\.\d+)?)([kmgt])", re.IGNORECASE)


def plain(given: Mapping[str, Given], table: Table) -> dict[str, Given]:
    """Without values that say nothing; `16k` as a number, lists by element where rows ask for those."""
    found: dict[str, Given] = {}
    for key, one in given.items():
        if one.value in table.unsaid and not table.asks_for(key, one.value):
            continue
        parts = [typed(word) for word in one.value.split()] if isinstance(one.value, str) else one.value
        if isinstance(parts, list) and f"{key}.0" in table.keys:
            found |= {f"{key}.{at}": Given(part, one.place) for at, part in enumerate(parts)}
        else:
            found[key] = Given(_whole(one.value, table), one.place)
    return found


def _whole(value: Any, table: Table) -> Any:
    """A number as people write large ones: `16k`, `5e8`."""
    if isinstance(value, float) and value.is_integer() and abs(value) >= LARGE:
        return int(value)
    size = _SUFFIX.fullmatch(str(value)) if table.has_suffixes else None
    return value if size is None else _size(*size.groups())


def _size(number: str, suffix: str) -> int:
    """The number of `16k`.

    >>> _size("1.5", "k"), _size("16", "K")
    (1500, 16384)
    """
    base = 1000 if suffix.islower() else 1024
    return int(float(number) * base ** ("kmgt".index(suffix.lower()) + 1))


def _overrides(words: Iterable[tuple[str, str]]) -> Iterable[tuple[str, Any, str]]:
    """`key=value`, `+key=value`, `++key=value`; `~key` takes a key away. words: each with its place."""
    for word, place in words:
        key, separator, value = word.lstrip("+").partition("=")
        if separator and not key.startswith("-"):
            yield key, typed(value), place
        elif word.startswith("~"):
            yield word[1:].partition("=")[0], None, place


_NAMES = ("--config-name", "-cn", "--config")
"""Flags that name a configuration: Hydra's, and NeMo-RL's own."""
_FOLDERS = ("--config-path", "-cp", "--config-dir", "-cd")
"""Hydra's flags of the folder in which it lies."""


def _configuration(words: Sequence[str]) -> tuple[Path, int]:
    """The configuration that a command line names, and at which word; without one an empty path."""
    folder, name, at = "", "", 0
    for index, (word, after) in enumerate(pairwise([*words, ""])):
        flag, separator, value = word.partition("=")
        given = (value if separator else after).strip("'\"")
        if flag in _NAMES:
            name, at = given, index
        elif flag in _FOLDERS:
            folder = given
    return Path(folder) / name if name else Path(), at


def _configured(words: Sequence[tuple[str, str]], table: Table, folder: Path, notes: list[str]) -> dict[str, Given]:
    """The keys of a configuration of one's own that a command line names; upstream's own are the table's defaults."""
    named, at = _configuration([word for word, _ in words])
    stem = named.name.removesuffix(".yaml")
    if not stem or stem in table.presets or any(stem in file for file in table.files):
        return {}
    if named.suffix not in SUFFIXES:
        named = named.with_name(f"{stem}.yaml")
    is_beside = not is_file(folder / named) and is_file(folder / named.name)
    return read_beside(folder, Given(named.name if is_beside else str(named), words[at][1]), notes)


def _flagged(words: Sequence[tuple[str, str]], table: Table, folder: Path, notes: list[str]) -> dict[str, Given]:
    """Flags of one program: short ones too, `--no-key`, JSON as keys, and what stands before all flags."""
    found: dict[str, Given] = {}
    if table.positional and words and not words[0][0].startswith("-"):
        found[table.positional] = Given(*words[0])
    long = [
        (f"--{table.short[word[1:]]}" if word[:1] == "-" and word[1:] in table.short else word, at)
        for word, at in words
    ]
    for key, value, place in flags_of(long):
        if key.startswith("no_") and key[3:] in table.keys:
            found[key[3:]] = Given(False, place)
        elif isinstance(value, str) and value.startswith("{"):
            found |= {
                name: Given(one, place) for name, one in flat({key: parse_yaml(value, where=place, what=key)}).items()
            }
        else:
            found[key] = Given(value, place)
    if old := [key for key in found if key in table.older]:
        notes.append(f"flags of an earlier {table.title}, with defaults of {table.version}: {', '.join(old[:4])} ...")
        found = {table.older.get(key, key): one for key, one in found.items()}
    named = found.pop("config", None) if table.positional else None
    return {key.replace("-", "_"): one for key, one in read_beside(folder, named, notes).items()} | found


def defaults_of(table: Table, words: Sequence[str], parts: Set[str] = frozenset()) -> dict[str, Any]:
    """Upstream's defaults, under the configuration or the program that a command line names. parts: of a document."""
    configuration = _configuration(words)[0].name.removesuffix(".yaml")
    programs = {word.rpartition("/")[2] for word in words}
    names = {configuration, first_word(configuration), *programs, *parts}
    names |= {name.removeprefix("run_").removesuffix(".py") for name in programs if name.endswith(".py")}
    found = dict(table.defaults)
    for name, values in table.presets.items():
        if name in names:
            found |= values
    return found


def first_word(name: str) -> str:
    """What a configuration's name begins with.

    >>> first_word("ppo_math_1B"), first_word("sft-llama3.1-8b"), first_word("grpo")
    ('ppo', 'sft', 'grpo')
    """
    return re.split(r"[^a-z]", name, maxsplit=1)[0]
