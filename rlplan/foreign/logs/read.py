"""Seconds of the phases and lengths of the responses in a log of training steps of any stack.

In: JSONL (one row per step, nested or not), CSV with a header, exports of W&B, console output (console.py),
transformers' trainer_state.json; the meanings of the user's own fields. Out: a MeasuredStep with medians over the
steps. Left out: the job.

The first step compiles and warms up, so it is dropped where there are others.
"""

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from rlplan.containment import measure_budget, read_contained
from rlplan.errors import SpecError, did_you_mean
from rlplan.foreign.logs.console import CLOCK_S, CLOCK_STEP, Row, flatten_row, read_console_rows
from rlplan.planner.answers.measured_step import MeasuredStep, OptimizerSteps
from rlplan.reading import check_values, read_text
from rlplan.spec.base import shorten_value
from rlplan.spec.files.yaml import parse_yaml
from rlplan.vocabulary import Phase

STEP = "step"
MEAN = "mean_response_len"
LENGTHS = (MEAN, "longest_response_len", "cut_share", "mean_prompt_len", "mean_seq_len")
MEANINGS = (STEP, *(phase.value for phase in Phase), *LENGTHS)
"""Meanings of a field: seconds of the step, seconds of a phase, or a length."""
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0}
"""Seconds of a unit of time."""
SUFFIXES = (".jsonl", ".csv", ".log", ".txt", ".out", ".err")
"""Suffixes of logs, beside the name trainer_state.json."""
MAX_LOG_BYTES = 64 << 20
MAX_STEP_S = 1e6
MAX_NAME = 160
"""Characters of a name in messages."""
OVERLAP = 1.2
"""Longest phase relative to its step: phases of async steps overlap. A longer one is in another unit."""
_TIME_LIKE = re.compile(r"(time|timing|seconds|_s$|_ms$|duration|elapsed)", re.IGNORECASE)
CLOCK = "clock"
"""The name, in `instead`, of step times by the run's clock."""
_RUN = " - "
"""Separator of a run's name and a metric in the columns of W&B's exports."""


class Stack(NamedTuple):
    """The metric names of one stack."""

    name: str
    meanings: dict[str, str]
    """The meaning of each metric; several metrics of one meaning are added up."""
    instead: dict[str, list[str]]
    """Metrics that are read only where all of other metrics are missing, by name."""
    covers: dict[str, Phase]
    """Actions whose seconds are part of another phase's timer, and that phase."""
    counts_optimizer_steps: bool
    """Whether a row is an optimizer step, of which a generation may feed several."""


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
            facts.get("counts_optimizer_steps", False),
        )
        for name, facts in table.items()
    )


def is_log(path: Path) -> bool:
    """Whether a file is a log by its name."""
    return path.suffix in SUFFIXES or path.name == "trainer_state.json"


def read_log(path: Path, fields: Sequence[str] = ()) -> MeasuredStep:
    """The median step of a log, which is read in a limited process. fields: `rollout=my/gen_ms:ms` for names that no
    table has.

    Raises: SpecError for an empty log, one without a known field, fields without a unit, and impossible numbers.
    """
    return read_contained(lambda: _read_step(path, fields), path, MeasuredStep, measure_budget(path))


def _read_step(path: Path, fields: Sequence[str]) -> MeasuredStep:
    own = dict(_parse_own_field(field) for field in fields)
    rows = _rename_fields([row for row in _read_rows(path) if row], path)
    if not rows:
        rule = "numbers for each step: JSONL, CSV, or the console of " + ", ".join(
            stack.name for stack in load_stacks()
        )
        what = "the log has neither rows nor an out-of-memory error"
        raise _refuse(path, what, rule, "give the log of a run with steps, or a traceback with its last line")
    names, clock_s = {name for row in rows for name in row}, _read_clock(rows)
    names |= set() if clock_s is None else {CLOCK}
    stack = max(load_stacks(), key=lambda candidate: sum(name in names for name in candidate.meanings))
    meanings = {
        name: (meaning, 1.0)
        for name, meaning in stack.meanings.items()
        if name in names and names.isdisjoint(stack.instead.get(name, ()))
    }
    meanings |= _check_own_meanings(own, names, path)
    if CLOCK_S not in names and all(meaning in LENGTHS for meaning, _ in meanings.values()):
        raise _refuse_unknown_fields(path, names)
    sums = [_sum_by_meaning(row, meanings, path) for row in rows]
    medians = {
        meaning: median(_drop_first([row[meaning] for row in sums if meaning in row]))
        for meaning in MEANINGS
        if any(meaning in row for row in sums)
    }
    if clock_s is not None:
        medians.setdefault(STEP, clock_s)
    if set(medians) <= set(LENGTHS):
        raise _refuse(path, "no step has a number of seconds", "numbers, not NaN", "give the log of a run with steps")
    _check_units(medians, path)
    unread = sorted(
        name[:MAX_NAME] for name in names - set(meanings) - {CLOCK_S, "_timestamp"} if _TIME_LIKE.search(name)
    )
    own_name = "progress bars" if not own else "own names"
    return MeasuredStep(
        stack=own_name if names.isdisjoint(stack.meanings) else stack.name,
        num_steps=max(sum(meaning in row for row in sums) for meaning in medians) or len(rows),
        step_s=medians.get(STEP),
        phases={phase: medians[phase.value] for phase in Phase if phase.value in medians},
        lengths={name: medians[name] for name in LENGTHS if name in medians},
        covers=stack.covers,
        unread=tuple(unread),
        optimizer_steps=_split_optimizer_steps(sums, medians) if stack.counts_optimizer_steps else None,
    )


