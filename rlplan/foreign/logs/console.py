"""Rows of numbers in the console output of a training: the forms in which stacks print their metrics.

In: the text of a console. Out: rows, each with the numbers that were printed together. Forms: dictionaries in one or
several lines (TRL, OpenRLHF, slime, miles, ms-swift), `step:3 - key:value` (verl), `Step 3 | Time: 5.1s | ...`
(prime-rl), bullets below a heading (NeMo-RL), timers alone (SkyRL, DeepSpeed-Chat), tables (AReaL), progress bars.
Left out: what the names mean (names.yaml).
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

Row = dict[str, float]

CLOCK_STEP, CLOCK_S = "clock/step", "clock/seconds"
"""Fields of a row that tells how many seconds the run had taken at a step: of progress bars and of W&B."""
MAX_FIELDS, MAX_DURATION = 2_000, 40
_LONG_LINE = re.compile(r"^(.{20000}).+", re.MULTILINE)
"""A line of more characters than any stack prints; searches for names and numbers would take quadratic time."""
MAX_BAR = 1_000
"""Characters of a line with a progress bar."""
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_DICTIONARY = re.compile(r"(?:\{|^[ \t]*(?=['\"]loss['\"]))([^{}]{2,40000})\}", re.MULTILINE)
"""A dictionary; a pasted one may lack its first brace."""
_ITEM = re.compile(r"(?<![\w\])])['\"]([^'\"]{1,160})['\"]:\s*(?:['\"]([^'\"]*)['\"]|(?:[\w.]+\()?(-?[\w.+-]+))")
_VERL = re.compile(r"(?<![\w/])step:\s*(\d+) - (.+)")
_VERL_PAIR = re.compile(r"([^\s:]{1,160}):\s*(?:np\.\w+\()?(-?\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf)\)?(?=\s|$)")
"""A name and a number. numpy 2 prints `np.float64(0.5)`; a version such as 0.9.1 is no number."""
_NEW_LINE = re.compile(r"\(|\[|\d{4}-|\s*$|.*(?:(?<![\w/])step:|%\|)")
"""The start of a line that does not continue a line of verl that the terminal wrapped."""
_PRIME = re.compile(r"\bStep (\d+) \| (.+)")
_PRIME_PAIR = re.compile(r"(?:([A-Z][\w. -]*?):? )?((?:\d+(?:\.\d+)?[hms] ?)+|-?\d+\.?\d*)(?=\s|$|/)")
_BULLET = re.compile(r"•\s*([A-Za-z_][^:\n]{0,60}?):\s*(-?\d+\.?\d*(?:e[-+]?\d+)?)(s?)\b")
_TIMERS = {
    "timing/{}": re.compile(r"Finished: '([\w/ -]+)', time cost: (\d+\.?\d*)s"),
    "perf/{}_time": re.compile(r"Timer (\w+) end \(elapsed: (\d+\.?\d*)s"),
    "ds-chat/{}": re.compile(r"(End-to-End|Generation|Training)\s*=> Latency: (\d+\.?\d*)s"),
    "{}": re.compile(r"[│|]\s*([a-z]\w*(?:/[\w.-]+)+)\s*[│|]\s*(-?\d[\d.]*(?:e[-+]?\d+)?)\s*(?=[│|])"),
}
"""Timers that SkyRL, slime and DeepSpeed-Chat print alone, and cells of AReaL's table, by the names in names.yaml."""
_BAR = re.compile(r"(?:^|\r|\))\s*([^\r|%]*?):?\s*\d+%\|[^|]*\|\s*(\d+)/(\d+) \[((?:\d+:)?\d+:\d+)<")
_STEP_BAR = re.compile(r"$|Training Progress|Episode \[")
"""Descriptions of bars that advance with training steps."""
_PARTS = {"h": 3600.0, "m": 60.0, "s": 1.0}


def read_console_rows(text: str) -> Iterator[Row]:
    """The rows of a console in the order of their forms."""
    text = _LONG_LINE.sub(r"\1", _ANSI.sub("", text))
    for match in _DICTIONARY.finditer(text):
        body = match[1].replace("\n", "")  # terminals wrap lines within words
        row = flatten_row({name: quoted or bare for name, quoted, bare in _ITEM.findall(body)})
        if row:
            yield row
    yield from _read_lines(text)
    yield from _read_bars(text)


