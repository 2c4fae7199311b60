"""Measured points: what was measured, where, under which settings, in which unit and by which statistic.

In: JSON (a list of points), a CSV of serving latencies, a vLLM start-up log, or the bundled files. Out: frozen points.
Left out: what the formulas say of them (compare.py).
"""

import csv
import io
import re
from enum import StrEnum
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from rlplan.errors import SpecError
from rlplan.spec.base import Spec, read_json, read_text, shorten, validate
from rlplan.units import GIB, KIB, MIB

MAX_FILE_BYTES = 64 << 20
"""Larger than any file of points or start-up log: beyond it nothing is read."""


class Statistic(StrEnum):
    """What a memory measurement counted. All but the last are of the whole process on one GPU at its peak.

    ALLOCATED: bytes of tensors. ACTIVE: tensors and what waits for a stream. RESERVED: what the caching allocator took
    from the driver. PROCESS: what the driver shows, with context and NCCL. MEAN_ALLOCATED: averaged over steps.
    """

    ALLOCATED = "allocated"
    ACTIVE = "active"
    RESERVED = "reserved"
    PROCESS = "process"
    UNSTATED = "unstated"
    MEAN_ALLOCATED = "mean_allocated"


class Lenient(Spec):
    """Frozen, and deaf to keys it does not know: other people's files have more of them."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class Measured(Lenient):
    """A value, or a range [low, high], and its unit in the source's own words."""

    value: float | str | tuple[float, float]
    unit: str = Field(min_length=1, max_length=200)

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Low and high, equal for a single number; None for a word such as `13b`."""
        if isinstance(self.value, str):
            return None
        return self.value if isinstance(self.value, tuple) else (self.value, self.value)

    @property
    def bytes_per_unit(self) -> int | None:
        """Bytes of one unit, None where the unit is no size. A `GB` is 1e9 bytes, as written.

        >>> Measured(value=1.0, unit="GiB/GPU").bytes_per_unit, Measured(value=1.0, unit="GB (1e9)").bytes_per_unit
        (1073741824, 1000000000)
        >>> Measured(value=1.0, unit="tokens").bytes_per_unit is None
        True
        """
        match = re.match(r"(GiB|MiB|KiB|GB|MB|bytes)\b", self.unit)
        return _BYTES[match.group(1)] if match else None

    @property
    def statistic(self) -> Statistic:
        """What was counted, from the words of the unit.

        >>> Measured(value=1.0, unit="GiB/GPU max reserved").statistic.value
        'reserved'
        """
        words = self.unit.lower()
        found = [statistic for key, statistic in _STATISTICS.items() if key in words]
        if Statistic.ALLOCATED in found and re.search(r"\b(average|avg|mean)\b", words):
            return Statistic.MEAN_ALLOCATED
        return found[0] if found else Statistic.UNSTATED


_BYTES = {"GiB": GIB, "MiB": MIB, "KiB": KIB, "GB": 10**9, "MB": 10**6, "bytes": 1}
_STATISTICS = {
    "reserved": Statistic.RESERVED,
    "active": Statistic.ACTIVE,
    "allocated": Statistic.ALLOCATED,
    "nvidia-smi": Statistic.PROCESS,
    "gpu memory": Statistic.PROCESS,
}


class MeasuredPoint(Lenient):
    """One measurement. settings: what it was made under, in the source's words; reliability: A best."""

    id: str = Field(min_length=1, max_length=300)
    kind: str = Field(min_length=1, max_length=100)
    model: str | None = None
    gpu: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    measured: Measured
    source: str = ""
    reliability: str = ""
    notes: str | None = None


class PointFile(Lenient):
    """The points of a file."""

    points: tuple[MeasuredPoint, ...]


@cache
def bundled_points() -> tuple[MeasuredPoint, ...]:
    """The points that come with rlplan: published measurements, then serving latencies."""
    folder = Path(str(resources.files("rlplan.accuracy"))) / "data"
    return read_points(folder / "measured_points.json") + read_points(folder / "serving_latency.csv")


def read_points(path: Path) -> tuple[MeasuredPoint, ...]:
    """Points of a file: JSON, a latency CSV, or a vLLM start-up log. Raises: SpecError where it is broken.

    The content decides where the name does not: JSON starts with a bracket, the CSV with a header row.
    """
    text = read_text(path, "the file of points", limit=MAX_FILE_BYTES)
    start = text.lstrip("\ufeff \t\r\n")[:1]
    if path.suffix.lower() == ".json" or (start in ("[", "{") and path.suffix.lower() not in (".csv", ".log", ".txt")):
        return _read_json_points(path)
    if path.suffix.lower() == ".csv" or text.lstrip("\ufeff").startswith("id,"):
        return tuple(_read_latencies(text.lstrip("\ufeff"), path))
    from rlplan.accuracy.logs import points_of_log

    return points_of_log(text, path)


def _read_json_points(path: Path) -> tuple[MeasuredPoint, ...]:
    data = read_json(path, "the file of points", limit=MAX_FILE_BYTES)
    listed = {"points": data} if isinstance(data, list) else data
    return validate(PointFile, listed, file=str(path), way_out=_WAY_OUT).points


_WAY_OUT = "each point has id, kind, model, gpu, settings and measured {value, unit}; see rlplan/accuracy/data/"
_LATENCIES = {"silicon_ttft_ms": "ttft", "silicon_tpot_ms": "tpot"}


def _read_latencies(text: str, path: Path) -> list[MeasuredPoint]:
    """Two points a row: `<id>:ttft` and `<id>:tpot`, in milliseconds. Raises: SpecError."""
    reader = csv.DictReader(io.StringIO(text), strict=True)
    points = []
    try:
        header = list(reader.fieldnames or ())
        missing = [name for name in ("id", "model_path", "system", *_LATENCIES) if name not in header]
        if missing:
            raise _broken_csv(f"column '{missing[0]}' is missing", path, 1)
        for line, row in enumerate(reader, start=2):
            if None in row or None in row.values() or not row["id"]:
                raise _broken_csv(f"a row has not the header's {len(header)} fields and an id", path, line)
            points += [_latency(row, column, path, line) for column in _LATENCIES]
    except csv.Error as error:
        raise _broken_csv(f"not CSV: {shorten(str(error))}", path, reader.line_num) from None
    return points


def _latency(row: dict[str, str], column: str, path: Path, line: int) -> MeasuredPoint:
    value = _number(row[column])
    if not isinstance(value, int | float) or not 0 < value < 1e12:
        raise _broken_csv(f"{column} is {shorten(row[column])}, not a number above 0", path, line)
    name = _LATENCIES[column]
    left_out = {"id", "model_path", "system", *_LATENCIES}
    return MeasuredPoint(
        id=f"{row['id']}:{name}",
        kind=f"serving_{name}",
        model=row["model_path"],
        gpu=row["system"],
        settings={key: _number(cell) for key, cell in row.items() if key not in left_out},
        measured=Measured(value=float(value), unit=f"ms {name.upper()}"),
        source=row.get("source") or "latency table",
        reliability="A",
    )


def _number(text: str) -> int | float | str:
    """A cell as a number where it is one.

    >>> _number("8"), _number("1.5"), _number("fp8")
    (8, 1.5, 'fp8')
    """
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _broken_csv(what: str, path: Path, line: int) -> SpecError:
    return SpecError(
        what,
        where=f"{path}: line {line}",
        rule=f"a header with id, model_path, system, {', '.join(_LATENCIES)} and settings; one configuration a row",
        way_out="repair the row, or give the points as JSON",
    )
