"""Which instances of one proof `make test` sees; the others are seen by `make nightly`."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def at_night(values: Iterable[Any], *, but: Collection[Any]) -> list[Any]:
    """All values as parameters of a test, each that is not among `but` marked as nightly; a tuple is several."""
    return [
        pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=() if one in but else pytest.mark.nightly)
        for one in values
    ]


def in_turn(places: Sequence[str], names: Iterable[str]) -> list[Any]:
    """All pairs of a place and a name: each name in one of the places, in turn, in the others at night."""
    return [
        pytest.param(place, name, marks=pytest.mark.nightly if (at + turn) % len(places) else ())
        for turn, place in enumerate(places)
        for at, name in enumerate(names)
    ]