def _read_lines(text: str) -> Iterator[Row]:
    block: Row = {}
    for line in filter(None, _join_wrapped(text)):
        if match := _VERL.search(line):
            yield {"step": float(match[1])} | {name: float(value) for name, value in _VERL_PAIR.findall(match[2])}
        elif match := _PRIME.search(line):
            pairs = filter(None, (_PRIME_PAIR.match(part.strip()) for part in match[2].split("|")))
            yield {f"prime-rl/{pair[1] or 'Time'}": read_seconds(pair[2]) or 0.0 for pair in pairs}
        for name, value in _read_block_line(line):
            if name in block:  # the next step prints the same names
                yield block
                block = {}
            block[name] = value
    if block:
        yield block


def _read_block_line(line: str) -> Iterator[tuple[str, float]]:
    """Names and numbers of a line that is one of several of a step."""
    if match := _BULLET.search(line):
        name = match[1].strip().lower().replace(" ", "_")
        yield f"timing/train/{name}" if match[3] else f"train/{name}", float(match[2])
    for name, pattern in _TIMERS.items():
        for match in pattern.finditer(line):
            yield name.format(match[1]), float(match[2])


def _join_wrapped(text: str) -> Iterator[str]:
    """Lines, with those of verl whole again that a terminal wrapped."""
    whole = ""
    for line in text.splitlines():
        if whole and ((" - " not in line and not re.fullmatch(r"[\w.:-]+", line)) or _NEW_LINE.match(line)):
            yield whole
            whole = ""
        if whole or _VERL.search(line):
            whole += line
        else:
            yield line
    yield whole


def _read_bars(text: str) -> Iterator[Row]:
    """The seconds of the progress bar that took longest: shorter ones are of evaluations."""
    bars: dict[tuple[str, str], list[Row]] = {}
    for line in re.split(r"[\r\n]", text):
        match = _BAR.search(line) if len(line) < MAX_BAR else None
        if match and _STEP_BAR.match(match[1]):
            row = {CLOCK_STEP: float(match[2]), CLOCK_S: read_seconds(match[4]) or 0.0}
            bars.setdefault((match[1].partition("[")[0], match[3]), []).append(row)
    yield from max(bars.values(), key=lambda rows: rows[-1][CLOCK_S], default=[])


def read_seconds(text: str) -> float | None:
    """Seconds of a duration or a plain number; None for other text.

    >>> read_seconds("1h 2m 3s"), read_seconds("1:02:03"), read_seconds("17.2s"), read_seconds("4"), read_seconds("x")
    (3723.0, 3723.0, 17.2, 4.0, None)
    """
    text = text.strip()
    if len(text) > MAX_DURATION:
        return None
    try:
        if re.fullmatch(r"(?:\d+\.?\d*[hms] ?)+", text):
            return sum(float(part[:-1]) * _PARTS[part[-1]] for part in re.findall(r"[\d.]+[hms]", text))
        seconds = 0.0
        for part in text.split(":") if re.fullmatch(r"(?:\d+:){1,2}\d+", text) else [text]:
            seconds = 60 * seconds + float(part)
        return seconds
    except ValueError:
        return None


def flatten_row(row: Any, prefix: str = "") -> Row:
    """Numbers by name; `data` and `metrics`, in which loggers wrap a row, leave no prefix."""
    numbers: Row = {}
    for key, value in list(row.items())[:MAX_FIELDS] if isinstance(row, Mapping) else ():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            numbers |= flatten_row(value, "" if not prefix and key in ("data", "metrics") else f"{name}/")
        elif isinstance(value, str | int | float) and not isinstance(value, bool):
            numbers |= _read_value(name, str(value))
    return numbers


def _read_value(name: str, value: str) -> Row:
    """A number by its name; ms-swift states `global_step/max_steps: 5/100` and `elapsed_time: 4m 12s`."""
    if name == "global_step/max_steps":
        return _read_value(CLOCK_STEP, value.partition("/")[0])
    if name == "elapsed_time":
        seconds = read_seconds(value)
        return {} if seconds is None else {CLOCK_S: seconds}
    try:
        number = float(value)
    except ValueError:
        return {}
    is_speed = name in ("train_speed(iter/s)", "train_steps_per_second") and number > 0
    return {"train_speed(s/it)": 1 / number} if is_speed else {name: number}
