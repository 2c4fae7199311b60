"""Which stack a file is of, and what it says: scripts by their commands, YAML and JSON by their keys.

In: a path, `--source` and `--set`. Out: Settings. Left out: command lines (command_lines.py), the grammar of bash
(shell/script.py), conversions (convert.py).
"""

import shlex
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlplan.errors import SpecError, did_you_mean
from rlplan.foreign.command_lines import commanded, defaults_of, entry_at, first_word, is_wrapped, plain, word_at
from rlplan.foreign.documents import BELOW, SUFFIXES, read_document
from rlplan.foreign.python.file import read_python
from rlplan.foreign.settings import Given, Settings, typed
from rlplan.foreign.shell.script import Command, read_script
from rlplan.foreign.table import SOURCES, Table, load_table, table_name
from rlplan.foreign.trl.launched import is_server, served, with_launcher
from rlplan.foreign.trl.trainers import is_of_trl, of_trainer
from rlplan.foreign.trl.training_arguments import with_accelerate
from rlplan.foreign.unread.stacks import USUAL_GPUS, Nearest, refuse_commands, refuse_document
from rlplan.spec.base import shorten

NEAREST = Nearest()
MOST_STRANGE = 0.6
"""Share of unknown keys from which on a file is another stack's. Of 740 published files of the stacks that are read the
most is 0.48; of files of others that have one of their keys, 0.75 and more.
"""
PYTHON = (".py", ".ipynb")
READ = (*SUFFIXES, *PYTHON)
"""Endings of files other than scripts that may describe a training."""
EMITTED = "train"
"""Stem of the file that `rlplan emit --target` names."""
PLAN_FILE = "plan.json"
"""A bundle of rlplan's own has it."""
LEAST_STRANGE = 3
"""Unknown keys from which on that share says something."""


def read_source(path: Path, source: str | None, outside: Sequence[str] = (), nearest: Nearest = NEAREST) -> Settings:
    """What a foreign file says. source: its stack, where it is not to be told by itself. outside: `NAME=VALUE`, of a
    variable of the script or of a foreign key. nearest: what else was asked, for the command that a refusal names.
    Raises: SpecError, HostError.
    """
    tables = _tables(source)
    given = _pairs(outside)
    path = _file_of(path, nearest) if path.is_dir() else path
    names: Set[str] = frozenset()
    if path.suffix in PYTHON:
        script = read_python(path, given)
        if not script.has_trainer:
            raise _without_trainer(path)
        names = given.keys()  # which were looked for there
        table = load_table("trl_given" if "trainer" in script.given else "trl")
        settings = Settings(table, str(path), plain(script.given, table), dict(table.defaults), script.notes)
    elif path.suffix in SUFFIXES:
        settings = _of_document(path, tables, source, given, nearest)
    else:
        settings, names = _of_script(path, tables, given, nearest)
    if settings.table.syntax == "python":
        names = names | {"trainer"}
        with_files, notes = with_accelerate(settings.given, path.parent)
        settings = replace(settings, given=with_files, notes=(*settings.notes, *notes))
    _check_known(settings, nearest)
    return _with_outside(settings, given, names)


def _file_of(folder: Path, nearest: Nearest) -> Path:
    """The file of a folder that starts a training, as `rlplan emit --target` names it: its one script, else its one
    document or Python file. Raises: SpecError where there are several, or none.
    """
    files = sorted(file for file in folder.iterdir() if file.is_file())
    kinds = ([file for file in files if file.suffix == ".sh"], [file for file in files if file.suffix in READ])
    scripts = next((files for files in kinds if files), [])
    emitted = [file for file in scripts if file.stem == EMITTED]
    is_bundle = (folder / PLAN_FILE).is_file()
    if not is_bundle and (len(scripts) == 1 or len(emitted) == 1):
        return (emitted or scripts)[0]
    if is_bundle:
        way_out = f"rlplan estimate {shlex.quote(str(folder))}"
    elif scripts:
        way_out = f"rlplan check {shlex.quote(str(scripts[0]))} --hardware {nearest.hardware or USUAL_GPUS}"
    else:
        way_out = "give the file that starts the training"
    raise SpecError(
        f"a folder with {len(scripts)} files that could start a training"
        + (f": {', '.join(file.name for file in scripts[:5])}" if scripts else ""),
        where=str(folder),
        rule="a file, or a folder with one script, or with one YAML, JSON, TOML or Python file",
        way_out=way_out,
    )


def _check_known(settings: Settings, nearest: Nearest) -> None:
    """Raises: SpecError where most keys are not the stack's, so that the file is of another."""
    table = settings.table
    strange = [key for key in settings.given if not table.knows(key)]
    if len(strange) < LEAST_STRANGE or len(strange) <= MOST_STRANGE * len(settings.given):
        return
    raise SpecError(
        f"{len(strange)} of its {len(settings.given)} keys are not known of {table.title} {table.version}: "
        + ", ".join(strange[:5]),
        where=settings.file,
        rule=f"at most {MOST_STRANGE:.0%} of the keys of a {table.title} file are unknown; others are another stack's",
        way_out=f"{nearest.command()}, with what the file says",
    )


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


