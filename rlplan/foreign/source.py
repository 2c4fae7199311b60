"""Detection of a file's stack, and its settings: scripts by their commands, YAML and JSON by their keys.

In: a path, `--source` and `--set`. Out: Settings. Left out: command lines (command_lines.py), the grammar of bash
(shell/script.py), conversions (convert.py).
"""

import shlex
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlplan.errors import SpecError, did_you_mean
from rlplan.foreign.command_lines import (
    find_defaults,
    find_entry,
    find_word,
    first_word,
    is_wrapped,
    normalize_values,
    read_command,
)
from rlplan.foreign.documents import BELOW, SUFFIXES, read_document
from rlplan.foreign.python.file import read_python
from rlplan.foreign.settings import Given, Settings, parse_word
from rlplan.foreign.shell.script import Command, read_script
from rlplan.foreign.table import SOURCES, Table, get_table_name, load_table
from rlplan.foreign.trl.launched import add_launcher, is_server, read_server
from rlplan.foreign.trl.trainers import choose_table, is_trl
from rlplan.foreign.trl.training_arguments import add_accelerate
from rlplan.foreign.unread.stacks import USUAL_GPUS, Nearest, refuse_commands, refuse_document
from rlplan.spec.base import shorten_value

NEAREST = Nearest()
MOST_STRANGE = 0.6
"""Largest share of unknown keys in a file of a stack that is read.

Among 740 published files of these stacks the largest share is 0.48. Files of other stacks that have one of their keys
have 0.75 and more.
"""
PYTHON = (".py", ".ipynb")
READ = (*SUFFIXES, *PYTHON)
"""Suffixes of files other than shell scripts that may describe a training."""
EMITTED = "train"
"""Stem of the file that `rlplan emit --target` writes."""
PLAN_FILE = "plan.json"
"""A file that every bundle of rlplan has."""
LEAST_STRANGE = 3
"""Fewest unknown keys that make a file suspicious: in a short file a single key is a large share."""


def read_source(path: Path, source: str | None, outside: Sequence[str] = (), nearest: Nearest = NEAREST) -> Settings:
    """The settings of a foreign file.

    source: its stack, where the file cannot be recognised. outside: `NAME=VALUE` for a variable of the script or a
    foreign key. nearest: options of the command line that a refusal repeats. Raises: SpecError, HostError.
    """
    tables = _load_tables(source)
    pairs = _split_pairs(outside)
    path = _find_file(path, nearest) if path.is_dir() else path
    names: Set[str] = frozenset()
    if path.suffix in PYTHON:
        script = read_python(path, pairs)
        if not script.has_trainer:
            raise _refuse_without_trainer(path)
        names = pairs.keys()  # the follower of the script has checked them
        table = load_table("trl_given" if "trainer" in script.entries else "trl")
        settings = Settings(
            table, str(path), normalize_values(script.entries, table), dict(table.defaults), script.notes
        )
    elif path.suffix in SUFFIXES:
        settings = _read_document(path, tables, source, pairs, nearest)
    else:
        settings, names = _read_script(path, tables, pairs, nearest)
    if settings.table.syntax == "python":
        names = names | {"trainer"}
        with_files, notes = add_accelerate(settings.entries, path.parent)
        settings = replace(settings, entries=with_files, notes=(*settings.notes, *notes))
    _check_known(settings, nearest)
    return _apply_outside(settings, pairs, names)


