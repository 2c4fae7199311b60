"""YAML 1.2 as data: `1e-5` is a float; duplicate keys, tags, and aliases in rlplan's own files are errors.

In: a file's text, and dotted overrides `workload.num_steps=5`. Out: plain dicts, lists and scalars, or a SpecError.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlplan.errors import SpecError
from rlplan.reading import read_text
from rlplan.spec.base import shorten_value

MAX_DEPTH = 32
"""Limit on nesting levels; a job has four."""
_RULE = "YAML 1.2 without tags, aliases, tabs, duplicate keys, or lists and mappings as keys"


def read_yaml(path: Path, what: str, *, may_repeat: bool = False) -> Any:
    """Parsed YAML of a small file. may_repeat: whether aliases are allowed. Raises: SpecError with line and column."""
    return parse_yaml(read_text(path, what), where=str(path), what=what, may_repeat=may_repeat)


def parse_yaml(text: str, *, where: str, what: str, may_repeat: bool = False) -> Any:
    """Parsed YAML of a text. Raises: SpecError."""
    from rlplan.spec.files.plain_yaml import MarkedYAMLError, YAMLError, load  # lazy: imports 30 modules

    try:
        return load(text, MAX_DEPTH, may_repeat=may_repeat)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{where}, line {mark.line + 1}, column {mark.column + 1}" if mark else where
        raise SpecError(
            f"{what} is not YAML: {error.problem or error.context}",
            where=place,
            rule=_RULE.replace(", aliases", "") if may_repeat else _RULE,
            way_out="correct that line",
        ) from None
    except (YAMLError, RecursionError, ValueError) as error:
        raise SpecError(
            f"{what} is not YAML: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            where=where,
            rule=_RULE.replace(", aliases", "") if may_repeat else _RULE,
            way_out="correct the file",
        ) from None


def apply_overrides(data: Any, overrides: Sequence[str]) -> Any:
    """`data` with dotted overrides `a.b=value` applied; values are read as YAML.

    Raises: SpecError for an override without `=` or through something that is not a mapping.

    >>> apply_overrides({"a": {"b": 1}}, ["a.b=2e-3", "a.c=[1, x]"])
    {'a': {'b': 0.002, 'c': [1, 'x']}}
    """
    for override in overrides:
        path, separator, text = override.partition("=")
        keys = path.strip().split(".")
        if not separator or not all(keys) or len(keys) > MAX_DEPTH or "/" in keys[0]:
            raise SpecError(
                f"override {shorten_value(override, 200)} is not KEY=VALUE",
                where="command line",
                rule=f"a dotted path of at most {MAX_DEPTH} keys, '=' and a YAML value",
                way_out=_as_override(path, text),
            )
        data = _set_key(
            data, keys, parse_yaml(text, where=f"command line: {path}", what="the override's value"), override
        )
    return data


def _as_override(path: str, text: str) -> str:
    """The override that was probably meant: `/` or `:` may have been typed instead of `.` and `=`."""
    key, _, value = path.strip().partition(":")
    dotted = key.replace("/", ".")
    is_meant = dotted.count(".") < MAX_DEPTH and re.fullmatch(r"\w{1,60}(\.\w{1,60})+", dotted) is not None
    return f"write {dotted}={(value or text or 'VALUE')[:60]}" if is_meant else "for example workload.num_steps=5"


def _set_key(data: Any, keys: list[str], value: Any, override: str) -> Any:
    if not isinstance(data, dict):
        raise SpecError(
            f"override '{override}' leads through {shorten_value(data)}, which has no keys",
            where="command line",
            rule="a dotted path leads through mappings; set a list as a whole",
            way_out=f"{override.partition('=')[0].removesuffix('.' + '.'.join(keys))}='[{{...}}]', or in the job file",
        )
    inner = value if len(keys) == 1 else _set_key(data.get(keys[0], {}), keys[1:], value, override)
    return {**data, keys[0]: inner}
