"""Measured errors by kind, as intervals: between which shares of a prediction nine of ten measurements lie.

In: points and what was predicted of them. Out: an ErrorInterval for each kind; those of the bundled points are kept in
data/errors_by_kind.json, so that who needs an interval need not predict a thousand points first.
Left out: what a plan makes of it.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from rlplan.accuracy.compare import Comparison, compare
from rlplan.accuracy.points import MeasuredPoint
from rlplan.records import dataclass
from rlplan.spec.base import read_json

NOMINAL = 0.9
WIDENINGS = tuple(1 + step / 10 for step in range(41))
"""By how much logarithms are stretched, until enough points of sources that were left out lie inside."""
FILE = "errors_by_kind.json"


@dataclass(frozen=True)
class ErrorInterval:
    """The measured errors of a kind."""

    num_points: int
    num_sources: int
    """Publications, or pairs of model and GPU of a latency table: what is left out at once."""
    low: float
    """Measured over predicted, of throughputs their seconds: a twentieth of the points is expected below."""
    high: float
    """And a twentieth above."""
    inside: float
    """Share of the points that lie inside."""
    inside_left_out: float
    """The same, each source's points with the interval that all others give."""


def error_intervals(points: Iterable[MeasuredPoint]) -> dict[str, ErrorInterval]:
    """An interval for each kind of points that has numbers, in the order of the first point."""
    points = tuple(points)
    found: dict[str, list[tuple[str, float]]] = {}
    for point, one in zip(points, compare(points).points, strict=True):
        if (ratio := _ratio(point, one)) is not None:
            found.setdefault(one.kind, []).append((_source(point, one), ratio))
    return {kind: _interval(errors) for kind, errors in found.items()}


def interval_of(errors: Iterable[float], widening: float = 1.0) -> tuple[float, float]:
    """Bounds of a ratio that holds 90 % of such errors, given as logarithms of measured over predicted.

    Counts: of n errors in order those at (n + 1)/20 from either end; with fewer than 19 the smallest and the largest.
    Stretched around 0 by the widening. Source: Vovk et al. 2005 (conformal prediction), both sides apart.

    >>> [round(bound, 2) for bound in interval_of([math.log(ratio / 100) for ratio in range(90, 111)])]
    [0.9, 1.1]
    """
    ordered = sorted(errors)
    from_end = max(0, math.floor((len(ordered) + 1) * (1 - NOMINAL) / 2) - 1)
    low, high = ordered[from_end], ordered[len(ordered) - 1 - from_end]
    return math.exp(min(0.0, low * widening)), math.exp(max(0.0, high * widening))


def _ratio(point: MeasuredPoint, one: Comparison) -> float | None:
    """The logarithm of measured over predicted, of rates that of seconds; None for verdicts, refusals and nothing."""
    error = one.relative_error
    if error is None or isinstance(one.measured, str | bool) or error <= -1 or isinstance(one.predicted, str):
        return None
    return math.log1p(error) if point.is_rate else -math.log1p(error)


def _source(point: MeasuredPoint, one: Comparison) -> str:
    """What is left out at once: a pair of model and GPU of a table of latencies, else a publication's page."""
    return one.pair if one.pair else f"{point.source.partition('#')[0]} {point.id.partition('-')[0]}"


def _interval(errors: list[tuple[str, float]]) -> ErrorInterval:
    """The narrowest stretch that holds nine of ten points of sources that were left out."""
    sources = Counter(source for source, _ in errors)
    by_point = len(sources) == 1
    groups = [str(number) if by_point else source for number, (source, _) in enumerate(errors)]
    values = [value for _, value in errors]
    stretch, left_out = 1.0, -1.0
    for wider in WIDENINGS:
        if left_out < NOMINAL and (share := _inside_left_out(groups, values, wider)) > left_out:
            stretch, left_out = wider, share
    low, high = interval_of(values, stretch)
    inside = sum(_lies(value, low, high) for value in values) / len(values)
    rounded = (round(number, 4) for number in (low, high, inside, left_out))
    return ErrorInterval(len(values), len(sources), *rounded)


def _inside_left_out(groups: list[str], values: list[float], stretch: float) -> float:
    inside = 0
    for group in dict.fromkeys(groups):
        others = [value for other, value in zip(groups, values, strict=True) if other != group]
        if not others:
            continue
        bounds = interval_of(others, stretch)
        inside += sum(_lies(value, *bounds) for own, value in zip(groups, values, strict=True) if own == group)
    return inside / len(values)


def _lies(value: float, low: float, high: float) -> bool:
    return low * (1 - 1e-9) <= math.exp(value) <= high * (1 + 1e-9)


@cache
def bundled_intervals() -> Mapping[str, ErrorInterval]:
    """Intervals of the bundled points by kind, as they were last written (`make accuracy`)."""
    kinds: dict[str, dict[str, Any]] = read_json(_kept(), "the kept intervals")["kinds"]
    return {kind: ErrorInterval(**row) for kind, row in kinds.items()}


def write_intervals(points: Iterable[MeasuredPoint]) -> Path:
    """Write what `bundled_intervals` reads."""
    path = _kept()
    kinds = {kind: asdict(found) for kind, found in error_intervals(points).items()}
    path.write_text(json.dumps({"nominal": NOMINAL, "kinds": kinds}, indent=1) + "\n")
    return path


def _kept() -> Path:
    return Path(str(resources.files("rlplan.accuracy"))) / "data" / FILE
