"""Selection of the instances of a proof that `make test` runs; `make nightly` runs the others."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings


def examples(count: int) -> settings:
    """So many examples of a property at night, and a fifth of them before (the profiles in tests/conftest.py)."""
    return settings(max_examples=max(1, count * settings().max_examples // 100))


def mark_nightly(values: Iterable[Any], *, but: Collection[Any] | int) -> list[Any]:
    """All values as parameters of a test, each that is not among `but`, or its first so many, marked as nightly.

    A tuple is several arguments.
    """
    values = list(values)
    kept = values[:but] if isinstance(but, int) else but
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in kept else pytest.mark.nightly)
        for case in values
    ]


def rotate_places(places: Sequence[str], names: Iterable[str]) -> list[Any]:
    """All pairs of a place and a name: each name in one of the places, in turn, in the others at night."""
    return [
        pytest.param(place, name, marks=pytest.mark.nightly if (at + turn) % len(places) else ())
        for turn, place in enumerate(places)
        for at, name in enumerate(names)
    ]
