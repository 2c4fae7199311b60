"""Detection of a file's stack, and its settings: scripts by their commands, YAML and JSON by their keys.

In: a path, `--source` and `--set`. Out: Settings. Left out: command lines (command_lines.py), the grammar of bash
(shell/script.py), conversions (convert.py).
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlplan.containment import read_contained
from rlplan.errors import SpecError, did_you_mean
from rlplan.foreign.command_lines import (
    find_defaults,
    find_entry,
    find_server,
    find_word,
    first_word,
    is_wrapped,
    may_wrap,
    normalize_values,
    read_command,
    read_server,
)
from rlplan.foreign.documents import BELOW, SUFFIXES, read_document
from rlplan.foreign.python.calls import LAUNCH
from rlplan.foreign.python.file import MAX_NOTEBOOK, read_python
from rlplan.foreign.python.launchers import read_launcher as read_started
from rlplan.foreign.python.values import simplify
from rlplan.foreign.settings import MAX_SHOWN, Given, Settings, parse_word, read_flags
from rlplan.foreign.shell.script import Command, read_script
from rlplan.foreign.table import (
    SOURCES,
    WITH_EXPORTS,
    Identity,
    Table,
    get_table_name,
    list_given_trainers,
    load_identity,
    load_table,
)
from rlplan.foreign.trl.launched import add_launcher, read_launcher
from rlplan.foreign.trl.trainers import choose_table, is_trl
from rlplan.foreign.trl.training_arguments import KIND, add_accelerate
from rlplan.foreign.unread.stacks import USUAL_GPUS, Nearest, load_stacks, refuse_commands, refuse_document
from rlplan.frameworks.profile import find_release
from rlplan.reading import read_text
from rlplan.spec.algorithms import DEFAULT
from rlplan.spec.base import shorten_value

NEAREST = Nearest()
PROCESSES = ("NPROC_PER_NODE", "NNODES")
"""Variables that stand for flags of `torchrun`."""
MOST_STRANGE = 0.6
"""Largest share of unknown keys in a file of a stack that is read.

