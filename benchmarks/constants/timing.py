"""Constants of training time that were fitted, each with the source that it was fitted to left out.

In: the bundled throughputs. Out: a table, printed: what a constant says of the sources that it was not fitted to,
beside the same without it. `python -m benchmarks.constants.timing`; minutes, no network.

A constant stays where it is better than none for points that it has not seen.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rlplan.accuracy.compare import compare
from rlplan.accuracy.files.reading import bundled_points
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.training import throughput
from rlplan.timing.training import elementwise, kernels, passes


@dataclass(frozen=True)
class Constant:
    """One constant, and how it is taken away or fitted elsewhere."""

    name: str
    places: tuple[tuple[Any, str], ...]
    """Modules that have it, and its name there."""
    none: float
    """The value that means nothing."""
    fits: dict[str, float]
    """Its value by what it was fitted to alone; `now` is the one that is in use."""
    seen: Callable[[MeasuredPoint, str], bool]
    """Whether a point belongs to what a value was fitted to."""
    concerns: Callable[[MeasuredPoint], bool]


def _is_prime(point: MeasuredPoint) -> bool:
    return point.id.startswith("primerl") and ("b200" not in point.id or "qwen3-4b" in point.id)


def _is_rl(point: MeasuredPoint) -> bool:
    return point.id.startswith("primerl") and "-rl-" in point.id and "b200" not in point.id


def _is_mixture_of_prime(point: MeasuredPoint) -> bool:
    names = ("30b-a3b", "intellect")
    return point.id.startswith("primerl") and "b200" not in point.id and any(name in point.id for name in names)


def _waits(point: MeasuredPoint) -> bool:
    names = ("qwen3", "deepseek", "nemotron3")
    return point.id.startswith("mb-") and any(name in point.id for name in names)


CONSTANTS = (
    Constant(
        "EXPERTS_LAUNCHED, s a layer",
        ((throughput, "EXPERTS_LAUNCHED"),),
        0.0,
        {"qwen330b": 8.7e-3, "deepseek": 13e-3, "now": 9e-3},
        lambda point, fitted: fitted in point.id,
        _waits,
    ),
    Constant(
        "LAYER_WAITS, s a layer",
        ((throughput, "LAYER_WAITS"),),
        0.0,
        {"qwen3-0.6b": 9e-3, "qwen3-4b": 12e-3, "now": 11e-3},
        lambda point, fitted: fitted in point.id,
        _is_prime,
    ),
    Constant(
        "BLACKWELL_EXPERTS, s a step",
        ((throughput, "BLACKWELL_EXPERTS"),),
        0.0,
        {"intellect": 45.0, "qwen3-235b": 38.0, "now": 39.0},
        lambda point, fitted: fitted in point.id,
        lambda point: point.id.startswith("primerl") and "b200" in point.id and "qwen3-4b" not in point.id,
    ),
    Constant(
        "RL_TOKEN, s",
        ((throughput, "RL_TOKEN"),),
        0.0,
        {"qwen3-0.6b": 19e-6, "qwen3-4b": 16e-6, "now": 18e-6},
        lambda point, fitted: fitted in point.id,
        _is_rl,
    ),
    Constant(
        "PAGEABLE, bytes a second",
        ((throughput, "PAGEABLE"),),
        1e30,
        {"qwen3-4b": 2.7e9, "qwen3-30b": 2.85e9, "now": 2.9e9},
        lambda point, fitted: fitted in point.id,
        lambda point: _is_rl(point) and "-full-" in point.id,
    ),
    Constant(
        "SCATTERED, bytes an element",
        ((elementwise, "SCATTERED"), (passes, "SCATTERED")),
        0.0,
        {"qwen3-30b-a3b": 90.0, "intellect": 40.0, "now": 60.0},
        lambda point, fitted: fitted in point.id,
        _is_mixture_of_prime,
    ),
    Constant(
        "LOST_ROWS, rows (measured operators)",
        ((kernels, "LOST_ROWS"),),
        0.0,
        {"now": 192.0},
        lambda point, fitted: False,
        _waits,
    ),
)
"""In the order of rlplan/accuracy/training/throughput.py and rlplan/timing/training."""


@contextmanager
def _set(constant: Constant, value: float) -> Iterator[None]:
    before = [getattr(module, name) for module, name in constant.places]
    for module, name in constant.places:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name), old in zip(constant.places, before, strict=True):
            setattr(module, name, old)


def mean_error(points: list[MeasuredPoint]) -> float:
    """Mean absolute relative error of throughputs, in per cent."""
    found = [point.relative_error for point in compare(points).points]
    return 100 * fmean(abs(error) for error in found if error is not None)


def main() -> int:
    """Print the table."""
    points = [point for point in bundled_points() if point.kind == "throughput_train"]
    print("| constant | fitted to | value | points not seen | mean error | without it |")
    print("| --- | --- | --- | --- | --- | --- |")
    for constant in CONSTANTS:
        for fitted, value in constant.fits.items():
            unseen = [point for point in points if constant.concerns(point) and not constant.seen(point, fitted)]
            with _set(constant, value):
                error = mean_error(unseen)
            with _set(constant, constant.none):
                without = mean_error(unseen)
            row = (constant.name, fitted, f"{value:g}", str(len(unseen)), f"{error:.1f} %", f"{without:.1f} %")
            print("| " + " | ".join(row) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
