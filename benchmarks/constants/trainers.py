"""Constants that were fitted, each with the source that it was fitted to left out.

In: bundled throughputs, peaks, residuals, latencies. Out: a table: what a constant says of the sources that it was not
fitted to, beside the same without it. `python -m benchmarks.constants.trainers` prints it; seconds, no network.

A constant stays where it is better than none for points that it has not seen; a test holds each to it.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

from rlplan.accuracy.compare import compare
from rlplan.accuracy.files.reading import bundled_points
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.predict import forget_plans
from rlplan.memory.roles import engine
from rlplan.timing.serving import step
from rlplan.timing.training import kernels
from rlplan.units import MIB


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
    unit: float = 1.0
    """Unit in which the constant's values are shown."""


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


def _is_throughput(point: MeasuredPoint) -> bool:
    return point.kind == "throughput_train"


def _has(point: MeasuredPoint, names: tuple[str, ...]) -> bool:
    return any(name in point.id for name in names)


def _waits(point: MeasuredPoint) -> bool:
    names = ("qwen3", "deepseek", "nemotron3")
    return _is_throughput(point) and point.id.startswith("mb-") and _has(point, names)


def _has_default_router(point: MeasuredPoint) -> bool:
    return _is_throughput(point) and point.settings.get("moe_router_fusion") is False


def _is_asleep_with_triton(point: MeasuredPoint) -> bool:
    return point.kind == "sleeping_engine_residual" and ("gemma-4" in point.id or "olmoe" in point.id)


def _has_vllm(point: MeasuredPoint, version: str) -> bool:
    return f"vLLM {version}" in str(point.settings.get("framework"))


CONSTANTS = (
    Constant(
        "FUSED_EXPERTS_LAUNCHED, s a layer",
        ((kernels, "FUSED_EXPERTS_LAUNCHED"),),
        0.0,
        {"qwen330b": 8.7e-3, "deepseek": 13e-3, "now": 9e-3},
        lambda point, fitted: fitted in point.id,
        _waits,
    ),
    Constant(
        "EXPERTS_LAUNCHED, s a layer",
        ((kernels, "EXPERTS_LAUNCHED"),),
        0.0,
        {"g20": 13.5e-3, "q30": 14.5e-3, "now": 13e-3},
        lambda point, fitted: fitted in point.id,
        _has_default_router,
    ),
    Constant(
        "LAYER_LAUNCHED, s a layer",
        ((kernels, "LAYER_LAUNCHED"),),
        0.0,
        {"sft": 6.45e-3, "now": 6.5e-3},
        lambda point, fitted: fitted in point.id,
        lambda point: point.id.startswith("card-q8-"),
    ),
    Constant(
        "LOST_ROWS, rows (measured operators)",
        ((kernels, "LOST_ROWS"),),
        0.0,
        {"now": 192.0},
        lambda point, fitted: False,
        _waits,
    ),
    Constant(
        "COMPILED_KERNELS, MiB",
        ((engine, "COMPILED_KERNELS"),),
        0,
        {"0.26": 80 * MIB, "now": 80 * MIB},
        _has_vllm,
        _is_asleep_with_triton,
        unit=MIB,
    ),
    Constant(
        "SERIAL, s a step",
        ((step, "SERIAL"),),
        0.0,
        {"_tp2_": 0.8e-3, "_tp8_": 1.5e-3, "now": 1.3e-3},
        lambda point, fitted: fitted in point.id,
        lambda point: point.kind == "serving_tpot" and "qwen3_32b" in point.id and "_tp" in point.id,
    ),
    Constant(
        "SERIAL_SEQUENCE, s a sequence",
        ((step, "SERIAL_SEQUENCE"),),
        0.0,
        {"_tp2_": 34e-6, "_tp8_": 25e-6, "now": 34e-6},
        lambda point, fitted: fitted in point.id,
        lambda point: point.kind == "serving_tpot" and "qwen3_32b" in point.id and "_tp" in point.id,
    ),
    Constant(
        "SUSTAINED (measured steps of B300)",
        ((step, "SUSTAINED"),),
        1.0,
        {"now": 1.15},
        lambda point, fitted: False,
        lambda point: point.kind == "serving_ttft" and "_8192x1024_" in point.id and "b200" in point.id,
    ),
    Constant(
        "LAUNCH, s a layer",
        ((step, "LAUNCH"),),
        0.0,
        {"llama_3_1_70b": 0.5e-3, "now": 0.5e-3},
        lambda point, fitted: fitted in point.id,
        lambda point: point.kind == "serving_ttft" and "_1024x" in point.id,
    ),
)
"""The fitted constants, in the order of training, of rlplan/memory/roles/engine.py and of rlplan/timing/serving."""


def _forget() -> None:
    """Plans and kernels that were found with another value."""
    forget_plans()
    kernels.choose_kernels.cache_clear()


@contextmanager
def set_constant(constant: Constant, value: float) -> Iterator[None]:
    """Replace a constant's value within the block."""
    before = [getattr(module, name) for module, name in constant.places]
    for module, name in constant.places:
        setattr(module, name, value)
    _forget()
    try:
        yield
    finally:
        _forget()
        for (module, name), old in zip(constant.places, before, strict=True):
            setattr(module, name, old)


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
