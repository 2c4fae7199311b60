"""YAML, JSON and TOML of other stacks as dotted keys, on top of the files that their `defaults:` name.

In: a path. Out: the value and the place of each key, and notes on missing files. Left out: references to other keys
(settings.py), the meaning of keys.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from rlplan.errors import SpecError
from rlplan.foreign.settings import Given
from rlplan.reading import is_file, read_text
from rlplan.spec.files.yaml import read_yaml

BELOW = "defaults"
"""The key that names a file's base configurations."""
SUFFIXES = (".yaml", ".yml", ".json", ".toml")
"""Suffixes of files that are read as documents."""
_COMMENT = re.compile(r"(?m)(?:^|[\s,{}\[\]])(?://|/\*).{0,40}")
MAX_CHAIN = 8
"""Length of a chain of base configurations."""


def read_document(path: Path) -> tuple[dict[str, Given], list[str]]:
    """The keys of a file and of its base configurations, and notes.

    The name of a base that is missing stays as the key BELOW. Raises: SpecError.
    """
    return _read(path, 0)


def _read(path: Path, depth: int) -> tuple[dict[str, Given], list[str]]:
    data = _read_toml(path) if path.suffix == ".toml" else _read_yaml(path)
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
    inherited: dict[str, Given] = {}
    for name in [below] if isinstance(below, str) else below if isinstance(below, list) else []:
        file = _find_base(path.parent, str(name))
        if isinstance(name, str) and file is not None:
            inner, more = _read(file, depth + 1)
            inherited |= inner
            notes += more
        elif name != "_self_":
            inherited[BELOW] = Given(name, f"{path.name}: {BELOW}")
            notes.append(f"{path.name}: {BELOW}: '{name}' was not found; the table's defaults are used instead")
    own = {key: Given(value, f"{path.name}: {key}") for key, value in flatten_keys(data).items()}
    return inherited | own, notes


def _find_base(folder: Path, name: str) -> Path | None:
    """A base configuration: a file's name, or Hydra's `NAME@_here_`, which omits the suffix; None if it is missing."""
    file = folder / name
    return next((base for base in (file, folder / f"{name.removesuffix('@_here_')}.yaml") if is_file(base)), None)


def _read_yaml(path: Path) -> Any:
    try:
        return read_yaml(path, "the file", may_repeat=True)
    except SpecError:
        comment = _COMMENT.search(read_text(path, "the file")) if path.suffix == ".json" else None
        if comment is None:
            raise
        raise SpecError(
            f"the file has a comment: {comment[0].strip()}",
            where=str(path),
            rule="JSON without comments, as DeepSpeed reads it (`json.load`)",
            way_out="remove the comments",
        ) from None


def _read_toml(path: Path) -> Any:
    try:
        return tomllib.loads(read_text(path, "the file"))
    except (ValueError, RecursionError) as error:  # a number of very many digits is a plain ValueError
        raise SpecError(
            f"the file is not TOML: {str(error) or type(error).__name__}",
            where=str(path),
            rule="TOML 1.0",
            way_out="correct the file",
        ) from None


def flatten_keys(data: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys.

    >>> flatten_keys({"a": {"b": 1}, "c": [1]})
    {'a.b': 1, 'c': [1]}
    """
    flattened: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flattened |= flatten_keys(value, f"{name}.")
        else:
            flattened[name] = value
    return flattened


def read_named_file(folder: Path, named: Given | None, notes: list[str]) -> dict[str, Given]:
    """The keys of a file that a command line names; a missing file adds a note."""
    if named is None:
        return {}
    file = _find_file(folder, str(named.value))
    if file is None:
        notes.append(f"{named.place}: '{named.value}' was not found beside the script and not read")
        return {}
    entries, more = read_document(file)
    entries.pop(BELOW, None)
    notes += more
    return entries


def _find_file(folder: Path, named: str) -> Path | None:
    """A file relative to the script's folder or one above it: scripts are often started from the checkout's root."""
    here, below = folder.resolve(), PurePosixPath(named)
    below = below.relative_to(here) if below.is_relative_to(here) else below
    above = () if below.is_absolute() else here.parents[:MAX_CHAIN]
    return next((file for base in (folder, *above) if is_file(file := base / below)), None)