def _find_file(folder: Path, nearest: Nearest) -> Path:
    """The file of a folder that starts a training: its one script, else its one document or Python file.

    Of several, the one that `rlplan emit --target` writes. Raises: SpecError for any other number of files.
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
    """Raises: SpecError where most keys are unknown, so that the file belongs to another stack."""
    table = settings.table
    strange = [key for key in settings.entries if not table.knows(key)]
    if len(strange) < LEAST_STRANGE or len(strange) <= MOST_STRANGE * len(settings.entries):
        return
    raise SpecError(
        f"{len(strange)} of its {len(settings.entries)} keys are not known of {table.title} {table.version}: "
        + ", ".join(strange[:5]),
        where=settings.file,
        rule=f"at most {MOST_STRANGE:.0%} of the keys of a {table.title} file are unknown; others are another stack's",
        way_out=f"{nearest.command()}, with the file's values",
    )


def _apply_outside(settings: Settings, outside: Mapping[str, str], names: Set[str]) -> Settings:
    """The settings with the keys of `--set`. names: words that may be variables of the script.

    Raises: SpecError for a name that is neither a key nor such a word.
    """
    table, values = settings.table, dict[str, Any]()
    for name, value in outside.items():
        key = _normalize_key(name, table)
        if key in table.keys or key in settings.entries:
            values[key] = parse_word(value)
        elif name not in names:
            hint = did_you_mean(key, table.keys | settings.entries.keys())
            raise SpecError(
                f"--set {shorten_value(name)} has no effect: {table.title}'s keys that are read have none of that name",
                where="command line: --set",
                rule=f"a variable of the script, or a key that is read or that the file gives.{hint}",
                way_out="leave it out, or correct it",
            )
    return settings.replace_values(values) if values else settings


def _normalize_key(name: str, table: Table) -> str:
    """The table's spelling of `+key`, `++key` (Hydra) or `--the-key`."""
    if table.syntax in ("flags", "python"):
        key = name.lstrip("-").replace("-", "_")
        return table.older.get(key, key)
    return name.lstrip("+")


def _refuse_without_trainer(path: Path) -> SpecError:
    known = ", ".join(f"{name}Trainer" for name in ("GRPO", "SFT", "DPO", "KTO", "Reward"))
    return SpecError(
        "the script creates neither a trainer of TRL nor its configuration",
        where=str(path),
        rule=f"a call of {known}, or of a configuration of one, in the script's own text",
        way_out="give the script that creates the trainer, or the command or YAML file that starts it",
    )


def _load_tables(source: str | None) -> dict[str, Table]:
    if source is None:
        return {name: load_table(name) for name in SOURCES}
    if get_table_name(source) not in SOURCES:
        raise SpecError(
            f"'{source}' is no known stack",
            where="command line: --source",
            rule=f"one of {', '.join(SOURCES)}.{did_you_mean(source, SOURCES)}",
            way_out="omit --source: most files are recognised without it",
        )
    return {source: load_table(get_table_name(source))}


