"""The child process of one reward: it reads a JSON request per line and writes a JSON answer per line.

`processes.py` starts it and enforces the deadlines, because code in this process is not trusted. Text that the reward
prints is discarded. The first line is `{"ready": pid}` or `{"unable": why}`; `pid` names a fork that may be killed
alone, or is 0. A function gets a batch of responses and returns a value for each; `"takes_batches"` in the first line
means that it is called once with the whole batch, as TRL does. Before a mathematical comparison the child writes
`{"begun": true}` once it has parsed the row's own answer.

In: JSON lines on standard input. Out: JSON lines on the descriptor that was standard output.
"""

import inspect
import json
import math
import os
import re
import resource
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from rlplan.containment import deny_side_effects
from rlplan.runtime.processes.answer_channel import AnswerChannel
from rlplan.runtime.processes.awaiting import run_awaitable
from rlplan.runtime.processes.child_processes import die_with_parent
from rlplan.runtime.processes.safe_path import load_file

MAX_ANSWER = 4096
"""Most bytes of an answer about one response."""
MAX_METRICS, MAX_NAME = 16, 64
"""Most metrics that a function logs, and most characters of their names."""
MAX_VALUE = 400
"""Most bytes of one value or failure in an answer about a batch."""
MEMORY_PER_BYTE = 8
"""Bytes of Python objects per byte of a request, allowed on top of the reward's memory limit.

Token ids need the most: about 40 bytes for 7 digits and a comma."""
OFFERED = {
    "trl": ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"),
    "verl": ("data_source", "solution_str", "ground_truth", "extra_info"),
}
"""Arguments offered to a function, by signature; a TRL function also gets the row's columns."""
RESPONSE_NAMES = {"trl": {"completions", "completion_ids"}, "verl": {"solution_str"}}
"""Arguments that hold the response; a function that accepts none of them cannot judge it."""


class Noted(float):
    """A reward with a note about an event that is not a failure."""

    note: str
    """One word, such as `memory`."""

    def __new__(cls, value: float, note: str) -> "Noted":
        """A number with a note."""
        noted = super().__new__(cls, value)
        noted.note = note
        return noted


@dataclass(frozen=True)
class TrainerState:
    """The fields of TRL's trainer state that a run knows."""

    global_step: int
    """Finished optimization steps."""

    max_steps: int
    """Optimization steps of the whole run."""


Log = Callable[[str, Any], None]
"""A function that takes a metric's name and its number, such as a judge's cost."""
Batch = Callable[[dict[str, Any]], Sequence[Any]]
"""A function of a request; it returns a value or an exception for each of the request's `responses`."""


def load_function(path: str, signature: str, columns: Collection[str] | None, log: Log) -> tuple[Batch, bool]:
    """(the user's function, adapted to take a request; whether it is called once for a whole batch).

    columns: columns that every row has; None if unknown. log: called with each number that the function logs.
    Raises: TypeError when the parameters do not fit.
    """
    file, _, name = path.rpartition(":")
    function = getattr(load_file(file, Path(file).stem), name, None)
    if not callable(function):
        raise TypeError(f"{Path(file).name} has no function {name}")
    if _is_class_or_generator(function):
        raise TypeError(f"{name} is a class or a generator; it must be a plain or async function")
    kind = detect_signature(function) if signature == "auto" else signature
    check_parameters(function, kind, columns)
    return (_adapt_trl(function, log), True) if kind == "trl" else (_adapt_verl(function, log), False)


def detect_signature(function: Callable[..., Any]) -> str:
    """`trl` or `verl`, detected from the parameter names. Raises: TypeError."""
    parameters = inspect.signature(function).parameters
    if {"solution_str", "ground_truth"} <= set(parameters):
        return "verl"
    if RESPONSE_NAMES["trl"] & set(parameters):
        return "trl"
    raise TypeError(
        f"it takes ({', '.join(parameters)}), which is neither TRL's signature (prompts, completions, **columns) "
        "nor verl's (data_source, solution_str, ground_truth, extra_info)"
    )


def check_parameters(function: Callable[..., Any], kind: str, columns: Collection[str] | None) -> None:
    """Check that a call's arguments bind to the function's parameters. Raises: TypeError when they do not."""
    takes, signature = list_accepted_names(function), inspect.signature(function)
    if takes is not None and not takes & RESPONSE_NAMES[kind]:
        raise TypeError(
            f"it takes ({', '.join(signature.parameters)}), but not {' or '.join(sorted(RESPONSE_NAMES[kind]))}"
        )
    offered = set(OFFERED[kind])
    if kind == "trl":
        offered |= set(signature.parameters if columns is None else columns)
    try:
        signature.bind(**select_arguments(takes, dict.fromkeys(offered)))
    except TypeError as error:
        names = ", ".join([*OFFERED[kind], *sorted(offered - set(OFFERED[kind]))])
        raise TypeError(f"{error}; the arguments are {names}") from None


