"""Which stack a file is of, and what it says: scripts by their commands, YAML and JSON by their keys.

In: a path, `--source` and `--set`. Out: Settings. Left out: the grammar of bash (shell.py), conversions (convert.py).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlplan.errors import SpecError, did_you_mean
from rlplan.foreign.documents import flat, read_beside, read_document
from rlplan.foreign.python.file import read_python
from rlplan.foreign.settings import Given, Settings, flags_of, typed
from rlplan.foreign.shell import Command, read_script
from rlplan.foreign.table import SOURCES, Table, load_table, table_name
from rlplan.foreign.trl.launched import Launch, is_server, launched, served, with_launcher
from rlplan.foreign.trl.trainers import is_of_trl, of_trainer
from rlplan.foreign.trl.training_arguments import with_accelerate
from rlplan.reading import is_file
from rlplan.spec.files.yaml import parse_yaml

_DOCUMENTS = (".yaml", ".yml", ".json")


def read_source(path: Path, source: str | None, outside: Sequence[str] = ()) -> Settings:
    """What a foreign file says. source: its stack, where it is not to be told by itself. outside: `NAME=VALUE`, of a
    variable of the script or of a foreign key. Raises: SpecError, HostError.
    """
    tables = _tables(source)
    given = _pairs(outside)
    is_document = path.suffix in _DOCUMENTS
    if path.suffix in (".py", ".ipynb"):
        script = read_python(path, given)
        if not script.has_trainer:
            raise _without_trainer(path)
        table = load_table("trl_given" if "trainer" in script.given else "trl")
        settings = Settings(table, str(path), _plain(script.given, table), dict(table.defaults), script.notes)
    else:
        settings = _of_document(path, tables, source, given) if is_document else _of_script(path, tables, given)
    if settings.table.syntax == "python":
        with_files, notes = with_accelerate(settings.given, path.parent)
        settings = replace(settings, given=with_files, notes=(*settings.notes, *notes))
    keys = {name: value for name, value in given.items() if "." in name or name in settings.table.keys}
    return settings.with_values({name: typed(value) for name, value in keys.items()}) if keys else settings


def _without_trainer(path: Path) -> SpecError:
    known = ", ".join(f"{name}Trainer" for name in ("GRPO", "SFT", "DPO", "KTO", "Reward"))
    return SpecError(
        "the script makes no trainer of TRL, and no configuration of one",
        where=str(path),
        rule=f"a call of {known}, or of a configuration of one, in the script's own text",
        way_out="give the script that makes the trainer, or the command or YAML file that starts it",
    )


def _tables(source: str | None) -> dict[str, Table]:
    if source is None:
        return {name: load_table(name) for name in SOURCES}
    if table_name(source) not in SOURCES:
        raise SpecError(
            f"'{source}' is no known source",
            where="command line: --source",
            rule=f"one of {', '.join(SOURCES)}.{did_you_mean(source, SOURCES)}",
            way_out="leave it out where the file says it by itself",
        )
    title = load_table(table_name(source)).title  # TRL has two tables, and a file says which
    return {name: load_table(name) for name in SOURCES if load_table(name).title == title}


def _pairs(words: Sequence[str]) -> dict[str, str]:
    found = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator or not name:
            raise SpecError(
                f"--set {word} is not NAME=VALUE",
                where="command line: --set",
                rule="a variable of the script, or one of the file's own keys, '=' and a value",
                way_out="for example --set MODEL_PATH=Qwen/Qwen2.5-7B",
            )
        found[name] = value
    return found


def _of_script(path: Path, tables: Mapping[str, Table], outside: Mapping[str, str]) -> Settings:
    script = read_script(path, {name: value for name, value in outside.items() if "." not in name})
    for table in tables.values():
        commands = [(one, at) for one in script.commands if (at := _entry(one, table)) is not None]
        if table.syntax == "python":
            commands = [(one, at) for one, at in commands if not is_server(one)]
        for command, at in commands:
            words = tuple(zip(command.words[at + 1 :], command.places[at + 1 :], strict=True))
            notes = list(script.notes)
            read = _commanded(words, table, path.parent, notes, outside)
            if not read.is_known:
                continue  # another project's program of that name
            if len(commands) > 1:
                notes.append(f"{len(commands)} commands start {table.title}; the one at {command.places[0]} is read")
            if table.syntax == "python":
                chosen, given = of_trainer(read.given, command.places[0])
                given = served(script.commands) | given
                return Settings(chosen, str(path), _plain(given, chosen), dict(chosen.defaults), tuple(notes))
            return Settings(table, str(path), _plain(read.given, table), _defaults(table, command.words), tuple(notes))
    raise _no_command(path, script.commands, tables)


def _no_command(path: Path, commands: Sequence[Command], tables: Mapping[str, Table]) -> SpecError:
    """That no command is of a program with a table, or which program it is that has none."""
    unread = [(table, name) for table in tables.values() for name in table.unread]
    for table, program in unread:
        if any(_at(command, program) is not None for command in commands):
            return SpecError(
                f"{program} of {table.title} is not read",
                where=str(path),
                rule=f"of {table.title}: {', '.join(table.entries)}",
                way_out=f"rlplan estimate --model MODEL --algorithm {table.unread[program]} --gpus 8xH100",
            )
    entries = ", ".join(dict.fromkeys(entry for table in tables.values() for entry in table.entries))
    return SpecError(
        f"no command of this script starts one of {_titles(tables)}",
        where=str(path),
        rule=f"a command with one of {entries} among its words",
        way_out="give the script that starts the training, or the YAML file that it names",
    )


def _commanded(
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


def _titles(tables: Mapping[str, Table]) -> str:
    return ", ".join(dict.fromkeys(table.title for table in tables.values()))


def _entry(command: Command, table: Table) -> int | None:
    """Where the last word of one of a table's entries stands."""
    found = (_at(command, entry) for entry in table.entries)
    return next((at for at in found if at is not None), None)


