"""Constants that were fitted, each with the source that it was fitted to left out.

In: bundled throughputs, peaks, residuals, latencies. Out: a table: what a constant says of the sources that it was not
fitted to, beside the same without it. `python -m benchmarks.constants.trainers` prints it; seconds, no network.

A constant stays where it is better than none for points that it has not seen; a test holds each to it.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import Field

from rlplan.accuracy.compare import compare
from rlplan.accuracy.files.reading import bundled_points
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.predict import forget_plans
from rlplan.spec.base import Spec, validate
from rlplan.spec.files.yaml import read_yaml
from rlplan.timing.training import kernels


class Points(Spec):
    """The points that a constant concerns."""

    kind: str = ""
    begins: str = ""
    ids: tuple[str, ...] = ("",)
    every: tuple[str, ...] = ()
    settings: dict[str, Any] = Field(default={})

    def has(self, point: MeasuredPoint) -> bool:
        """Whether a point is one of them."""
        return (
            self.kind in ("", point.kind)
            and point.id.startswith(self.begins)
            and any(part in point.id for part in self.ids)
            and all(part in point.id for part in self.every)
            and all(point.settings.get(key) is value for key, value in self.settings.items())
        )


class Constant(Spec):
    """One constant, and how it is taken away or fitted elsewhere (fitted.yaml)."""

    name: str
    module: str
    none: float = 0.0
    fits: dict[str, float]
    unit: float = 1.0
    """Unit in which the constant's values are shown."""
    points: Points

    @property
    def attribute(self) -> str:
        """Its name in the module."""
        return re.split(r"[, ]", self.name)[0]

    def concerns(self, point: MeasuredPoint) -> bool:
        """Whether a point depends on it."""
        return self.points.has(point)

    def seen(self, point: MeasuredPoint, fitted: str) -> bool:
        """Whether a point belongs to what a value was fitted to."""
        return fitted != "now" and (fitted in point.id or f"vLLM {fitted}" in str(point.settings.get("framework")))


class _Constants(Spec):
    constants: tuple[Constant, ...]


FILE = Path(__file__).with_name("fitted.yaml")
CONSTANTS = validate(_Constants, {"constants": read_yaml(FILE, "fitted constants")}, file=FILE.name).constants


@dataclass(frozen=True)
class LeftOut:
    """Errors of one value of a constant on points that it was not fitted to."""

    constant: str
    fitted: str
    value: float
    num_points: int
    error: float
    """Mean absolute relative error, in per cent."""
    without: float
    """The same without the constant."""

    def cells(self) -> list[str]:
        """A row of the table."""
        numbers = (f"{self.value:g}", str(self.num_points), f"{self.error:.1f} %", f"{self.without:.1f} %")
        return [self.constant, self.fitted, *numbers]


HEAD = ("constant", "fitted to", "value", "points not seen", "mean error", "without it")


def _forget() -> None:
    """Plans and kernels that were found with another value."""
    forget_plans()
    kernels.choose_kernels.cache_clear()


@contextmanager
def set_constant(constant: Constant, value: float) -> Iterator[None]:
    """Replace a constant's value within the block."""
    module = import_module(constant.module)
    before = getattr(module, constant.attribute)
    setattr(module, constant.attribute, value)
    _forget()
    try:
        yield
    finally:
        _forget()
        setattr(module, constant.attribute, before)


def mean_error(points: list[MeasuredPoint]) -> float:
    """Mean absolute relative error, in per cent."""
    errors = [point.relative_error for point in compare(points).points]
    return 100 * fmean(abs(error) for error in errors if error is not None)


@cache
def left_out() -> tuple[LeftOut, ...]:
    """A row for each value of each constant."""
    rows = []
    for constant in CONSTANTS:
        concerned = [point for point in bundled_points() if constant.concerns(point)]
        for fitted, value in constant.fits.items():
            unseen = [point for point in concerned if not constant.seen(point, fitted)]
            with set_constant(constant, value):
                error = mean_error(unseen)
            with set_constant(constant, constant.none):
                without = mean_error(unseen)
            rows.append(LeftOut(constant.name, fitted, value / constant.unit, len(unseen), error, without))
    return tuple(rows)


def main() -> int:
    """Print the table."""
    for cells in (HEAD, ["---"] * len(HEAD), *(row.cells() for row in left_out())):
        print("| " + " | ".join(cells) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