def _is_class_or_generator(function: Any) -> bool:
    called = (function, getattr(function, "__call__", None))  # noqa: B004  # covers objects with a __call__ method
    kinds = (inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    return inspect.isclass(function) or any(is_kind(candidate) for is_kind in kinds for candidate in called)


def list_accepted_names(function: Callable[..., Any]) -> set[str] | None:
    """Names of a function's keyword arguments; None when it accepts any (`**kwargs`)."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def select_arguments(takes: set[str] | None, offered: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in offered.items() if takes is None or name in takes}


def _adapt_verl(function: Callable[..., Any], log: Log) -> Batch:
    takes = list_accepted_names(function)

    def call(response: dict[str, Any]) -> Any:
        columns = response["columns"]
        everything = {
            # verl's rows always have a data_source; rows of other layouts get a constant.
            "data_source": columns.get("data_source", "rlplan"),
            "solution_str": response["text"],
            "ground_truth": response["answer"],
            "extra_info": columns.get("extra_info", {k: v for k, v in columns.items() if k != "data_source"}),
        }
        value = run_awaitable(function(**select_arguments(takes, everything)))
        if isinstance(value, dict):  # verl accepts a dict with more metrics
            for name, number in value.items():
                if name != "score":
                    log(name, number)
            value = value["score"]
        return TypeError("it returned None, not a number") if value is None else value

    return lambda request: [call(response) for response in request["responses"]]


def _adapt_trl(function: Callable[..., Any], log: Log) -> Batch:
    """Adapt a TRL function: one call with the lists of all responses; None among the values is kept.

    Source: TRL 1.16, `GRPOTrainer._calculate_rewards`. Left out: values passed to `log_extra`.
    """
    takes = list_accepted_names(function)

    def call(request: dict[str, Any]) -> Sequence[Any]:
        responses = request["responses"]
        rows = [{"answer": response["answer"], **response["columns"]} for response in responses]
        names = {name: None for row in rows for name in row}
        everything = {
            **{name: [row.get(name) for row in rows] for name in names},
            "prompts": [response["chat"] or response["prompt"] for response in responses],
            "completions": [
                [{"role": "assistant", "content": response["text"]}] if response["chat"] else response["text"]
                for response in responses
            ],
            "completion_ids": [response["tokens"] for response in responses],
            "trainer_state": TrainerState(*request["progress"]),
            "log_extra": lambda column, values: None,
            "log_metric": log,
        }
        values = run_awaitable(function(**select_arguments(takes, everything)))
        if callable(to_list := getattr(values, "tolist", None)):  # a tensor or an array
            values = to_list()
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise TypeError(f"it returned {type(values).__name__}, not a list with one number per completion")
        if len(values) != len(responses):
            plural = "s" * (len(responses) > 1)
            raise TypeError(f"it returned {len(values)} values for {len(responses)} completion{plural}")
        return values

    return call


def load_math(begin: Callable[[], None]) -> Callable[[dict[str, Any]], Any]:
    """A function that compares a response with the row's answer as mathematics; the parent enforces deadlines.

    A response that cannot be parsed, or that exhausts memory or recursion, is wrong and noted. Two expressions that
    cannot be compared are a failure. begin: called once the row's answer was compared with a plain number; a limit that
    is exhausted after that is the response's fault.
    """
    from math_verify import parse, verify

    def read(text: str) -> Any:
        text = text.replace("**", "^")  # LaTeX would read only the first factor of Python's power operator
        if _POWER_OF_POWERS.search(text):
            raise ValueError(f"{text[:80]!r} is ambiguous: it chains powers without brackets")
        options = {"parsing_timeout": None, "raise_on_error": True}
        return parse(f"${text}$", **options) or parse(text, **options)

    @lru_cache(maxsize=64)  # all responses of a group have the same answer
    def read_answer(answer: str) -> Any:
        if not (right := read(answer)):
            raise ValueError(f"the row's answer {answer[:80]!r} is not a mathematical expression")
        verify(right, read("1"), timeout_seconds=None)  # an answer that exhausts a limit alone does so before `begin`
        return right

    def call(request: dict[str, Any]) -> Any:
        right = read_answer(request["answer"])
        begin()
        try:
            return compare(right, request["text"])
        except (MemoryError, RecursionError):
            return Noted(0.0, "memory")

    def compare(right: Any, text: str) -> Any:
        try:
            parsed = read(text)
        except MemoryError:
            raise
        except Exception:
            parsed = []
        if verify(right, parsed, timeout_seconds=None):  # does not raise when one of several readings is incomparable
            return True
        if all(isinstance(reading, str) for reading in parsed):
            return Noted(0.0, "unreadable")
        return bool(verify(right, parsed, timeout_seconds=None, raise_on_error=True))

    return call


_POWER_OF_POWERS = re.compile(r"\^[\w.]+\^")


def _encode_number(value: Any) -> dict[str, Any]:
    """A value as JSON. One-element arrays and tensors are unwrapped with their `item` method."""
    if isinstance(value, Exception):
        return {"failure": str(value)[:MAX_VALUE]}
    if value is not None and not isinstance(value, bool | int | float | str) and callable(getattr(value, "item", None)):
        value = value.item()
    if isinstance(value, bool | int | float):
        try:
            number = float(value)
        except OverflowError as error:
            return {"failure": f"OverflowError: {error}"}
        return {"value": number.hex(), **({"note": value.note} if isinstance(value, Noted) else {})}
    return {"failure": f"it returned {'None' if value is None else type(value).__name__[:MAX_VALUE]}, not a number"}


class Metrics:
    """Means of the numbers that a function logs during a call; others than finite numbers are dropped."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}

    def log(self, name: str, value: Any) -> None:
        number = _encode_number(value).get("value")
        name, number = "".join(re.findall(r"[\w.-]", str(name)))[:MAX_NAME], float.fromhex(number or "nan")
        if name and math.isfinite(number) and (name in self._sums or len(self._sums) < MAX_METRICS):
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + number, count + 1

    def take(self) -> dict[str, tuple[float, int]]:
        """(sum, count) by name since the last call."""
        sums, self._sums = self._sums, {}
        return sums


def _compute_values(call: Batch, metrics: Metrics, request: dict[str, Any]) -> dict[str, Any]:
    """An answer about a batch; null stands for None, with which a function leaves a response to other rewards."""
    metrics.take()  # an earlier call may have failed
    values = [None if value is None else _encode_number(value) for value in call(request)]
    return {"values": values, "metrics": metrics.take()}


def _answer_line(call: Callable[[dict[str, Any]], dict[str, Any]], line: bytes, memory: int = 0) -> dict[str, Any]:
    """Answer one request. memory: bytes allowed in addition to the request; 0 when the process has a hard limit."""
    try:
        if memory:
            _limit_memory(memory + MEMORY_PER_BYTE * len(line))
        return call(json.loads(line))
    except BaseException as error:  # also SystemExit and KeyboardInterrupt, because only the run may end this process
        return {"failure": f"{type(error).__name__}: {str(error)[:250]}"}


def _limit_memory(num_bytes: int) -> None:
    """Set the soft memory limit, which can be raised again for a larger batch."""
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _serve(call: Callable[[dict[str, Any]], dict[str, Any]], channel: AnswerChannel, memory: int = 0) -> None:
    for line in channel.requests:
        _say(channel, _answer_line(call, line, memory))


def _serve_in_forks(call: Callable[[dict[str, Any]], dict[str, Any]], channel: AnswerChannel) -> None:
    """Answer in a fork of this process: a fork that hangs is killed, and the next one need not import anything."""
    while True:
        pid = os.fork()
        if pid == 0:
            die_with_parent()  # the setting is not inherited by forks
            sys.addaudithook(deny_side_effects)  # the packages that parse mathematics evaluate parts of it
            _say(channel, {"ready": os.getpid()})
            _serve(call, channel)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code == 0:  # the fork has read the end of standard input
            return
        _say(channel, {"ended": code})


def _say(channel: AnswerChannel, answer: dict[str, Any]) -> None:
    channel.send(answer, MAX_ANSWER + MAX_VALUE * len(answer.get("values", ())))


def main() -> None:
    die_with_parent()
    channel = AnswerChannel(discards_prints=True)
    setting = json.loads(channel.requests.readline())
    memory, is_math, takes_batches = setting["memory"], setting["kind"] == "math", False
    metrics = Metrics()
    # A function's soft limit grows with each batch (_limit_memory), so only mathematics gets a hard limit.
    resource.setrlimit(
        resource.RLIMIT_DATA, (memory, memory if is_math else resource.getrlimit(resource.RLIMIT_DATA)[1])
    )
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        if is_math:
            compare = load_math(partial(_say, channel, {"begun": True}))
            compare({"text": "1", "answer": "2"})  # triggers lazy imports before the first fork
        else:
            columns, signature = setting.get("columns"), setting["signature"]
            function, takes_batches = load_function(setting["path"], signature, columns, metrics.log)
    except BaseException as error:
        return _say(channel, {"unable": f"{type(error).__name__}: {str(error)[:250]}"})
    if is_math:
        return _serve_in_forks(lambda request: _encode_number(compare(request)), channel)
    _say(channel, {"ready": 0, "takes_batches": takes_batches})
    return _serve(partial(_compute_values, function, metrics), channel, memory)


if __name__ == "__main__":
    main()
    os._exit(0)  # does not wait for threads that a reward left behind
