"""Seconds of the phases and lengths of the responses in a log of training steps of any stack.

In: JSONL (one row per step, nested or not), CSV with a header, verl's console lines
(`step:3 - timing_s/gen:41.2 - ...`), transformers' trainer_state.json; the meanings of the user's own fields. Out: a
MeasuredStep with medians over the steps. Left out: the job.

The first step compiles and warms up, so it is dropped where there are others.
"""

import csv
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rlplan.errors import SpecError, did_you_mean
from rlplan.planner.answers.measured_step import MeasuredStep
from rlplan.reading import read_text
from rlplan.spec.base import shorten_value
from rlplan.spec.files.yaml import parse_yaml
from rlplan.vocabulary import Phase

STEP = "step"
LENGTHS = ("mean_response_len", "longest_response_len", "cut_share", "mean_prompt_len")
MEANINGS = (STEP, *(phase.value for phase in Phase), *LENGTHS)
"""Meanings of a field: seconds of the step, seconds of a phase, or a length."""
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0}
"""Seconds of a unit of time."""
SUFFIXES = (".jsonl", ".csv", ".log", ".txt")
"""Suffixes of logs, beside the name trainer_state.json."""
MAX_LOG_BYTES = 64 << 20
MAX_FIELDS = 2_000
MAX_STEP_S = 1e6
OVERLAP = 1.2
"""Longest phase relative to its step: phases of async steps overlap. A longer one is in another unit."""
_VERL_LINE = re.compile(r"\bstep:\s*(\d+) - (.+)")
_PAIR = re.compile(r"([^\s:]+):\s*(?:np\.\w+\()?(-?\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf)\)?(?=\s|$)")
"""A name and a number. numpy 2 prints `np.float64(0.5)`; a version such as 0.9.1 is no number."""
_TIME_LIKE = re.compile(r"(time|timing|seconds|_s$|_ms$|duration|elapsed)", re.IGNORECASE)

Row = dict[str, float]


class Stack(NamedTuple):
    """The metric names of one stack."""

    name: str
    meanings: dict[str, str]
    """The meaning of each metric; several metrics of one meaning are added up."""
    instead: dict[str, str]
    """Metrics that are read only where another metric is missing, by name."""
    covers: dict[str, Phase]
    """Actions whose seconds are part of another phase's timer, and that phase."""


@cache
def load_stacks() -> tuple[Stack, ...]:
    """The stacks with known metric names (names.yaml)."""
    path = Path(__file__).with_name("names.yaml")
    table = parse_yaml(path.read_text("utf-8"), where=str(path), what="names of metrics")
    return tuple(
        Stack(
            name,
            {metric: meaning for meaning, metrics in facts["meanings"].items() for metric in metrics},
            facts.get("instead", {}),
            {action: Phase(phase) for action, phase in facts.get("covers", {}).items()},
        )
        for name, facts in table.items()
    )


def is_log(path: Path) -> bool:
    """Whether a file is a log by its name."""
    return path.suffix in SUFFIXES or path.name == "trainer_state.json"


def read_log(path: Path, fields: Sequence[str] = ()) -> MeasuredStep:
    """The median step of a log. fields: `rollout=my/gen_ms:ms` for names that no table has.

    Raises: SpecError for an empty log, one without a known field, fields without a unit, and impossible numbers.
    """
    own = dict(_parse_own_field(field) for field in fields)
    rows = [row for row in _read_rows(path) if row]
    if not rows:
        rule = "a row of numbers for each step; of a console (.log, .txt) verl's `step:3 - timing_s/gen:41.2 - ...`"
        raise _refuse(path, "the log has no rows", rule, "give the log of a run with steps")
    names = {name for row in rows for name in row}
    stack = max(load_stacks(), key=lambda candidate: sum(name in names for name in candidate.meanings))
    meanings = {
        name: (meaning, 1.0)
        for name, meaning in stack.meanings.items()
        if name in names and stack.instead.get(name) not in names
    }
    meanings |= _check_own_meanings(own, names, path)
    if not any(meaning not in LENGTHS for meaning, _ in meanings.values()):
        raise _refuse_unknown_fields(path, names)
    timed = [row for row in rows if any(name in row for name, (what, _) in meanings.items() if what not in LENGTHS)]
    medians = _compute_medians(timed[1:] if len(timed) > 1 else timed, meanings, path)
    if set(medians) <= set(LENGTHS):
        raise _refuse(path, "no step has a number of seconds", "numbers, not NaN", "give the log of a run with steps")
    _check_units(medians, path)
    unread = sorted(name for name in names - set(meanings) if _TIME_LIKE.search(name))
    return MeasuredStep(
        stack=stack.name if any(name in stack.meanings for name in meanings) else "own names",
        num_steps=len(timed),
        step_s=medians.get(STEP),
        phases={phase: medians[phase.value] for phase in Phase if phase.value in medians},
        lengths={name: medians[name] for name in LENGTHS if name in medians},
        covers=stack.covers,
        unread=tuple(unread),
    )


def _read_rows(path: Path) -> Iterator[Row]:
    text = read_text(path, "the log", limit=MAX_LOG_BYTES)
    if path.name == "trainer_state.json":
        yield from (_flatten_row(row) for row in _read_history(path, text))
    elif path.suffix == ".csv":
        yield from (_flatten_row(row) for row in csv.DictReader(text.splitlines()))
    elif path.suffix == ".jsonl":
        yield from (_flatten_row(row) for row in _read_json_rows(path, text))
    else:
        yield from _read_console_rows(text)


