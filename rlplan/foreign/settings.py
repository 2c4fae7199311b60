"""What a foreign file or script says: its keys and values, with their places, and what upstream takes for the rest.

In: pairs of key and text. Out: Settings. Left out: where they come from (source.py), what they mean (convert.py).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlplan.errors import SpecError
from rlplan.foreign.table import Condition, Table
from rlplan.foreign.unknown import is_known, shown
from rlplan.frameworks.rules import matches

_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([A-Za-z_][\w.]*)(?:,([^}]*))?\}")
_PRODUCT = re.compile(r"\$\{mul:\s*([^,]+),\s*([^,]+)\}")
_WORDS = {"true": True, "false": False, "null": None, "none": None, "~": None}
AS_IT_IS = "as it is"
"""Of a key that is required: the value that holds."""
MAX_REFERENCES = 16
_OF_SHELL = "variables, ${X:-default}, $((...)) and references to keys are followed; nothing is executed"
_OF_PYTHON = "constants, functions of the script's own and defaults of its parser are followed; nothing is executed"


@dataclass(frozen=True)
class Given:
    """A value as it was given. place: file and line, or key."""

    value: Any
    place: str


@dataclass(frozen=True)
class Settings:
    """The keys of one configuration. given: by key. defaults: upstream's defaults for keys that are not given."""

    table: Table
    file: str
    given: Mapping[str, Given]
    defaults: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    ours: dict[str, Any] = field(default_factory=dict)
    """What has been converted so far, which rows may ask for."""

    def value(self, key: str) -> Any:
        """The value that holds, references followed. Raises: SpecError where only running would tell it."""
        found = self.known(key)
        if isinstance(found, str) and (not is_known(found) or "${" in found):
            given = self.given.get(key, Given(found, self.file))
            raise SpecError(
                f"{key} is {shown(found)}, which only running would tell",
                where=given.place,
                rule=_OF_PYTHON if ".py:" in given.place else _OF_SHELL,
                way_out=f"say it: {_variable(found)}--set {key}=VALUE",
            )
        return found

    def known(self, key: str) -> Any:
        """The value, references followed, with what only running would tell left in it."""
        return self._followed(self.raw(key))

    def _followed(self, found: Any) -> Any:
        """A value with its references to other keys followed, and products of two."""
        for _ in range(MAX_REFERENCES):
            if not isinstance(found, str):
                break
            if product := _PRODUCT.fullmatch(found.strip()):
                factors = [self._followed(typed(word)) for word in product.groups()]
                return factors[0] * factors[1] if all(isinstance(one, int) for one in factors) else found
            reference = _REFERENCE.fullmatch(found)
            if reference is None:
                break
            name, otherwise = reference.groups()
            if name not in self.given and name not in self.defaults and otherwise is None:
                break
            found = self.raw(name) if name in self.given or name in self.defaults else typed(otherwise)
        return found

    def raw(self, key: str) -> Any:
        """The value as it stands: given, of ours, or upstream's default; None where there is none."""
        if key in self.ours and key not in self.defaults:
            return self.ours[key]
        given = self.given.get(key)
        return self.defaults.get(key) if given is None else given.value

    def place(self, key: str) -> str:
        """Where a key was given; empty where upstream's default holds."""
        return self.given[key].place if key in self.given else ""

    def holds(self, condition: Condition) -> bool:
        """Whether every key of a condition has the value, one of the values, or one beyond the bound."""
        return all(matches(self.value(key), wanted) for key, wanted in condition.items())

    def required(self) -> dict[str, Any]:
        """What the stack asks for beside what is given, with values of its own where they are not given."""
        asked = [pair for one in self.table.required if self.holds(one.when) for pair in one.keys.items()]
        values = {key: value for key, value in asked if value == AS_IT_IS or key not in self.given}
        return {key: self.value(key) if value == AS_IT_IS else value for key, value in values.items()}

    def with_values(self, values: Mapping[str, Any]) -> "Settings":
        """The same with other values."""
        changed = {**self.given, **{key: Given(value, "a change") for key, value in values.items()}}
        return replace(self, given=changed, ours={})


def typed(text: str) -> Any:
    """A word of a command line as Hydra and YAML read it.

    >>> typed("True"), typed("1e-6"), typed("8"), typed("'a b'"), typed("null")
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


def flags_of(words: Iterable[tuple[str, str]]) -> Iterable[tuple[str, Any, str]]:
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


def _variable(text: str) -> str:
    """A way out by the name that a text lacks: a shell's variable, or a name of Python's where it is nothing else."""
    found = re.fullmatch(r"([A-Za-z_][\w.]*)", shown(text)) or re.search(r"\$\{?([A-Za-z_]\w*)", text)
    return f"--set {found.group(1)}=VALUE, or " if found else ""