Among 740 published files of these stacks the largest share is 0.48. Files of other stacks that have one of their keys
have 0.75 and more.
"""
PYTHON = (".py", ".ipynb")
READ = (*SUFFIXES, *PYTHON)
"""Suffixes of files other than shell scripts that may describe a training."""
_IMPORT = re.compile(rf"^\s*(?:from|import)\s+({'|'.join(SOURCES)})\b", re.MULTILINE)
"""Imports the package of a stack that is started by commands or configuration files."""
_OPTION = re.compile(r"--[a-z]|\+*[a-z_]\w*(?:\.\w+)+=")
"""The first word of a command that is an option: `--lr`, `trainer.nnodes=2`."""
EMITTED = "train"
"""Stem of the file that `rlplan emit --target` writes."""
PLAN_FILE = "plan.json"
"""A file that every bundle of rlplan has."""
LEAST_STRANGE = 3
"""Fewest unknown keys that make a file suspicious: in a short file a single key is a large share."""
MAX_KEYS, MAX_NOTES, MAX_NOTE = 2_000, 100, 600
"""Limits on keys, notes and characters of a note: a hostile file has as many as its size allows."""


def read_source(path: Path, source: str | None, outside: Sequence[str] = (), nearest: Nearest = NEAREST) -> Settings:
    """The settings of a foreign file, which is read in a limited child process.

    source: its stack, where the file cannot be recognised. outside: `NAME=VALUE` for a variable of the script or a
    foreign key. nearest: options of the command line that a refusal repeats. Raises: SpecError, HostError.
    """
    if path.suffix in PYTHON:  # before the fork, so that the next one finds them in memory
        list_given_trainers()
    else:
        _load_identities(None)
        load_stacks()
    data = read_contained(lambda: _encode(_read_settings(path, source, outside, nearest)), path)
    entries = {key: Given(value, place) for key, value, place in data["entries"]}
    return Settings(load_table(data["table"]), data["file"], entries, data["defaults"], tuple(data["notes"]))


def _encode(settings: Settings) -> dict[str, Any]:
    """Settings as JSON data. Raises: SpecError for more keys than any configuration has."""
    notes, more = settings.notes[:MAX_NOTES], len(settings.notes) - MAX_NOTES
    if len(settings.entries) > MAX_KEYS:
        raise SpecError(
            f"the file sets {len(settings.entries):,} keys",
            where=settings.file,
            rule=f"at most {MAX_KEYS:,} keys of the file and of those that it names",
            way_out="give the configuration of the training alone",
        )
    return {
        "table": settings.table.name,
        "file": settings.file,
        "entries": [[key, simplify(entry.value), entry.place] for key, entry in settings.entries.items()],
        "defaults": dict(settings.defaults),
        "notes": [*(note[:MAX_NOTE] for note in notes), *([f"{more} more notes"] if more > 0 else [])],
    }


def _read_settings(path: Path, source: str | None, outside: Sequence[str], nearest: Nearest) -> Settings:
    """The settings of a foreign file. Raises: SpecError, HostError."""
    stacks = _load_identities(source)
    pairs = _split_pairs(outside)
    path = _find_file(path, nearest) if path.is_dir() else path
    names: Set[str] = frozenset()
    if path.suffix in PYTHON:
        settings, names = _read_launcher(path, pairs) or (_read_trainer(path, pairs), pairs.keys())
    elif path.suffix in SUFFIXES:
        settings = _read_document(path, stacks, source, pairs, nearest)
    else:
        settings, names = _read_script(path, stacks, pairs, nearest)
    if settings.table.syntax == "python":
        names = names | {"trainer"}
    settings = _apply_outside(settings, pairs, names)
    if KIND in settings.table.defaults:
        with_files, notes = add_accelerate(settings.entries, path.parent, settings.table)
        settings = replace(settings, entries=with_files, notes=(*settings.notes, *notes))
    _check_known(settings, nearest)
    return settings


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


def _read_trainer(path: Path, outside: Mapping[str, str]) -> Settings:
    """The settings of a Python script that creates a trainer of TRL. Raises: SpecError."""
    script = read_python(path, outside)
    if not script.has_trainer:
        raise _refuse_without_trainer(path)
    table = load_table("trl_given" if "trainer" in script.entries else "trl")
    return Settings(table, str(path), normalize_values(script.entries, table), dict(table.defaults), script.notes)


def _read_launcher(path: Path, outside: Mapping[str, str]) -> tuple[Settings, Set[str]] | None:
    """The settings of a Python program that starts a stack by a command, and the names that it has; None for another.

    Raises: SpecError for a program of a stack whose command it does not contain.
    """
    text = read_text(path, "the script", limit=MAX_NOTEBOOK)
    package = _IMPORT.search(text)
    if package is None or re.search(r"\b(trl|unsloth)\b", text):
        return None
    launched = read_started(path, outside) if LAUNCH in text else None
    if launched is not None:
        table, notes = load_table(package[1]), [*launched.notes]
        read = read_command(launched.words[1:], table, path.parent, notes, outside)
        raw = Settings(table, str(path), read.entries, {}, tuple(notes))
        return _settle(raw, [word for word, _ in launched.words], outside), launched.used
    title = load_identity(package[1]).title
    raise SpecError(
        f"this program computes the options of {title} in Python, which is not followed for {title}",
        where=str(path),
        rule=f"a command line or configuration file of {title}",
        way_out="give the command or the file that the program starts with, with its options",
    )


def _refuse_without_trainer(path: Path) -> SpecError:
    known = ", ".join(f"{name}Trainer" for name in ("GRPO", "SFT", "DPO", "KTO", "Reward"))
    return SpecError(
        "the script creates neither a trainer of TRL nor its configuration",
        where=str(path),
        rule=f"a call of {known}, or of a configuration of one, in the script's own text",
        way_out="give the script that creates the trainer, or the command or YAML file that starts it",
    )


def _load_identities(source: str | None) -> dict[str, Identity]:
    if source is None:
        return {name: load_identity(name) for name in SOURCES}
    if get_table_name(source) not in SOURCES:
        raise SpecError(
            f"'{source}' is no known stack",
            where="command line: --source",
            rule=f"one of {', '.join(dict.fromkeys(load_identity(name).title for name in SOURCES))}."
            f"{did_you_mean(source, SOURCES)}",
            way_out="omit --source: most files are recognised without it",
        )
    name = get_table_name(source)
    return {other: load_identity(other) for other in SOURCES if f"{other}_".startswith(f"{name}_")}


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
    path: Path, stacks: Mapping[str, Identity], outside: Mapping[str, str], nearest: Nearest
) -> tuple[Settings, Set[str]]:
    """The settings of a shell script, and all its words that may be variables."""
    script = read_script(path, {name: value for name, value in outside.items() if "." not in name})
    refuse_commands(script.commands, path, nearest)
    for name, stack in stacks.items():
        commands = [(command, at) for command in script.commands if (at := find_entry(command, stack)) is not None]
        if not commands and any(may_wrap(command, stack) for command in script.commands):
            commands = [(command, 0) for command in script.commands if is_wrapped(command, load_table(name))]
        commands = [(command, at) for command, at in commands if find_server(command, stack) is None]
        if not commands:
            continue
        table = load_table(name)
        for command, at in commands:
            words = tuple(zip(command.words, command.places, strict=True))
            notes = [*script.notes, *_list_detached(script.commands)]
            read = read_command(words[at + 1 :], table, path.parent, notes, outside)
            if not read.is_known:
                continue  # another project's program of that name
            if len(commands) > 1:
                notes.append(f"{len(commands)} commands start {table.title}; the one at {command.places[0]} is read")
            entries, chosen = read.entries, table
            long = [pair for pair in words[:at] if pair[0].startswith("--") or not pair[0].startswith("-")]
            launcher = {f"launcher.{key}": Given(value, place) for key, value, place in read_flags(long)}
            entries |= {key: entry for key, entry in launcher.items() if key in table.keys}
            if table.syntax == "python":
                chosen, entries = choose_table(entries, command.places[0])
            else:
                entries = _read_before(command, at, table, path.parent, notes) | entries
            entries = read_server(script.commands, table) | entries
            raw = Settings(chosen, str(path), entries, {}, tuple(notes))
            return _settle(raw, command.words, outside), script.names | read.used
    skipped = [*_list_detached(script.commands), *(note for note in script.notes if "taken as false" in note)]
    raise _refuse_without_command(path, script.commands, [*stacks.values()], nearest, skipped)


def _list_detached(commands: Iterable[Command]) -> Iterator[str]:
    """Notes on commands that are only options: the line before them lacks its backslash, or is blank."""
    for command in commands:
        if _OPTION.match(command.words[0]):
            yield (
                f"{command.places[0]}: {len(command.words)} words from {command.words[0][:MAX_SHOWN]} on are ignored: "
                "no backslash joins them to the command above, so bash does not pass them"
            )


def _read_before(command: Command, at: int, table: Table, folder: Path, notes: list[str]) -> dict[str, Given]:
    """The keys of the launcher before a program, and of the environment, where a table reads them."""
    if "accelerate.num_processes" not in table.keys:
        return {}
    place, environment = command.places[0], command.environment
    flags = [(f"--{name.lower()}={environment[name]}", place) for name in PROCESSES if name in environment]
    words = [*zip(command.words[:at], command.places[:at], strict=True), *flags]
    # SCRIPT: the same flags mean other steps in other folders
    variables = {f"env.{name}": value for name, value in {**environment, "SCRIPT": str(folder.resolve())}.items()}
    asked = {key: Given(parse_word(value), place) for key, value in variables.items() if table.knows(key)}
    return asked | read_launcher(words, folder, notes, table.shipped)


def _settle(raw: Settings, words: Sequence[str], outside: Mapping[str, str], parts: Set[str] = frozenset()) -> Settings:
    """The settings as their table reads them, or the table of their method. words, parts: as of find_defaults."""
    table = raw.table
    typed = {key: Given(parse_word(value), "--set") for key, value in outside.items() if key in table.keys}
    keys = {table.older.get(key, key): entry for key, entry in {**raw.entries, **typed}.items()}
    settings = replace(raw, entries=normalize_values(keys, table), defaults=find_defaults(table, words, parts))
    method_table = next((name for name, condition in table.instead.items() if settings.holds(condition)), "")
    return _settle(replace(raw, table=load_table(method_table)), words, outside, parts) if method_table else settings


def _refuse_without_command(
    path: Path, commands: Sequence[Command], stacks: Sequence[Identity], nearest: Nearest, skipped: Sequence[str]
) -> SpecError:
    """The refusal of a script without a command that is read; it names a known program without a table.

    skipped: notes on conditions that only a run decides, whose commands were not read.
    """
    # `rm` is bash's too
    unread = [(stack, name) for stack in stacks for name in stack.unread if "." in name or " " in name]
    for stack, program in unread:
        if any(find_word(command, program) is not None for command in commands):
            return _refuse_program(path, stack, program, nearest)
    entries = ", ".join(dict.fromkeys(entry for stack in stacks for entry in stack.entries))
    return SpecError(
        f"no command of this script starts one of {_list_titles(stacks)}",
        where=str(path),
        rule=f"a command with one of {entries} among its words",
        way_out="give the script that starts the training, or the YAML file that it reads with --source "
        f"{'|'.join(SOURCES)}; or describe the job: {nearest.command(algorithm=DEFAULT)}"
        + (f"; or correct the script or --set what decides it ({skipped[0]})" if skipped else ""),
    )


def _refuse_program(path: Path, stack: Identity, name: str, nearest: Nearest) -> SpecError:
    algorithm, *words = stack.unread[name].split()
    return SpecError(
        f"{name} of {stack.title} is not read",
        where=str(path),
        rule=f"of {stack.title}: {', '.join(stack.entries)}, and their configurations",
        way_out=nearest.command(algorithm=algorithm, words=words),
    )


def _refuse_other_stack(entries: Mapping[str, Given], path: Path, table: Table, least: int) -> None:
    """Raises: SpecError for a document with at least so many own keys of a stack that is not the table's."""
    for name in SOURCES:
        stack = load_identity(name)
        keys = [root for root in stack.roots if root in entries and not table.knows(root)]
        is_other = len(keys) >= least and stack.framework_name not in ("", table.framework_name)
        if is_other and find_release(stack.framework_name).is_read_only:
            raise SpecError(
                f"this is a file of {stack.title} ({', '.join(keys[:3])})",
                where=str(path),
                rule=f"a file has the keys of one stack, and {table.title} has none of these",
                way_out=f"--source {name}, without keys of {table.title}",
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


def _list_titles(stacks: Iterable[Identity]) -> str:
    titles = dict.fromkeys(stack.title for stack in stacks)
    return ", ".join(sorted(titles, key=lambda title: get_table_name(title) not in WITH_EXPORTS))


def _read_document(
    path: Path, stacks: Mapping[str, Identity], source: str | None, outside: Mapping[str, str], nearest: Nearest
) -> Settings:
    entries, notes = read_document(path)
    refuse_document(entries, path, nearest)
    if source is not None:
        _refuse_other_stack(entries, path, load_table(get_table_name(source)), 1)
    with_trainer = entries | {key: Given(outside[key], "--set") for key in ("trainer",) if key in outside}
    base = first_word(Path(str(entries[BELOW].value)).stem) if BELOW in entries else ""
    candidates = [(name, False) for name in stacks] + ([(get_table_name(source), True)] if source else [])
    for name, is_named in candidates:
        stack = stacks[name]
        if stack.syntax == "python" and (source or is_trl(with_trainer)):
            chosen, keys = choose_table(add_launcher(with_trainer, path.parent, notes), str(path))
            return _settle(Settings(chosen, str(path), keys, {}, tuple(notes)), (), {})
        keys = {key.replace("-", "_"): entry for key, entry in entries.items()} if stack.syntax == "flags" else entries
        has_suffix = path.suffix == (stack.suffix or path.suffix)
        has_root = base in stack.roots or any(stack.is_root(key, entry.value) for key, entry in keys.items())
        if is_named or (has_suffix and has_root):
            table = load_table(name)
            _refuse_other_stack(entries, path, table, 2)
            parts = _find_parts(path, keys, table, nearest)
            raw = Settings(table, str(path), keys, {}, tuple(notes))
            return _settle(raw, (f"--config={path.stem}",), outside, parts)
    raise SpecError(
        f"none of its keys is one of {_list_titles(stacks.values())}: " + ", ".join(list(entries)[:5]),
        where=str(path),
        rule="each is known by " + ", ".join(root for stack in stacks.values() for root in stack.roots),
        way_out="name the stack: --source " + "|".join(dict.fromkeys(stack.title for stack in stacks.values())),
    )