def _of_script(
    path: Path, tables: Mapping[str, Table], outside: Mapping[str, str], nearest: Nearest
) -> tuple[Settings, Set[str]]:
    """What a script says, and all its words that may be a variable's."""
    script = read_script(path, {name: value for name, value in outside.items() if "." not in name})
    refuse_commands(script.commands, path, nearest)
    for table in tables.values():
        commands = [(one, at) for one in script.commands if (at := entry_at(one, table)) is not None]
        commands = commands or [(one, 0) for one in script.commands if is_wrapped(one, table)]
        if table.syntax == "python":
            commands = [(one, at) for one, at in commands if not is_server(one)]
        for command, at in commands:
            words = tuple(zip(command.words[at + 1 :], command.places[at + 1 :], strict=True))
            notes = list(script.notes)
            read = commanded(words, table, path.parent, notes, outside)
            if not read.is_known:
                continue  # another project's program of that name
            if len(commands) > 1:
                notes.append(f"{len(commands)} commands start {table.title}; the one at {command.places[0]} is read")
            given, chosen, defaults = read.given, table, defaults_of(table, command.words)
            if table.syntax == "python":
                chosen, given = of_trainer(given, command.places[0])
                given, defaults = served(script.commands) | given, dict(chosen.defaults)
            return Settings(chosen, str(path), plain(given, chosen), defaults, tuple(notes)), script.names | read.used
    raise _no_command(path, script.commands, tables, nearest)


def _no_command(path: Path, commands: Sequence[Command], tables: Mapping[str, Table], nearest: Nearest) -> SpecError:
    """That no command is of a program with a table, or which program it is that has none."""
    unread = [(table, name) for table in tables.values() for name in table.unread if "." in name]  # `rm` is bash's too
    for table, program in unread:
        if any(word_at(command, program) is not None for command in commands):
            return _not_read(path, table, program, nearest)
    entries = ", ".join(dict.fromkeys(entry for table in tables.values() for entry in table.entries))
    return SpecError(
        f"no command of this script starts one of {_titles(tables)}",
        where=str(path),
        rule=f"a command with one of {entries} among its words",
        way_out="give the script that starts the training, or the YAML file that it names",
    )


def _not_read(path: Path, table: Table, name: str, nearest: Nearest) -> SpecError:
    algorithm, *words = table.unread[name].split()
    return SpecError(
        f"{name} of {table.title} is not read",
        where=str(path),
        rule=f"of {table.title}: {', '.join(table.entries)}, and their configurations",
        way_out=nearest.command(algorithm=algorithm, words=words),
    )


def _parts(path: Path, keys: dict[str, Given], table: Table, nearest: Nearest) -> Set[str]:
    """A document's parts, and the first word of the file that it stands on where that is not there, whose key is taken
    away. Raises: SpecError where one of them is of a program that is not read.
    """
    below = keys.pop(BELOW, None)
    parts = {key.partition(".")[0] for key in keys}
    if below is not None:
        parts.add(first_word(Path(str(below.value)).stem))
    for name in table.unread:
        if name in parts:
            raise _not_read(path, table, name, nearest)
    return parts


def _titles(tables: Mapping[str, Table]) -> str:
    return ", ".join(dict.fromkeys(table.title for table in tables.values()))


def _of_document(
    path: Path, tables: Mapping[str, Table], source: str | None, outside: Mapping[str, str], nearest: Nearest
) -> Settings:
    given, notes = read_document(path)
    refuse_document(given, path, nearest)
    said = given | {key: Given(outside[key], "--set") for key in ("trainer",) if key in outside}
    for table in tables.values():
        if table.syntax == "python" and (source or is_of_trl(said)):
            chosen, keys = of_trainer(with_launcher(said, path.parent, notes), str(path))
            return Settings(chosen, str(path), plain(keys, chosen), dict(chosen.defaults), tuple(notes))
        keys = {key.replace("-", "_"): one for key, one in given.items()} if table.syntax == "flags" else given
        if source or any(key == root or key.startswith(root + ".") for key in keys for root in table.roots):
            parts = _parts(path, keys, table, nearest)
            found = plain(keys, table)
            defaults = defaults_of(table, (f"--config={path.stem}",), parts)
            return Settings(table, str(path), found, defaults, tuple(notes))
    raise SpecError(
        f"none of its keys is one of {_titles(tables)}: " + ", ".join(list(given)[:5]),
        where=str(path),
        rule="each is known by " + ", ".join(root for table in tables.values() for root in table.roots),
        way_out="say which it is: --source " + "|".join(dict.fromkeys(table.title for table in tables.values())),
    )