def _drop_first(values: list[float]) -> list[float]:
    return values[1:] if len(values) > 1 else values


def _split_optimizer_steps(sums: Sequence[Mapping[str, float]], medians: Mapping[str, float]) -> OptimizerSteps:
    """The steps that generate, which alone have lengths, and those that train on rollouts of an earlier step."""
    timed = [row for row in sums if STEP in row]
    generating = [row[STEP] for row in timed if MEAN in row]
    buffered = [row[STEP] for row in timed if MEAN not in row]
    mean_s = fmean(_drop_first([row[STEP] for row in timed])) if timed else medians.get(STEP, 0.0)
    if not generating or not buffered:
        return OptimizerSteps(mean_s)
    per_generation = round(len(timed) / len(generating))
    return OptimizerSteps(mean_s, median(_drop_first(generating)), median(buffered), per_generation)


def _read_clock(rows: Sequence[Row]) -> float | None:
    """Mean seconds of a step by the run's clock, without the first step; None for fewer than two steps."""
    clock = [(row[CLOCK_STEP], row[CLOCK_S]) for row in rows if CLOCK_STEP in row and CLOCK_S in row]
    clock = [point for point in clock if point[0] >= 1]
    # a resumed run starts its clock anew
    gains = [(later[0] - former[0], later[1] - former[1]) for former, later in pairwise(clock)]
    gains = [(steps, seconds) for steps, seconds in gains if steps > 0 and seconds >= 0]
    steps = sum(steps for steps, _ in gains)
    return sum(seconds for _, seconds in gains) / steps if steps else None


def _rename_fields(rows: list[Row], path: Path) -> list[Row]:
    """Rows with the stacks' own names, without what W&B adds to them. Raises: SpecError for an export of two runs."""
    names = {name for row in rows for name in row}
    runs = {name.rpartition(_RUN)[0] for name in names if _RUN in name}
    if len(runs) > 1:
        raise _refuse(
            path,
            f"an export of {len(runs)} runs: {', '.join(sorted(runs)[:3])[:MAX_NAME]}",
            "a log of one run, because runs differ in their steps",
            "export one run, or keep the columns of one",
        )
    known = {name for stack in load_stacks() for name in stack.meanings}
    renamed = {}
    for name in names:
        metric = name.rpartition(_RUN)[2]
        if metric not in known and metric.removeprefix("train/") in known:
            metric = metric.removeprefix("train/")  # TRL's and OpenRLHF's loggers add it
        renamed[name] = {"train/global_step": CLOCK_STEP, "_runtime": CLOCK_S}.get(metric, metric)
    return [
        {renamed[name]: value for name, value in row.items() if not name.endswith(("__MIN", "__MAX"))} for row in rows
    ]


def _read_rows(path: Path) -> Iterator[Row]:
    text = read_text(path, "the log", limit=MAX_LOG_BYTES)
    if path.name == "trainer_state.json":
        yield from map(flatten_row, _read_history(path, text))
    elif path.suffix == ".csv":
        try:
            yield from map(flatten_row, csv.DictReader(text.splitlines()))
        except csv.Error as error:
            raise _refuse(
                path, f"it is no CSV: {error}", "rows of numbers under a header", "correct the file"
            ) from None
    elif path.suffix == ".jsonl":
        yield from map(flatten_row, _read_json_rows(path, text))
    else:
        yield from read_console_rows(text)


def _read_history(path: Path, text: str) -> list[Any]:
    try:
        history = json.loads(text)["log_history"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _refuse(
            path, "the trainer state has no log_history", "what transformers writes", "give the metrics as JSONL or CSV"
        ) from None
    return history if isinstance(history, list) else []


def _read_json_rows(path: Path, text: str) -> Iterator[Any]:
    text = text.rstrip()
    last = text.count("\n") + 1
    for number, line in enumerate(io.StringIO(text), 1):
        try:
            if line.strip():
                check_values(line)
                yield json.loads(line)
        except (ValueError, RecursionError):
            if number == last:  # a run that was killed leaves half a line
                return
            rule = "an object of metrics a line"
            raise _refuse(path, f"line {number} is no JSON", rule, "correct or remove that line") from None


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
                f"fields there: {', '.join(name[:MAX_NAME] for name in sorted(names)[:12])}",
            )
    return own


def _sum_by_meaning(row: Row, meanings: Mapping[str, tuple[str, float]], path: Path) -> dict[str, float]:
    """The sum of a row's fields by meaning. Raises: SpecError for impossible numbers."""
    sums: dict[str, float] = {}
    for name, (meaning, unit) in meanings.items():
        value = row.get(name)
        if value is None or math.isnan(value):
            continue
        most = 1.0 if meaning == "cut_share" else MAX_STEP_S / unit if meaning not in LENGTHS else float(1 << 30)
        if not 0 <= value <= most:
            rule = f"from 0 to {most:g}"
            raise _refuse(path, f"{name[:MAX_NAME]} is {value:g}", rule, "correct the log, or leave the row out")
        sums[meaning] = sums.get(meaning, 0.0) + value * unit
    return sums


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
    names = {name[:MAX_NAME] for name in names}
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
