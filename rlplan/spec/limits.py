"""Suggestions in place of a refused value: the nearest allowed number, or an allowed word.

In: pydantic's error about one value, and the model that holds it. Out: words, and a number. Left out: misspelled words
(base.py suggests similar ones); rules of our own validators, whose messages have suggestions; lengths of lists.
"""

import re
from collections.abc import Iterator
from math import ceil, floor
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

LIMIT_ERRORS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "multiple_of")
"""Pydantic's error types about limits."""
SHARE = 0.01
"""Distance of a suggested value from an exclusive limit, as a fraction of the range, else of the limit or of 1."""
LEAST_BYTES = 1 << 20
"""Lower limit of byte counts: a smaller number was meant in GiB."""
_BYTES = "a byte count"


class Limits:
    """The allowed values of one number."""

    def __init__(self, is_whole: bool, constraints: list[Any]) -> None:
        self.is_whole = is_whole
        names = ("ge", "gt", "le", "lt", "multiple_of")
        bounds = {
            name: float(getattr(constraint, name))
            for constraint in constraints
            for name in names
            if hasattr(constraint, name)
        }
        self.low, self.above, self.high, self.below, self.multiple = map(bounds.get, names)

    @property
    def words(self) -> str:
        """The range in words: `from 0 to below 1`, `1 or more`, `above 0`."""
        first = "" if self.above is None else f"above {_format_number(self.above)}"
        last = "" if self.below is None else f"below {_format_number(self.below)}"
        if self.high is not None:
            last = f"{_format_number(self.high)} or less"
        if self.low is not None:
            first = f"{_format_number(self.low)} or more"
            if last:
                first, last = "", f"from {_format_number(self.low)} to {last.removesuffix(' or less')}"
        parts = [" and ".join(part for part in (first, last) if part)]
        if self.multiple is not None:
            parts.append(f"a multiple of {_format_number(self.multiple)}")
        return ", ".join(part for part in parts if part)

    def nearest(self, value: float) -> str:
        """The nearest allowed value as typed on a command line; for an exclusive limit, a value just inside it."""
        ends = [end for end in (self.low, self.above, self.high, self.below) if end is not None]
        size = max(ends) - min(ends) if len(ends) > 1 else max([1.0, *map(abs, ends)])
        step = 1.0 if self.is_whole else SHARE * size
        least = self.low if self.low is not None else None if self.above is None else self.above + step
        most = self.high if self.high is not None else None if self.below is None else self.below - step
        nearest = float(value)
        nearest = nearest if least is None else max(nearest, least)
        nearest = nearest if most is None else min(nearest, most)
        if self.multiple is not None:
            nearest = self.multiple * round(nearest / self.multiple)
            if least is not None and nearest < least:
                nearest = self.multiple * ceil(least / self.multiple)
            if most is not None and nearest > most:
                nearest = self.multiple * floor(most / self.multiple)
        return _format_number(nearest)


def find_limits(kind: type[BaseModel], loc: tuple[int | str, ...]) -> Limits | None:
    """The limits of the number at a place in a model, given as pydantic's `loc`; None if it has none."""
    places: list[Any] = [kind]
    metadata: list[Any] = []
    for part in loc:
        models = [model for place in places for model in list_models(place)]
        fields = [model.model_fields[part] for model in models if part in model.model_fields]
        if fields:
            places, metadata = (
                [field.annotation for field in fields],
                [mark for field in fields for mark in field.metadata],
            )
    constraints = [*_flat(metadata), *(mark for place in places for mark in _constraints(place))]
    if not constraints:
        return None
    is_whole = any(_has(place, int) for place in places) and not any(_has(place, float) for place in places)
    return Limits(is_whole, constraints)


def list_models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models in an annotation, such as the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from list_models(part)


def _constraints(annotation: Any) -> Iterator[Any]:
    """The constraints of `Annotated` types inside an annotation, models excluded."""
    yield from _flat(getattr(annotation, "__metadata__", ()))
    for part in getattr(annotation, "__args__", ()):
        yield from _constraints(part)


def _flat(metadata: Any) -> Iterator[Any]:
    for mark in metadata:
        yield from getattr(mark, "metadata", None) or [mark]


