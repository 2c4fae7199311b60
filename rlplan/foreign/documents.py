"""YAML, JSON and TOML of other stacks as dotted keys, with the files that their `defaults:` name laid below them.

In: a path. Out: what each key was given, with its place, and what was not there. Left out: references to other keys,
which settings.py follows, and what keys mean.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from rlplan.errors import SpecError
from rlplan.foreign.settings import Given
from rlplan.reading import is_file, read_text
from rlplan.spec.files.yaml import read_yaml

BELOW = "defaults"
"""The key of the files that one stands on."""
SUFFIXES = (".yaml", ".yml", ".json", ".toml")
"""Of files that are read as documents."""
MAX_CHAIN = 8
"""Files that one may stand on."""


def read_document(path: Path) -> tuple[dict[str, Given], list[str]]:
    """The keys of a file and of those below it, and notes; a file below that is not there is the key BELOW's.

    Raises: SpecError.
    """
    return _read(path, 0)


def _read(path: Path, depth: int) -> tuple[dict[str, Given], list[str]]:
    data = _read_toml(path) if path.suffix == ".toml" else read_yaml(path, "the file", may_repeat=True)
    if not isinstance(data, dict) or depth > MAX_CHAIN:
        raise SpecError(
            f"the file is {type(data).__name__}, not a mapping of keys to values"
            if depth <= MAX_CHAIN
            else f"its `defaults:` name more than {MAX_CHAIN} files, or each other",
            where=str(path),
            rule=f"a configuration has keys, and at most {MAX_CHAIN} base configurations",
            way_out="give the configuration, or the script that starts the training",
        )
    below, notes = data.pop(BELOW, None), []
    found: dict[str, Given] = {}
    for name in [below] if isinstance(below, str) else below if isinstance(below, list) else []:
        file = path.parent / str(name)
        if isinstance(name, str) and is_file(file):
            inner, more = _read(file, depth + 1)
            found |= inner
            notes += more
        elif name != "_self_":
            found[BELOW] = Given(name, f"{path.name}: {BELOW}")
            notes.append(f"{path.name}: {BELOW}: '{name}' is not beside it; the table's defaults hold in its place")
    given = {key: Given(value, f"{path.name}: {key}") for key, value in flat(data).items()}
    return found | given, notes


def _read_toml(path: Path) -> Any:
    try:
        return tomllib.loads(read_text(path, "the file"))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SpecError(
            f"the file is not TOML: {str(error) or type(error).__name__}",
            where=str(path),
            rule="TOML 1.0",
            way_out="mend the file",
        ) from None


def flat(data: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys.

    >>> flat({"a": {"b": 1}, "c": [1]})
    {'a.b': 1, 'c': [1]}
    """
    found: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{name}.")
        else:
            found[name] = value
    return found


def read_beside(folder: Path, named: Given | None, notes: list[str]) -> dict[str, Given]:
    """The keys of a file that a command line names, with a note where it is not there."""
    if named is None:
        return {}
    file = _found(folder, str(named.value))
    if file is None:
        notes.append(f"{named.place}: '{named.value}' is not beside the script and was not read")
        return {}
    given, more = read_document(file)
    given.pop(BELOW, None)
    notes += more
    return given


def _found(folder: Path, named: str) -> Path | None:
    """A file beside the script, or where the folder is one of those above it, in which the script was to be started."""
    here, below = folder.resolve(), PurePosixPath(named)
    below = below.relative_to(here) if below.is_relative_to(here) else below
    above = () if below.is_absolute() else here.parents[:MAX_CHAIN]
    return next((file for one in (folder, *above) if is_file(file := one / below)), None)
