"""Which stack a file is of, and what it says: scripts by their commands, YAML and JSON by their keys.

In: a path, `--source` and `--set`. Out: Settings. Left out: the grammar of bash (shell.py), conversions (convert.py).
"""

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlplan.errors import SpecError, did_you_mean
from rlplan.foreign.documents import BELOW, flat, read_document
from rlplan.foreign.python.file import read_python
from rlplan.foreign.settings import Given, Settings, typed
from rlplan.foreign.shell import Command, read_script
from rlplan.foreign.table import SOURCES, Table, given_trainers, load_table, table_name
from rlplan.foreign.training_arguments import with_accelerate
from rlplan.reading import is_file
from rlplan.spec.base import shorten
from rlplan.spec.files.yaml import parse_yaml
from rlplan.spec.parts.algorithm import ALGORITHMS

_DOCUMENTS = (".yaml", ".yml", ".json")


def read_source(path: Path, source: str | None, outside: Sequence[str] = ()) -> Settings:
    """What a foreign file says. source: its stack, where it is not to be told by itself. outside: `NAME=VALUE`, of a
    variable of the script or of a foreign key. Raises: SpecError, HostError.
    """
    tables = _tables(source)
    given = _pairs(outside)
    variables = {name: value for name, value in given.items() if "." not in name}
    names: Set[str] = frozenset()
    if path.suffix == ".py":
        script = read_python(path, given)
        names = given.keys()  # which were looked for there
        table = load_table("trl_given" if "trainer" in script.given else "trl")
        settings = Settings(table, str(path), _plain(script.given, table), dict(table.defaults), script.notes)
    elif path.suffix in _DOCUMENTS:
        settings = _of_document(path, tables, source)
    else:
        settings, names = _of_script(path, tables, variables)
    if settings.table.syntax == "python":
        with_files, notes = with_accelerate(settings.given, path.parent)
        settings = replace(settings, given=with_files, notes=(*settings.notes, *notes))
    return _with_outside(settings, given, names)


def _with_outside(settings: Settings, given: Mapping[str, str], names: Set[str]) -> Settings:
    """With the keys that `--set` says. names: what may be a variable of the script. Raises: SpecError for a word that
    is neither.
    """
    table, said = settings.table, dict[str, Any]()
    for name, value in given.items():
        key = _spelled(name, table)
        if key in table.keys or key in settings.given:
            said[key] = typed(value)
        elif name not in names:
            hint = did_you_mean(key, table.keys | settings.given.keys())
            raise SpecError(
                f"--set {shorten(name)} has no effect: {table.title}'s keys that are read have none of that name",
                where="command line: --set",
                rule=f"a variable of the script, or a key that is read or that the file gives.{hint}",
                way_out="leave it out, or correct it",
            )
    return settings.with_values(said) if said else settings


def _spelled(name: str, table: Table) -> str:
    """A key as the table has it, of `+key` and `++key`, which Hydra adds, and of `--the-key`."""
    if table.syntax in ("flags", "python"):
        key = name.lstrip("-").replace("-", "_")
        return table.older.get(key, key)
    return name.lstrip("+")


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
    return {source: load_table(table_name(source))}


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


def _of_script(path: Path, tables: Mapping[str, Table], variables: Mapping[str, str]) -> tuple[Settings, Set[str]]:
    """What a script says, and all its words that may be a variable's."""
    script = read_script(path, variables)
    for table in tables.values():
        commands = [(one, at) for one in script.commands if (at := _entry(one, table)) is not None]
        for command, at in commands:
            words = tuple(zip(command.words[at + 1 :], command.places[at + 1 :], strict=True))
            notes, is_known = list(script.notes), table.syntax == "overrides"
            if table.syntax == "python":
                given, makes_grpo = _launched(words, path.parent, notes, variables)
                is_known = makes_grpo and table is tables.get("trl")
            elif table.syntax == "overrides":
                given = _configured(words, table, path.parent, notes)
                given |= {key: Given(value, place) for key, value, place in _overrides(words)}
            else:
                given = _flagged(words, table, path.parent, notes)
            if not is_known and not set(table.roots) & set(given):
                continue  # another project's program of that name
            if len(commands) > 1:
                notes.append(f"{len(commands)} commands start {table.title}; the one at {command.places[0]} is read")
            defaults = _defaults(table, command.words)
            return Settings(table, str(path), _plain(given, table), defaults, tuple(notes)), script.names
    raise _no_command(path, script.commands, tables)


