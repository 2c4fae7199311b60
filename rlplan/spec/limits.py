"""What can be typed in place of a value that was refused: the nearest number, a word of those that are allowed.

In: pydantic's account of one wrong value, the model that it stands in. Out: words, and a number. Left out: misspelt
words (base.py says what is near), rules of validators of our own, which say them themselves, lengths of lists.
"""

import re
from collections.abc import Iterator
from math import ceil, floor
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

LIMIT_ERRORS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "multiple_of")
"""pydantic's types of errors about limits."""
SHARE = 0.01
"""How far the named value lies from a limit that is not allowed itself: of the range, else of the limit or of 1."""
LEAST_BYTES = 1 << 20
"""Lower limit of byte counts: a number below was meant in GiB."""
_BYTES = "a byte count"


class Limits:
    """What one number may be."""

    def __init__(self, is_whole: bool, found: list[Any]) -> None:
        self.is_whole = is_whole
        names = ("ge", "gt", "le", "lt", "multiple_of")
        said = {name: float(getattr(one, name)) for one in found for name in names if hasattr(one, name)}
        self.low, self.above, self.high, self.below, self.multiple = map(said.get, names)

    @property
    def words(self) -> str:
        """The range: `from 0 to below 1`, `1 or more`, `above 0`."""
        first = "" if self.above is None else f"above {_shown(self.above)}"
        last = "" if self.below is None else f"below {_shown(self.below)}"
        if self.high is not None:
            last = f"{_shown(self.high)} or less"
        if self.low is not None:
            first = f"{_shown(self.low)} or more"
            if last:
                first, last = "", f"from {_shown(self.low)} to {last.removesuffix(' or less')}"
        parts = [" and ".join(part for part in (first, last) if part)]
        if self.multiple is not None:
            parts.append(f"a multiple of {_shown(self.multiple)}")
        return ", ".join(part for part in parts if part)

    def nearest(self, value: float) -> str:
        """The allowed value that is nearest, as it is typed; of limits that are not allowed themselves one beside."""
        ends = [one for one in (self.low, self.above, self.high, self.below) if one is not None]
        size = max(ends) - min(ends) if len(ends) > 1 else max([1.0, *map(abs, ends)])
        step = 1.0 if self.is_whole else SHARE * size
        least = self.low if self.low is not None else None if self.above is None else self.above + step
        most = self.high if self.high is not None else None if self.below is None else self.below - step
        found = float(value)
        found = found if least is None else max(found, least)
        found = found if most is None else min(found, most)
        if self.multiple is not None:
            found = self.multiple * round(found / self.multiple)
            if least is not None and found < least:
                found = self.multiple * ceil(least / self.multiple)
            if most is not None and found > most:
                found = self.multiple * floor(most / self.multiple)
        return _shown(found)


def limits_at(kind: type[BaseModel], loc: tuple[int | str, ...]) -> Limits | None:
    """Of the number at a place in a model, as pydantic names places; None where none are found."""
    places: list[Any] = [kind]
    metadata: list[Any] = []
    for part in loc:
        models = [one for place in places for one in _models(place)]
        fields = [model.model_fields[part] for model in models if part in model.model_fields]
        if fields:
            places, metadata = (
                [field.annotation for field in fields],
                [one for field in fields for one in field.metadata],
            )
    found = [*_flat(metadata), *(one for place in places for one in _constraints(place))]
    return (
        Limits(any(_has(place, int) for place in places) and not any(_has(place, float) for place in places), found)
        if found
        else None
    )


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _models(part)


def _constraints(annotation: Any) -> Iterator[Any]:
    """What `Annotated` says inside an annotation, without going into models."""
    yield from _flat(getattr(annotation, "__metadata__", ()))
    for part in getattr(annotation, "__args__", ()):
        yield from _constraints(part)


def _flat(metadata: Any) -> Iterator[Any]:
    for one in metadata:
        yield from getattr(one, "metadata", None) or [one]


def _has(annotation: Any, kind: type) -> bool:
    return annotation is kind or any(_has(part, kind) for part in getattr(annotation, "__args__", ()))