def _split_pairs(words: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator or not name:
            raise SpecError(
                f"--set {word} is not NAME=VALUE",
                where="command line: --set",
                rule="a variable of the script, or one of the file's own keys, '=' and a value",
                way_out="for example --set MODEL_PATH=Qwen/Qwen2.5-7B",
            )
        pairs[name] = value
    return pairs


def _read_script(
    path: Path, tables: Mapping[str, Table], outside: Mapping[str, str], nearest: Nearest
) -> tuple[Settings, Set[str]]:
    """The settings of a shell script, and all its words that may be variables."""
    script = read_script(path, {name: value for name, value in outside.items() if "." not in name})
    refuse_commands(script.commands, path, nearest)
    for table in tables.values():
        commands = [(command, at) for command in script.commands if (at := find_entry(command, table)) is not None]
        commands = commands or [(command, 0) for command in script.commands if is_wrapped(command, table)]
        if table.syntax == "python":
            commands = [(command, at) for command, at in commands if not is_server(command)]
        for command, at in commands:
            words = tuple(zip(command.words[at + 1 :], command.places[at + 1 :], strict=True))
            notes = list(script.notes)
            read = read_command(words, table, path.parent, notes, outside)
            if not read.is_known:
                continue  # another project's program of that name
            if len(commands) > 1:
                notes.append(f"{len(commands)} commands start {table.title}; the one at {command.places[0]} is read")
            entries, chosen, defaults = read.entries, table, find_defaults(table, command.words)
            if table.syntax == "python":
                chosen, entries = choose_table(entries, command.places[0])
                entries, defaults = read_server(script.commands) | entries, dict(chosen.defaults)
            return Settings(
                chosen, str(path), normalize_values(entries, chosen), defaults, tuple(notes)
            ), script.names | read.used
    raise _refuse_without_command(path, script.commands, tables, nearest)


def _refuse_without_command(
    path: Path, commands: Sequence[Command], tables: Mapping[str, Table], nearest: Nearest
) -> SpecError:
    """The refusal of a script without a command that is read; it names a known program without a table."""
    unread = [(table, name) for table in tables.values() for name in table.unread if "." in name]  # `rm` is bash's too
    for table, program in unread:
        if any(find_word(command, program) is not None for command in commands):
            return _refuse_program(path, table, program, nearest)
    entries = ", ".join(dict.fromkeys(entry for table in tables.values() for entry in table.entries))
    return SpecError(
        f"no command of this script starts one of {_list_titles(tables)}",
        where=str(path),
        rule=f"a command with one of {entries} among its words",
        way_out="give the script that starts the training, or the YAML file that it reads with --source "
        f"{'|'.join(SOURCES)}; or describe the job: {nearest.command(algorithm='grpo')}",
    )


def _refuse_program(path: Path, table: Table, name: str, nearest: Nearest) -> SpecError:
    algorithm, *words = table.unread[name].split()
    return SpecError(
        f"{name} of {table.title} is not read",
        where=str(path),
        rule=f"of {table.title}: {', '.join(table.entries)}, and their configurations",
        way_out=nearest.command(algorithm=algorithm, words=words),
    )


def _find_parts(path: Path, keys: dict[str, Given], table: Table, nearest: Nearest) -> Set[str]:
    """The top-level parts of a document, and the first word of a missing base configuration, whose key is removed.

    Raises: SpecError where one of them belongs to a program that is not read.
    """
    below = keys.pop(BELOW, None)
    parts = {key.partition(".")[0] for key in keys}
    if below is not None:
        parts.add(first_word(Path(str(below.value)).stem))
    for name in table.unread:
        if name in parts:
            raise _refuse_program(path, table, name, nearest)
    return parts


def _list_titles(tables: Mapping[str, Table]) -> str:
    return ", ".join(dict.fromkeys(table.title for table in tables.values()))


def _read_document(
    path: Path, tables: Mapping[str, Table], source: str | None, outside: Mapping[str, str], nearest: Nearest
) -> Settings:
    entries, notes = read_document(path)
    refuse_document(entries, path, nearest)
    with_trainer = entries | {key: Given(outside[key], "--set") for key in ("trainer",) if key in outside}
    for table in tables.values():
        if table.syntax == "python" and (source or is_trl(with_trainer)):
            chosen, keys = choose_table(add_launcher(with_trainer, path.parent, notes), str(path))
            return Settings(chosen, str(path), normalize_values(keys, chosen), dict(chosen.defaults), tuple(notes))
        keys = {key.replace("-", "_"): entry for key, entry in entries.items()} if table.syntax == "flags" else entries
        if source or any(key == root or key.startswith(root + ".") for key in keys for root in table.roots):
            parts = _find_parts(path, keys, table, nearest)
            plain_entries = normalize_values(keys, table)
            defaults = find_defaults(table, (f"--config={path.stem}",), parts)
            return Settings(table, str(path), plain_entries, defaults, tuple(notes))
    raise SpecError(
        f"none of its keys is one of {_list_titles(tables)}: " + ", ".join(list(entries)[:5]),
        where=str(path),
        rule="each is known by " + ", ".join(root for table in tables.values() for root in table.roots),
        way_out="name the stack: --source " + "|".join(dict.fromkeys(table.title for table in tables.values())),
    )
