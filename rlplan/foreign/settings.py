"""The settings of a foreign file or script: keys and values with their places, and upstream's defaults for the rest.

In: pairs of key and text. Out: Settings. Left out: reading files (source.py), the meaning of keys (convert.py).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from rlplan.errors import SpecError
from rlplan.foreign.table import Condition, Table
from rlplan.foreign.unknown import is_known, strip_marks
from rlplan.frameworks.rules import matches

_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([A-Za-z_][\w.]*)(?:,([^}]*))?\}")
_PRODUCT = re.compile(r"\$\{mul:\s*([^,]+),\s*([^,]+)\}")
_WORDS = {"true": True, "false": False, "null": None, "none": None, "~": None}
AS_IT_IS = "as it is"
"""Stands in a table for the current value of a required key."""
MAX_REFERENCES = 16
MAX_SHOWN = 200
"""Characters of a value in a message."""
_OF_SHELL = "variables, ${X:-default}, $((...)) and references to keys are followed; nothing is executed"
_OF_PYTHON = "constants, functions of the script's own and defaults of its parser are followed; nothing is executed"


@dataclass(frozen=True)
class Given:
    """A value as it was given."""

    value: Any
    place: str
    """File and line, or the key, for messages."""


@dataclass(frozen=True)
class Settings:
    """The keys of one configuration."""

    table: Table
    file: str
    entries: Mapping[str, Given]
    """Values that the file sets, by key."""
    defaults: Mapping[str, Any]
    """Upstream's values of keys that the file leaves out."""
    notes: tuple[str, ...] = ()
    ours: dict[str, Any] = field(default_factory=dict)
    """Job keys that are converted so far; later table rows may ask for them."""

    def value(self, key: str) -> Any:
        """The effective value, with references followed. Raises: SpecError where it is known only at run time."""
        value = self.resolve(key)
        if isinstance(value, str) and (not is_known(value) or "${" in value):
            entry = self.entries.get(key, Given(value, self.file))
            raise SpecError(
                f"{key} is {strip_marks(value)[:MAX_SHOWN]}, which is known only at run time",
                where=entry.place,
                rule=_OF_PYTHON if ".py:" in entry.place else _OF_SHELL,
                way_out=f"set it: {_suggest_variable(value)}--set {key}=VALUE",
            )
        return value

    def resolve(self, key: str) -> Any:
        """The effective value, with references followed; unknown parts stay marked."""
        return self._follow(self.raw(key))

    def _follow(self, value: Any) -> Any:
        """A value with `${key}` references and `${mul: a, b}` products resolved."""
        for _ in range(MAX_REFERENCES):
            if not isinstance(value, str):
                break
            if product := _PRODUCT.fullmatch(value.strip()):
                factors = [self._follow(parse_word(word)) for word in product.groups()]
                return factors[0] * factors[1] if all(isinstance(factor, int) for factor in factors) else value
            reference = _REFERENCE.fullmatch(value)
            if reference is None:
                break
            name, otherwise = reference.groups()
            if name not in self.entries and name not in self.defaults and otherwise is None:
                break
            value = self.raw(name) if name in self.entries or name in self.defaults else parse_word(otherwise)
        return value

    def raw(self, key: str) -> Any:
        """The literal value: given, converted so far, or upstream's default; None where there is none."""
        if key in self.ours and key not in self.defaults:
            return self.ours[key]
        entry = self.entries.get(key)
        return self.defaults.get(key) if entry is None else entry.value

    def place(self, key: str) -> str:
        """Place of a key in the file; empty where upstream's default holds."""
        return self.entries[key].place if key in self.entries else ""

    def holds(self, condition: Condition) -> bool:
        """Whether every key of a condition has its value, one of its values, or a value within its bound."""
        return all(matches(self.value(key), self._fill_bound(wanted)) for key, wanted in condition.items())

    def _fill_bound(self, wanted: Any) -> Any:
        """A condition's value; a bound that names a key, such as `<other.key`, with that key's value."""
        is_bound = isinstance(wanted, str) and wanted[:1] in ("<", ">") and wanted[1:2].isalpha()
        return f"{wanted[0]}{self.value(wanted[1:]) or 0}" if is_bound else wanted

    def list_required(self) -> dict[str, Any]:
        """Keys that the stack requires beside the given ones, with the table's values where the file has none."""
        asked = [
            pair
            for requirement in self.table.required
            if self.holds(requirement.when)
            for pair in requirement.keys.items()
        ]
        values = {key: value for key, value in asked if value == AS_IT_IS or key not in self.entries}
        return {key: self.value(key) if value == AS_IT_IS else value for key, value in values.items()}

    def replace_values(self, values: Mapping[str, Any]) -> "Settings":
        """The settings with other values."""
        named = [self.table.shipped.get(PurePosixPath(str(value)).stem, {}) for value in values.values()]
        new = {key: Given(value, "a change") for mapping in (values, *named) for key, value in mapping.items()}
        return replace(self, entries={**self.entries, **add_parts(new, self.table)}, ours={})


def add_parts(entries: Mapping[str, Given], table: Table) -> dict[str, Given]:
    """The entries with the parts of composite values as keys of their own, as the table's `parsed` names them."""
    parts = dict(entries)
    for key, patterns in table.parsed.items():
        for name, pattern in patterns.items() if key in parts else ():
            if match := re.search(pattern, str(parts[key].value)):
                words = [parse_word(word) for word in match.groups()]
                value = words[1] - words[0] if len(words) > 1 else words[0]
                parts[name if "." in name else f"{key}.{name}"] = Given(value, parts[key].place)
    return parts


def parse_word(text: str) -> Any:
    """A word of a command line as Hydra and YAML read it.

    >>> parse_word("True"), parse_word("1e-6"), parse_word("8"), parse_word("'a b'"), parse_word("null")
    (True, 1e-06, 8, 'a b', None)
    """
    word = text.strip()
    if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"":
        return word[1:-1]
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    for kind in (int, float):
        try:
            return kind(word) if word.isascii() and "_" not in word and len(word) < 40 else word
        except ValueError:
            continue
    return word


def read_flags(words: Iterable[tuple[str, str]]) -> Iterable[tuple[str, Any, str]]:
    """`--key value`, `--key=value`, `--key` alone, which is true; several values are one text."""
    key, values, at = "", list[str](), ""
    for word, place in [*words, ("--", "")]:
        if not word.startswith("--"):
            values.append(word)
            continue
        if key:
            yield key, parse_word(" ".join(values)) if values else True, at
        key, separator, value = word[2:].partition("=")
        key, values, at = key.replace("-", "_"), [value] if separator else [], place


def _suggest_variable(text: str) -> str:
    """The `--set NAME=VALUE` of a missing shell variable or Python name in a text; empty without one."""
    match = re.fullmatch(r"([A-Za-z_][\w.]*)", strip_marks(text)) or re.search(r"\$\{?([A-Za-z_]\w*)", text)
    return f"--set {match.group(1)}=VALUE, or " if match else ""
