"""Points from a vLLM start-up log: the engine's own measurements, with the settings that it printed.

In: the text of a log of engine V0 or V1, the lines to look for (vllm_log.yaml). Out: points of the kinds that the
formulas predict. Left out: throughput lines, requests, errors.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlplan.accuracy.points import Measured, MeasuredPoint
from rlplan.errors import SpecError
from rlplan.spec.files.yaml import parse_yaml

MAX_LINE = 20_000
"""Characters of a line that are read: a configuration line has a few thousand."""

_FILE = Path(__file__).with_name("vllm_log.yaml")
_LINES: dict[str, Any] = parse_yaml(
    _FILE.read_text("utf-8").replace("SIZE", r"(\d+(?:\.\d+)?) ?(?:GiB|GB)"), where=str(_FILE), what="lines of a log"
)
_VERSION = re.compile(r"(?:version |LLM engine \(v)(\d+\.\d+(?:\.\d+)?)")
_ENGINE = re.compile(r"Initializing a (V\d) LLM engine|\b(V\d) LLM engine")
_ARGUMENTS = re.compile(r"non-default args: (\{.{0,8000}\})")
_CONFIG = re.compile(r"(?<![\w.])(\w+)=('[^']{0,300}'|[\w.+-]{1,80})")


def read_log_points(text: str, path: Path) -> tuple[MeasuredPoint, ...]:
    """The start-up measurements of a log. Raises: SpecError for a log without any."""
    lines = [line[:MAX_LINE] for line in text.splitlines()]
    settings = _read_settings(lines)
    model = settings.pop("model", None)
    points = [
        MeasuredPoint(
            id=f"{path.name}:{row['name']}",
            kind=row["kind"],
            model=model if isinstance(model, str) else None,
            settings=settings | more,
            measured=Measured(value=value, unit=row["unit"]),
            source="vLLM start-up log",
            reliability="A",
        )
        for row, value, more in _read_measurements(lines)
    ]
    if not points:
        raise SpecError(
            "no points are in it",
            where=str(path),
            rule="JSON points, a latency CSV, measured jobs in YAML, or a log with vLLM's start-up lines",
            way_out="give the log from the engine's first line on, such as `Available KV cache memory: 19.92 GiB`",
        )
    return tuple(points)


def _read_measurements(lines: list[str]) -> Iterator[tuple[dict[str, Any], float, dict[str, Any]]]:
    """(row of the table, value, further settings) of everything that the engine measured."""
    budget: dict[str, float] = {}
    for row in _LINES["measured"]:
        matches = _find_matches(row["text"], lines)
        if not matches or (row.get("with_cache") and not budget):
            continue
        values = [_parse_number(match.groups()[-1]) for match in matches]
        value = values[-1] if row["takes"] == "last" else max(values) if row["takes"] == "max" else min(values)
        more = {key: int(_parse_number(text)) for key, text in matches[-1].groupdict().items()}
        yield row, value, budget | more if row.get("with_cache") else {}
        if row["name"] == "kv_cache":
            budget = {"available_kv_gib": value}


def _read_settings(lines: list[str]) -> dict[str, Any]:
    """The engine's settings under the names of points; arguments win over the printed config."""
    settings: dict[str, Any] = {}
    for line in lines:
        if "LLM engine" in line or "with config:" in line:
            settings |= _rename(dict(_CONFIG.findall(line)), _LINES["config"])
        if match := _ARGUMENTS.search(line):
            settings |= _rename(_parse_literal(match.group(1)), _LINES["config"] | _LINES["arguments"])
    for row in _LINES["stated"]:
        if matches := _find_matches(row["text"], lines):
            settings.setdefault(row["key"], (int if row.get("is_count") else float)(matches[0].group(1)))
    settings["vllm"] = _read_version(lines)
    return settings


def _read_version(lines: list[str]) -> str:
    number = next((match.group(1) for line in lines if (match := _VERSION.search(line))), "")
    engine = next((match.group(1) or match.group(2) for line in lines if (match := _ENGINE.search(line))), "")
    if not engine and any("# GPU blocks" in line or "# cuda blocks" in line for line in lines):
        engine = "V0"
    return f"{number} {engine or ('V1' if not number else '')}".strip()


def _rename(values: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Settings under the names of points, as numbers, booleans and words; `None` and `auto` mean the default."""
    result = {}
    for key, name in names.items():
        value = values.get(key)
        if isinstance(value, str):
            value = value.strip("'").removeprefix("torch.")
            value = {"True": True, "False": False, "None": None, "auto": None}.get(value, value)
            if isinstance(value, str) and value.isdecimal() and len(value) < 16:
                value = int(value)
        if isinstance(value, bool | int | float | str):
            result[name] = value
    return result


def _parse_literal(text: str) -> dict[str, Any]:
    """A printed dict as data, literals only; empty for a broken one."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return {}
    return {key: item for key, item in value.items() if isinstance(key, str)} if isinstance(value, dict) else {}


def _find_matches(pattern: str, lines: list[str]) -> list[re.Match[str]]:
    """Matches of all lines whose groups are numbers of a sane length."""
    matches = (match for line in lines if (match := re.search(pattern, line)))
    return [match for match in matches if all(len(text) < 20 and text.strip(",") for text in match.groups())]


def _parse_number(text: str) -> float:
    return float(text.replace(",", ""))
