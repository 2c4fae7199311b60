"""The limits of a number in a spec: what is allowed, and the allowed value that is nearest to one that is not.

In: a pydantic model, where a value stands in it, the value. Out: words and a number. Left out: limits that validators
of our own state (they say their rule themselves), lengths of texts and lists.
"""

from collections.abc import Iterator
from math import ceil, floor
from typing import Any

from pydantic import BaseModel

LIMIT_ERRORS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "multiple_of")
"""pydantic's types of errors about limits."""
SHARE = 0.01
"""How far the named value lies from a limit that is not allowed itself: of the range, else of the limit or of 1."""


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
