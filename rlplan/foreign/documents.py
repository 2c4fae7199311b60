"""YAML and JSON of other stacks as dotted keys, with the files that their `defaults:` name laid below them.

In: a path. Out: what each key was given, with its place, and what was not there. Left out: references to other keys,
which settings.py follows, and what keys mean.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlplan.errors import SpecError
from rlplan.foreign.settings import Given
from rlplan.reading import is_file
from rlplan.spec.files.yaml import read_yaml

BELOW = "defaults"
"""The key of the files that one stands on."""
MAX_CHAIN = 8
"""Files that one may stand on."""


def read_document(path: Path) -> tuple[dict[str, Given], list[str]]:
    """The keys of a file and of those below it, and notes; a file below that is not there is the key BELOW's.

    Raises: SpecError.
    """
    return _read(path, 0)


def _read(path: Path, depth: int) -> tuple[dict[str, Given], list[str]]:
    data = read_yaml(path, "the file", may_repeat=True)
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