def _shown(value: float) -> str:
    """As it is typed: whole numbers without a point."""
    return str(int(value)) if value == int(value) else f"{value:.10g}"


def way_out_of(kind: type[BaseModel], error: ErrorDetails, path: str) -> str:
    """What to write instead; where the rule says all that is known, where more about the key stands."""
    written = "" if re.search(r"\.\d", path) else f"{path}="
    found = _of_type(kind, error, path, written) or error.get("ctx", {}).get("way_out", "")
    return found or f"what the rule asks for; `rlplan docs {re.sub(r'[.][0-9].*', '', path)}` says more"


def _of_type(kind: type[BaseModel], error: ErrorDetails, path: str, written: str) -> str:
    limits, given = limits_at(kind, error["loc"]), error["input"]
    if _BYTES in error["msg"]:
        return _bytes(str(given), written)
    if error["type"] in LIMIT_ERRORS and limits is not None:
        nearest = limits.nearest(given)
        if limits.low == LEAST_BYTES:
            return f"that is bytes: for example {written}{f'{given}GiB' if given > 0 else '64MiB'}"
        return f"{limits.words}: for example {written}{nearest}"
    if error["type"] in ("int_type", "int_parsing", "int_from_float", "float_type", "float_parsing"):
        number = "a whole number" if error["type"].startswith("int") else "a number"
        if limits is None or not limits.words:
            return f"{number}, without a unit"
        nearest = limits.nearest(_without_suffix(str(given)))
        return f"{number}, {limits.words}" + (
            f": for example {written}{nearest}" if nearest != "0" else ", such as 1e-6"
        )
    if error["type"] in ("literal_error", "enum"):
        words = re.findall(r"'([^']*)'|(\d+)", str(error.get("ctx", {}).get("expected", "")))
        return f"one of these, such as {written}{''.join(words[0])}" if words else ""
    if error["type"] in ("bool_type", "bool_parsing"):
        return f"{written}true or {written}false"
    if error["type"] in ("model_type", "model_attributes_type"):
        return f"it is a part with keys of its own: {path}.KEY=VALUE; `rlplan docs {path}` has them"
    if error["type"] in ("tuple_type", "list_type"):
        return f"a list in brackets: '{written}[...]'"
    return f"{written}WORD" if error["type"] in ("string_type", "string_too_short") else ""


def _without_suffix(given: str) -> int:
    """What `16k` stands for in tokens: 16,384; 0 where it is nothing like it."""
    said = re.fullmatch(r"\s*(\d{1,6})\s*([km])\s*", given, re.IGNORECASE)
    return 0 if said is None else int(said[1]) << {"k": 10, "m": 20}[said[2].lower()]


def _bytes(given: str, written: str) -> str:
    """The same number in a unit that is known; else any number with one."""
    if given.isdigit():
        return f"that is bytes: for example {written}{given}GiB"
    if (said := re.fullmatch(r"\s*([\d.]+)\s*([kmgt])(i?)b?s?\s*", given, re.IGNORECASE)) is None:
        return f"a number with a unit, such as {written}64GiB"
    binary, decimal = (f"{said[1]}{said[2].upper()}{unit}" for unit in ("iB", "B"))
    return f"{written}{binary}" + ("" if said[3] else f", or {decimal} as on a data sheet")


def example_of(kind: type[BaseModel], error: ErrorDetails, path: str, tag: str, models_in: Any) -> str:
    """What is typed where a job lacks a part, of those that are often written as a word or a number."""
    if error["type"] not in ("model_type", "model_attributes_type", "union_tag_invalid"):
        return ""
    models: list[Any] = [kind]
    for part in error["loc"]:
        fields = models[0].model_fields if models else {}
        models = models_in(fields[part].annotation) if part in fields else []
    words = (model.EXAMPLE for model in models if model.EXAMPLE and f"kind: {tag}" * bool(tag) in model.EXAMPLE)
    return next((f"'{path}={one}'" for one in words), "")