def _has(annotation: Any, kind: type) -> bool:
    return annotation is kind or any(_has(part, kind) for part in getattr(annotation, "__args__", ()))


def _format_number(value: float) -> str:
    """A number as typed: integers without a decimal point."""
    return str(int(value)) if value == int(value) else f"{value:.10g}"


def suggest_value(kind: type[BaseModel], error: ErrorDetails, path: str) -> str:
    """A value to write instead; if the rule is all that is known, a pointer to the key's documentation."""
    written = "" if re.search(r"\.\d", path) else f"{path}="
    suggestion = _suggest_by_type(kind, error, path, written) or error.get("ctx", {}).get("way_out", "")
    return suggestion or f"a value that meets the rule; see `rlplan docs {re.sub(r'[.][0-9].*', '', path)}`"


def _suggest_by_type(kind: type[BaseModel], error: ErrorDetails, path: str, written: str) -> str:
    limits, value = find_limits(kind, error["loc"]), error["input"]
    if _BYTES in error["msg"]:
        return _suggest_bytes(str(value), written)
    if error["type"] in LIMIT_ERRORS and limits is not None:
        nearest = limits.nearest(value)
        if limits.low == LEAST_BYTES:
            return f"that is bytes: for example {written}{f'{value}GiB' if value > 0 else '64MiB'}"
        return f"{limits.words}: for example {written}{nearest}"
    if error["type"] in ("int_type", "int_parsing", "int_from_float", "float_type", "float_parsing"):
        number = "a whole number" if error["type"].startswith("int") else "a number"
        if limits is None or not limits.words:
            return f"{number}, without a unit"
        nearest = limits.nearest(_parse_suffix(str(value)))
        return f"{number}, {limits.words}" + (
            f": for example {written}{nearest}" if nearest != "0" else ", such as 1e-6"
        )
    if error["type"] in ("literal_error", "enum"):
        words = re.findall(r"'([^']*)'|(\d+)", str(error.get("ctx", {}).get("expected", "")))
        return f"one of these, such as {written}{''.join(words[0])}" if words else ""
    if error["type"] in ("bool_type", "bool_parsing"):
        return f"{written}true or {written}false"
    if error["type"] in ("model_type", "model_attributes_type"):
        return f"set its keys: {path}.KEY=VALUE; `rlplan docs {path}` lists them"
    if error["type"] in ("tuple_type", "list_type"):
        return f"a list in brackets: '{written}[...]'"
    return f"{written}WORD" if error["type"] in ("string_type", "string_too_short") else ""


def _parse_suffix(text: str) -> int:
    """The number of tokens that `16k` means, 16,384; 0 for other text."""
    match = re.fullmatch(r"\s*(\d{1,6})\s*([km])\s*", text, re.IGNORECASE)
    return 0 if match is None else int(match[1]) << {"k": 10, "m": 20}[match[2].lower()]


def _suggest_bytes(text: str, written: str) -> str:
    """The same number in a known unit, else an example with a unit."""
    if text.isdigit():
        return f"that is bytes: for example {written}{text}GiB"
    if (match := re.fullmatch(r"\s*([\d.]+)\s*([kmgt])(i?)b?s?\s*", text, re.IGNORECASE)) is None:
        return f"a number with a unit, such as {written}64GiB"
    binary, decimal = (f"{match[1]}{match[2].upper()}{unit}" for unit in ("iB", "B"))
    return f"{written}{binary}" + ("" if match[3] else f", or {decimal} as on a data sheet")


def suggest_example(kind: type[BaseModel], error: ErrorDetails, path: str, tag: str) -> str:
    """An example for a missing part, if the part is often written as a word or a number."""
    if error["type"] not in ("model_type", "model_attributes_type", "union_tag_invalid"):
        return ""
    models: list[Any] = [kind]
    for part in error["loc"]:
        fields = models[0].model_fields if models else {}
        models = [*list_models(fields[part].annotation)] if part in fields else []
    words = (model.EXAMPLE for model in models if model.EXAMPLE and f"kind: {tag}" * bool(tag) in model.EXAMPLE)
    return next((f"'{path}={word}'" for word in words), "")