def _no_command(path: Path, commands: Sequence[Command], tables: Mapping[str, Table]) -> SpecError:
    """That no command is of a program with a table, or which program it is that has none."""
    unread = [(table, name) for table in tables.values() for name in table.unread]
    for table, program in unread:
        if any(_at(command, program) is not None for command in commands):
            return _not_read(path, table, program)
    entries = ", ".join(dict.fromkeys(entry for table in tables.values() for entry in table.entries))
    return SpecError(
        f"no command of this script starts one of {_titles(tables)}",
        where=str(path),
        rule=f"a command with one of {entries} among its words",
        way_out="give the script that starts the training, or the YAML file that it names",
    )


def _not_read(path: Path, table: Table, name: str) -> SpecError:
    return SpecError(
        f"{name} of {table.title} is not read",
        where=str(path),
        rule=f"of {table.title}: {', '.join(table.entries)}, and their configurations",
        way_out=f"rlplan estimate --model MODEL --algorithm {table.unread[name]} --gpus 8xH100",
    )


def _parts(path: Path, keys: dict[str, Given], table: Table) -> Set[str]:
    """A document's parts, and the first word of the file that it stands on where that is not there, whose key is taken
    away. Raises: SpecError where one of them is of a program that is not read.
    """
    below = keys.pop(BELOW, None)
    parts = {key.partition(".")[0] for key in keys}
    if below is not None:
        parts.add(_first_word(Path(str(below.value)).stem))
    for name in table.unread:
        if name in parts:
            raise _not_read(path, table, name)
    return parts


def _first_word(name: str) -> str:
    """What a configuration's name begins with.

    >>> _first_word("ppo_math_1B"), _first_word("sft-llama3.1-8b"), _first_word("grpo")
    ('ppo', 'sft', 'grpo')
    """
    return re.split(r"[^a-z]", name, maxsplit=1)[0]


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
        if (word == first or word.endswith("/" + first)) and list(command.words[at + 1 : end + 1]) == others:
            return end
    return None


_SHORT = re.compile(r"-[A-Za-z]\w*")
_SUFFIX = re.compile(r"(\d+(?:\.\d+)?)([kmgt])", re.IGNORECASE)


def _plain(given: Mapping[str, Given], table: Table) -> dict[str, Given]:
    """Without values that say nothing; `16k` as a number, lists by element where rows ask for those."""
    found: dict[str, Given] = {}
    for key, one in given.items():
        parts = [typed(word) for word in one.value.split()] if isinstance(one.value, str) else one.value
        if isinstance(parts, list) and f"{key}.0" in table.keys:
            found |= {f"{key}.{at}": Given(part, one.place) for at, part in enumerate(parts)}
        elif one.value not in table.unsaid:
            size = _SUFFIX.fullmatch(str(one.value)) if table.has_suffixes else None
            found[key] = one if size is None else Given(_size(*size.groups()), one.place)
    return found


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
    return _beside(folder, Given(named.name if is_beside else str(named), words[at][1]), notes)


def _launched(
    words: Sequence[tuple[str, str]], folder: Path, notes: list[str], variables: Mapping[str, str]
) -> tuple[dict[str, Given], bool]:
    """`accelerate launch --its flags program.py --flags`: with what the files that they name say below them; and
    whether the program makes a GRPOTrainer.
    """
    programs = {*ALGORITHMS, *given_trainers()}  # `trl grpo`: a program of the package, named as its trainer
    at = next((i for i, (word, _) in enumerate(words) if word.endswith(".py") or word in programs), len(words))
    flags = {key: Given(value, place) for key, value, place in _flags(words[at + 1 :])}
    launcher = {f"accelerate.{key}": Given(value, place) for key, value, place in _flags(words[:at])}
    found: dict[str, Given] = {}
    files = [("accelerate.", launcher.get("accelerate.config_file")), ("accelerate.", flags.get("accelerate_config"))]
    for prefix, named in [*files, ("", flags.get("config"))]:
        found |= {prefix + key: value for key, value in _beside(folder, named, notes).items()}
    program = folder / words[at][0] if at < len(words) else folder
    makes_grpo = False
    if program.suffix == ".py" and is_file(program):
        own = {name: value for name, value in variables.items() if "." in name}
        script = read_python(
            program, own, _short(words[at + 1 :]) | {key: str(one.value) for key, one in flags.items()}
        )
        notes += script.notes
        found |= script.given
        flags = {} if script.has_own_flags else flags
        makes_grpo = script.makes_grpo
    trainer = Path(words[at][0]).stem.removesuffix("_modeling") if at < len(words) else ""
    if trainer in given_trainers():
        found["trainer"] = Given(trainer, words[at][1])
    return found | launcher | flags, makes_grpo