def _at(command: Command, entry: str) -> int | None:
    first, *others = entry.split()
    for at, word in enumerate(command.words):
        end = at + len(others)
        name = word.rpartition("/")[2].partition(":")[0] if "/" in word else word  # a path, or an image with its tag
        if (word == first or word.endswith("/" + first) or name == first) and list(
            command.words[at + 1 : end + 1]
        ) == others:
            return end
    return None


LARGE = 1_000
"""From here on `5e8` is a count."""
_SUFFIX = re.compile(r"(\d+(?:\.\d+)?)([kmgt])", re.IGNORECASE)


def _plain(given: Mapping[str, Given], table: Table) -> dict[str, Given]:
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
    if named.suffix not in _DOCUMENTS:
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


def _defaults(table: Table, words: Sequence[str]) -> dict[str, Any]:
    """Upstream's defaults, under the configuration or the program that a command line names."""
    names = {_configuration(words)[0].name.removesuffix(".yaml")}
    names |= {word.rpartition("/")[2] for word in words}
    found = dict(table.defaults)
    for name, values in table.presets.items():
        if name in names:
            found |= values
    return found


def _of_document(path: Path, tables: Mapping[str, Table], source: str | None, outside: Mapping[str, str]) -> Settings:
    given, notes = read_document(path)
    said = given | {key: Given(outside[key], "--set") for key in ("trainer",) if key in outside}
    for table in tables.values():
        if table.syntax == "python" and (source or is_of_trl(said)):
            chosen, keys = of_trainer(with_launcher(said, path.parent, notes), str(path))
            return Settings(chosen, str(path), _plain(keys, chosen), dict(chosen.defaults), tuple(notes))
        keys = {key.replace("-", "_"): one for key, one in given.items()} if table.syntax == "flags" else given
        if source or any(key == root or key.startswith(root + ".") for key in keys for root in table.roots):
            found = _plain(keys, table)
            return Settings(table, str(path), found, _defaults(table, (f"--config={path.stem}",)), tuple(notes))
    raise SpecError(
        f"none of its keys is one of {_titles(tables)}: " + ", ".join(list(given)[:5]),
        where=str(path),
        rule="each is known by " + ", ".join(root for table in tables.values() for root in table.roots),
        way_out="say which it is: --source " + "|".join(dict.fromkeys(table.title for table in tables.values())),
    )
