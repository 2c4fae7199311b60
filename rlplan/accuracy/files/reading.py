"""Reading of measured points: JSON, CSV latencies, measured jobs in YAML, vLLM start-up logs.

In: a path; the content decides where the suffix does not. Out: points. Left out: predictions.
"""

import csv
import io
from functools import cache
from importlib import resources
from pathlib import Path

from rlplan.accuracy.files.logs import read_log_points
from rlplan.accuracy.files.measured_jobs import read_job_points
from rlplan.accuracy.points import Measured, MeasuredPoint, PointFile
from rlplan.containment import measure_budget, read_contained
from rlplan.errors import SpecError
from rlplan.reading import read_text
from rlplan.spec.base import read_json, shorten_value, validate

MAX_FILE_BYTES = 64 << 20
"""Larger than any file of points or start-up log; a larger file is refused."""
MAX_ID = 280
Points = tuple[MeasuredPoint, ...]
MAX_POINTS = 5_000
"""Points of a file. Each is predicted; rlplan itself has some 900."""


@cache
def bundled_points() -> tuple[MeasuredPoint, ...]:
    """The points in the package: published measurements, serving latencies, measured jobs."""
    package = Path(str(resources.files("rlplan.accuracy")))
    folder, jobs = package / "data", sorted((package / "points").glob("*.yaml"))
    names = ("measured_points.json", "trainer_points.json", "throughput_points.json", "serving_latency.csv")
    return tuple(point for path in (*(folder / name for name in names), *jobs) for point in _read_any_points(path))


@cache
def published_points() -> tuple[MeasuredPoint, ...]:
    """The bundled points, and points that were collected after the formulas were fixed, from sources new to them."""
    later = Path(str(resources.files("rlplan.accuracy"))) / "points" / "later"
    return (*bundled_points(), *(point for path in sorted(later.iterdir()) for point in _read_any_points(path)))


def read_points(path: Path) -> tuple[MeasuredPoint, ...]:
    """The points of a user's file, which is read in a limited process. Raises: SpecError for a broken file, or one with
    too many points.
    """
    budget = measure_budget(path)
    points = read_contained(lambda: _read_any_points(path), path, Points, budget)
    if len(points) > MAX_POINTS:
        raise SpecError(
            f"{len(points)} points are in it",
            where=str(path),
            rule=f"at most {MAX_POINTS} points are compared at once",
            way_out="split the file",
        )
    return points


def _read_any_points(path: Path) -> tuple[MeasuredPoint, ...]:
    text = read_text(path, "the file of points", limit=MAX_FILE_BYTES)
    # spreadsheets write a byte order mark before the text
    start, suffix = text.lstrip("\ufeff \t\r\n")[:1], path.suffix.lower()
    if suffix == ".json" or (start in ("[", "{") and suffix not in (".csv", ".log", ".txt")):
        return _read_json_points(path)
    if suffix in (".yaml", ".yml"):
        return read_job_points(text, path)
    if suffix == ".csv" or text.lstrip("\ufeff").startswith("id,"):
        return tuple(_read_latencies(text.lstrip("\ufeff"), path))
    return read_log_points(text, path)


def _read_json_points(path: Path) -> tuple[MeasuredPoint, ...]:
    data = read_json(path, "the file of points", limit=MAX_FILE_BYTES)
    listed = {"points": data} if isinstance(data, list) else data
    return validate(PointFile, listed, file=str(path), way_out=_WAY_OUT).points


_WAY_OUT = "each point has id, kind, model, gpu, settings and measured {value, unit}; see rlplan/accuracy/data/"
_LATENCIES = {"silicon_ttft_ms": "ttft", "silicon_tpot_ms": "tpot"}


def _read_latencies(text: str, path: Path) -> list[MeasuredPoint]:
    """Two points per row, `<id>:ttft` and `<id>:tpot`, in milliseconds. Raises: SpecError."""
    reader = csv.DictReader(io.StringIO(text), strict=True)
    points = []
    try:
        header = list(reader.fieldnames or ())
        missing = [name for name in ("id", "model_path", "system", *_LATENCIES) if name not in header]
        if missing:
            raise _refuse_csv(f"column '{missing[0]}' is missing", path, 1)
        for line, row in enumerate(reader, start=2):
            if None in row or None in row.values() or not row["id"]:
                raise _refuse_csv(f"a row has not the header's {len(header)} fields and an id", path, line)
            points += [_make_latency(row, column, path, line) for column in _LATENCIES]
    except csv.Error as error:
        raise _refuse_csv(f"not CSV: {shorten_value(str(error))}", path, reader.line_num) from None
    return points


def _make_latency(row: dict[str, str], column: str, path: Path, line: int) -> MeasuredPoint:
    value = _parse_number(row[column])
    if not isinstance(value, int | float) or not 0 < value < 1e12:
        raise _refuse_csv(f"{column} is {shorten_value(row[column])}, not a number above 0", path, line)
    name = _LATENCIES[column]
    left_out = {"id", "model_path", "system", *_LATENCIES}
    if len(row["id"]) > MAX_ID:
        raise _refuse_csv(f"an id of {len(row['id'])} characters, more than {MAX_ID}", path, line)
    return MeasuredPoint(
        id=f"{row['id']}:{name}",
        kind=f"serving_{name}",
        model=row["model_path"],
        gpu=row["system"],
        settings={key: _parse_number(cell) for key, cell in row.items() if key not in left_out},
        measured=Measured(value=float(value), unit=f"ms {name.upper()}"),
        source=row.get("source") or "latency table",
        reliability="A",
    )


def _parse_number(text: str) -> int | float | str:
    """The number in a cell; the text for any other cell.

    >>> _parse_number("8"), _parse_number("1.5"), _parse_number("fp8")
    (8, 1.5, 'fp8')
    """
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _refuse_csv(what: str, path: Path, line: int) -> SpecError:
    return SpecError(
        what,
        where=f"{path}: line {line}",
        rule=f"a header with id, model_path, system, {', '.join(_LATENCIES)} and settings; one configuration a row",
        way_out="repair the row, or give the points as JSON",
    )
