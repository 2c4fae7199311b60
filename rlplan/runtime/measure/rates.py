"""Rates: the samples of a benchmark as a median with its spread, and all rates of a machine.

In: a call to time, or seconds. Out: Rates. Left out: the benchmarks themselves (microbench.py).
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from rlplan.runtime.device.layer import device_of

MIN_SAMPLES, MAX_SAMPLES = 3, 50


@dataclass(frozen=True, slots=True)
class Rate:
    name: str
    """Name of the benchmark, such as `memory_copy`."""

    value: float
    """The median, in `unit`."""

    low: float
    """The lower quartile of the samples; the smallest of fewer than four."""

    high: float
    """The upper quartile of the samples; the largest of fewer than four."""

    unit: str
    """`FLOP/s`, `B/s` or `s`."""

    num_samples: int
    what: str
    """Size of the benchmark, for people."""

    @property
    def spread(self) -> float:
        return (self.high - self.low) / self.value


@dataclass(frozen=True)
class Measured:
    device: str
    """`cpu` or `cuda`."""

    processor: str
    num_cores: int
    """CPU cores that this process may use."""

    memory_bytes: int
    """Host memory that this process may use."""

    torch_version: str
    measurements: tuple[Rate, ...]
    remarks: tuple[str, ...] = ()
    """Benchmarks that were skipped, with the reason."""

    def find(self, name: str) -> Rate | None:
        """Find the measurement with that name; None if it was skipped."""
        return next((measurement for measurement in self.measurements if measurement.name == name), None)

    def as_json(self) -> dict[str, Any]:
        return {"schema_version": 1} | asdict(self)


def sample(call: Callable[[], object], seconds: float, *, warm_ups: int = 1, device: str = "cpu") -> list[float]:
    """Time several calls, each until the GPU is done: at least MIN_SAMPLES, then until `seconds` are over."""

    def finish() -> None:
        call()
        if accelerator := device_of(torch.device(device)):
            accelerator.finish()

    for _ in range(warm_ups):
        finish()
    taken: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(taken) < MIN_SAMPLES or (len(taken) < MAX_SAMPLES and time.perf_counter() < deadline):
        start = time.perf_counter()
        finish()
        taken.append(max(time.perf_counter() - start, 1e-9))
    return taken


def rate(name: str, amount: float, seconds: list[float], unit: str, what: str) -> Rate:
    """Divide `amount` by the median of the seconds.

    >>> rate("copy", 8.0, [1.0, 2.0, 4.0], "B/s", "").value
    4.0
    """
    low, high = quartiles(seconds)
    return Rate(name, amount / median(seconds), amount / high, amount / low, unit, len(seconds), what)


def duration(name: str, seconds: list[float], what: str) -> Rate:
    """Take the median of the seconds themselves."""
    return Rate(name, median(seconds), *quartiles(seconds), "s", len(seconds), what)


def quartiles(values: list[float]) -> tuple[float, float]:
    """Compute the lower and upper quartile; of fewer than four values, the smallest and the largest.

    >>> quartiles([5.0, 1.0, 2.0, 3.0, 4.0])
    (2.0, 4.0)
    """
    ordered = sorted(values)
    cut = len(ordered) // 4
    return ordered[cut], ordered[-1 - cut]
