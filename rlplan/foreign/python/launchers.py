"""The command line that a Python program of slime or miles builds and starts.

In: a program of slime or miles that calls `execute_train(train_args=..., train_script=...)`. Out: the words of the
command, with places.
Left out: following the program (statements.py), the options (foreign/command_lines.py).
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlplan.foreign.python.calls import LAUNCH
from rlplan.foreign.python.file import parse_file
from rlplan.foreign.python.statements import Script
from rlplan.foreign.settings import MAX_SHOWN
from rlplan.foreign.unknown import is_known, is_wholly_unknown, split_words, strip_marks

_SCRIPT = "train.py"
"""The program that `execute_train` starts by default."""
_MORE_OPTIONS = re.compile(r"\{?(?:[\w.]*args(?:\(.*\))?\}?|.*--[a-z].*)", re.DOTALL)
"""An unknown part that is options: `{args.extra_args}`, `{get_default_wandb_args(...)}`, `{"--use-wandb" if ...}`."""


@dataclass(frozen=True)
class Launched:
    """A command that a program starts."""

    words: tuple[tuple[str, str], ...]
    """The program and its options, each with its place."""
    notes: tuple[str, ...]
    used: frozenset[str]
    """Names of `--set` that the program has."""


def read_launcher(path: Path, outside: Mapping[str, str]) -> Launched | None:
    """The last command that a program starts with known options; None where it starts none. Raises: SpecError."""
    tree, text = parse_file(path)
    script = Script(tree, text, path.name, outside)
    calls = [call for call in script.made if call.name == LAUNCH and _is_readable(call.get("train_args"))]
    if not calls:
        return None
    call = calls[-1]
    place, program = f"{path.name}:{call.line}", call.get("train_script")
    notes = [*script.notes, *([f"{len(calls)} calls start a training; the one at {place} is read"] * (len(calls) > 1))]
    words = (
        program if isinstance(program, str) and is_known(program) else _SCRIPT,
        *_list_words(call.get("train_args"), notes, place),
    )
    return Launched(tuple((word, place) for word in words), tuple(notes), frozenset(script.used))


def _is_readable(options: Any) -> bool:
    return isinstance(options, str) and "--" in strip_marks(options) and not is_wholly_unknown(options)


def _list_words(options: str, notes: list[str], place: str) -> Iterator[str]:
    """The words of a text of options as a shell splits them, without unknown further options."""
    parts = split_words(options)
    unknown = {f"\x01{at}\x01": part for at, part in enumerate(part for part in parts if not is_known(part))}
    names = iter(unknown)
    for word in shlex.split(" ".join(part if is_known(part) else next(names) for part in parts)):
        original = unknown.get(word, word)
        if is_wholly_unknown(original) and _MORE_OPTIONS.fullmatch(strip_marks(original)):
            notes.append(f"{place}: options of {strip_marks(original)[:MAX_SHOWN]} are known only at run time")
        else:
            yield re.sub("\x01\\d+\x01", lambda match: unknown[match[0]], original)
