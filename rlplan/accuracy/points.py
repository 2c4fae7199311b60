"""Measured points: a value with its hardware, settings, unit and statistic.

In: checked values. Out: frozen points. Left out: files (reading.py), predictions (compare.py).
"""

import re
from enum import StrEnum
from typing import Any

from pydantic import ConfigDict, Field, StrictBool

from rlplan.spec.base import Spec
from rlplan.units import GIB, KIB, MIB


class Statistic(StrEnum):
    """The quantity that a memory measurement counts. All but the last are peaks of a process on one GPU.

    ALLOCATED: bytes of tensors. ACTIVE: tensors, and blocks that wait for a stream. RESERVED: memory that the caching
    allocator took from the driver. PROCESS: the driver's number, with context and NCCL. MEAN_ALLOCATED: mean of steps.
    """

    ALLOCATED = "allocated"
    ACTIVE = "active"
    RESERVED = "reserved"
    PROCESS = "process"
    UNSTATED = "unstated"
    MEAN_ALLOCATED = "mean_allocated"


class Lenient(Spec):
    """Frozen, and without an error for unknown keys: published files have more keys than are read."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class Measured(Lenient):
    """A value or a range [low, high] with its unit in the source's words; a boolean for a run that worked or failed."""

    value: StrictBool | float | str | tuple[float, float]
    unit: str = Field(min_length=1, max_length=200)

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Low and high, equal for a single number; None for a word such as `13b`, and for a boolean."""
        if isinstance(self.value, str | bool):
            return None
        return self.value if isinstance(self.value, tuple) else (self.value, self.value)

    @property
    def bytes_per_unit(self) -> int | None:
        """Bytes of one unit; None for a unit that is no size. A `GB` is 1e9 bytes.

        >>> Measured(value=1.0, unit="GiB/GPU").bytes_per_unit, Measured(value=1.0, unit="GB (1e9)").bytes_per_unit
        (1073741824, 1000000000)
        >>> Measured(value=1.0, unit="tokens").bytes_per_unit is None
        True
        """
        match = re.match(r"(GiB|MiB|KiB|GB|MB|bytes)\b", self.unit)
        return _BYTES[match.group(1)] if match else None

    @property
    def statistic(self) -> Statistic:
        """The counted quantity, from the words of the unit.

        >>> Measured(value=1.0, unit="GiB/GPU max reserved").statistic.value
        'reserved'
        """
        words = self.unit.lower()
        statistics = [statistic for key, statistic in _STATISTICS.items() if key in words]
        if Statistic.ALLOCATED in statistics and re.search(r"\b(average|avg|mean)\b", words):
            return Statistic.MEAN_ALLOCATED
        return statistics[0] if statistics else Statistic.UNSTATED


_BYTES = {"GiB": GIB, "MiB": MIB, "KiB": KIB, "GB": 10**9, "MB": 10**6, "bytes": 1}
_STATISTICS = {
    "reserved": Statistic.RESERVED,
    "active": Statistic.ACTIVE,
    "allocated": Statistic.ALLOCATED,
    "nvidia-smi": Statistic.PROCESS,
    "nvml": Statistic.PROCESS,
    "device used": Statistic.PROCESS,
    "gpu memory": Statistic.PROCESS,
}


class MeasuredPoint(Lenient):
    """One measurement. Further keys are kept and count as settings (settings_read.py)."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    id: str = Field(min_length=1, max_length=300)
    kind: str = Field(min_length=1, max_length=100)
    model: str | None = None
    gpu: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the run in the source's words."""
    measured: Measured
    source: str = ""
    reliability: str = ""
    """Grade of the settings: A is complete, C is guessed."""
    notes: str | None = None

    @property
    def quantity(self) -> str:
        """The kind; for a measured phase or worker, the kind of that phase or worker.

        >>> measured, of = {"value": 1, "unit": "s"}, {"of": "step"}
        >>> MeasuredPoint(id="a", kind="phase_time", settings=of, measured=measured).quantity
        'rl_step_time'
        """
        of = str(self.settings.get("of"))
        if self.kind == "phase_time":
            return {"step": "rl_step_time", "refit": "phase_refit"}.get(of, f"phase_{of}")
        if self.kind == "role_peak":
            return "train_peak" if of == "policy_trainer" else f"peak_{of}"
        return self.kind

    @property
    def is_rate(self) -> bool:
        """Whether a larger value is faster, as for a throughput in units other than time.

        >>> units = ("tokens/s/GPU", "samples/s", "MFU", "s/iteration", "ms TPOT")
        >>> [MeasuredPoint(id="a", kind="throughput_train", measured={"value": 1, "unit": x}).is_rate for x in units]
        [True, True, True, False, False]
        """
        return self.kind.startswith("throughput_") and not re.match(
            r"(m?s|secs?|seconds?)\b", self.measured.unit.lower()
        )


class PointFile(Lenient):
    """The points of a file."""

    points: tuple[MeasuredPoint, ...]