def _short(words: Sequence[tuple[str, str]]) -> dict[str, str]:
    """`-k value` and `-k` alone, which is true."""
    said = [word for word, _ in words]
    pairs = pairwise([*said, "-"])
    return {word[1:]: "True" if after.startswith("-") else after for word, after in pairs if _SHORT.fullmatch(word)}


def _beside(folder: Path, named: Given | None, notes: list[str]) -> dict[str, Given]:
    """The keys of a file that a command line names."""
    if named is None:
        return {}
    file = folder / str(named.value)
    if not is_file(file):
        notes.append(f"{named.place}: '{named.value}' is not beside the script and was not read")
        return {}
    given, more = read_document(file)
    given.pop(BELOW, None)
    notes += more
    return given


def _flagged(words: Sequence[tuple[str, str]], table: Table, folder: Path, notes: list[str]) -> dict[str, Given]:
    """Flags of one program: short ones too, `--no-key`, JSON as keys, and what stands before all flags."""
    found: dict[str, Given] = {}
    if table.positional and words and not words[0][0].startswith("-"):
        found[table.positional] = Given(*words[0])
    long = [
        (f"--{table.short[word[1:]]}" if word[:1] == "-" and word[1:] in table.short else word, at)
        for word, at in words
    ]
    for key, value, place in _flags(long):
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
    return {key.replace("-", "_"): one for key, one in _beside(folder, named, notes).items()} | found


def _flags(words: Iterable[tuple[str, str]]) -> Iterable[tuple[str, Any, str]]:
    """`--key value`, `--key=value`, `--key` alone, which is true; several values are one text."""
    key, values, at = "", list[str](), ""
    for word, place in [*words, ("--", "")]:
        if not word.startswith("--"):
            values.append(word)
            continue
        if key:
            yield key, typed(" ".join(values)) if values else True, at
        key, separator, value = word[2:].partition("=")
        key, values, at = key.replace("-", "_"), [value] if separator else [], place


def _defaults(table: Table, words: Sequence[str], parts: Set[str] = frozenset()) -> dict[str, Any]:
    """Upstream's defaults, under the configuration or the program that a command line names. parts: of a document."""
    configuration = _configuration(words)[0].name.removesuffix(".yaml")
    programs = {word.rpartition("/")[2] for word in words}
    names = {configuration, _first_word(configuration), *programs, *parts}
    names |= {name.removeprefix("run_").removesuffix(".py") for name in programs if name.endswith(".py")}
    found = dict(table.defaults)
    for name, values in table.presets.items():
        if name in names:
            found |= values
    return found


def _of_document(path: Path, tables: Mapping[str, Table], source: str | None) -> Settings:
    given, notes = read_document(path)
    for table in tables.values():
        keys = {key.replace("-", "_"): one for key, one in given.items()} if table.syntax == "flags" else given
        if source or any(key == root or key.startswith(root + ".") for key in keys for root in table.roots):
            parts = _parts(path, keys, table)
            found = _plain(keys, table)
            return Settings(table, str(path), found, _defaults(table, (f"--config={path.stem}",), parts), tuple(notes))
    raise SpecError(
        f"none of its keys is one of {_titles(tables)}: " + ", ".join(list(given)[:5]),
        where=str(path),
        rule="each is known by " + ", ".join(root for table in tables.values() for root in table.roots),
        way_out="say which it is: --source " + "|".join(tables),
    )