def _read_history(path: Path, text: str) -> list[Any]:
    try:
        history = json.loads(text)["log_history"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _refuse(
            path, "the trainer state has no log_history", "what transformers writes", "give the metrics as JSONL or CSV"
        ) from None
    return history if isinstance(history, list) else []


def _read_json_rows(path: Path, text: str) -> Iterator[Any]:
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    for number, line in lines:
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            if number == lines[-1][0]:  # a run that was killed leaves half a line
                return
            rule = "an object of metrics a line"
            raise _refuse(path, f"line {number} is no JSON", rule, "correct or remove that line") from None


def _read_console_rows(text: str) -> Iterator[Row]:
    for line in text.splitlines():
        if match := _VERL_LINE.search(line):
            yield {"step": float(match[1])} | {name: float(value) for name, value in _PAIR.findall(match[2])}


def _flatten_row(row: Any, prefix: str = "") -> Row:
    """Numbers by name; `data` and `metrics`, in which loggers wrap a row, leave no prefix."""
    numbers: Row = {}
    for key, value in list(row.items())[:MAX_FIELDS] if isinstance(row, Mapping) else ():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            numbers |= _flatten_row(value, "" if not prefix and key in ("data", "metrics") else f"{name}/")
        elif isinstance(value, str):
            number = _parse_number(value)
            numbers |= {} if number is None else {name: number}
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[name] = float(value)
    return numbers


def _parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _parse_own_field(text: str) -> tuple[str, tuple[str, float]]:
    """(name, (meaning, seconds of its unit)) of `rollout=my/gen_ms:ms`. Raises: SpecError."""
    meaning, _, rest = text.partition("=")
    name, _, unit = rest.rpartition(":") if meaning not in LENGTHS else (rest, "", "s")
    if meaning not in MEANINGS or not rest:
        raise SpecError(
            f"'{shorten_value(text)[1:-1]}' has no known meaning",
            where="command line: --field",
            rule=f"MEANING=NAME:UNIT; meanings: {', '.join(MEANINGS)}.{did_you_mean(meaning, MEANINGS)}",
            way_out="for example --field rollout=gen_ms:ms",
        )
    if unit not in UNITS or not name:
        raise SpecError(
            f"'{shorten_value(text)[1:-1]}' has no known unit",
            where="command line: --field",
            rule=f"seconds of a phase need a unit after the name: {', '.join(UNITS)}; lengths are tokens",
            way_out=f"--field {meaning}={name or rest}:s",
        )
    return name, (meaning, UNITS[unit])


def _check_own_meanings(
    own: Mapping[str, tuple[str, float]], names: set[str], path: Path
) -> Mapping[str, tuple[str, float]]:
    for name in own:
        if name not in names:
            raise _refuse(
                path,
                f"no row has the field '{shorten_value(name)[1:-1]}'",
                f"a field of the log.{did_you_mean(name, names)}",
                f"fields there: {', '.join(sorted(names)[:12])}",
            )
    return own


def _compute_medians(rows: Sequence[Row], meanings: Mapping[str, tuple[str, float]], path: Path) -> dict[str, float]:
    """The median over steps, by meaning, of the sum of its fields. Raises: SpecError for impossible numbers."""
    by_meaning: dict[str, list[float]] = {}
    for row in rows:
        sums: dict[str, float] = {}
        for name, (meaning, unit) in meanings.items():
            value = row.get(name)
            if value is None or math.isnan(value):
                continue
            most = 1.0 if meaning == "cut_share" else MAX_STEP_S / unit if meaning not in LENGTHS else float(1 << 30)
            if not 0 <= value <= most:
                rule = f"from 0 to {most:g}"
                raise _refuse(path, f"{name} is {value:g}", rule, "correct the log, or leave the row out")
            sums[meaning] = sums.get(meaning, 0.0) + value * unit
        for meaning, value in sums.items():
            by_meaning.setdefault(meaning, []).append(value)
    return {meaning: median(values) for meaning, values in by_meaning.items()}


def _check_units(medians: Mapping[str, float], path: Path) -> None:
    """Raises: SpecError for a phase that is longer than its step, which is in another unit."""
    step = medians.get(STEP)
    for phase in (Phase.ROLLOUT, Phase.TRAIN, Phase.SCORE, Phase.SYNC):
        seconds = medians.get(phase.value, 0.0)
        if step is not None and seconds > OVERLAP * step:
            raise _refuse(
                path,
                f"{phase} takes {seconds:g} s of a step of {step:g} s",
                "a phase is no longer than its step, so one of them has another unit",
                f"state its unit, as in --field {phase}=NAME:ms",
            )


def _refuse_unknown_fields(path: Path, names: set[str]) -> SpecError:
    known = [name for stack in load_stacks() for name in stack.meanings]
    timers = sorted(name for name in names if _TIME_LIKE.search(name))
    near = "".join(sorted({did_you_mean(name, known) for name in timers[:20]}))
    first = timers[0] if timers else "gen_time"
    return _refuse(
        path,
        f"none of {len(names)} fields is a known timer: {', '.join((timers or sorted(names))[:8])}",
        f"metrics of {', '.join(stack.name for stack in load_stacks())}.{near}",
        f"state the meaning and the unit of a field: --field rollout={first}:s",
    )


def _refuse(path: Path, what: str, rule: str, way_out: str) -> SpecError:
    return SpecError(what, where=str(path), rule=rule, way_out=way_out)
