"""A reward's own process: asked line by line, answers line by line; nothing that happens in it reaches the run.

In: JSON lines on the standard input. Out: JSON lines on the descriptor that was the standard output; what the reward
itself prints goes nowhere. Started by `processes.py`; deadlines are kept there, for here nothing can be trusted to.
Before the first answer comes `{"ready": pid}`, of a process that may be killed alone, or 0; or `{"unable": why}`.
Before an answer of mathematics comes `{"begun": true}` once the row's own answer is seen to be in order.
"""

import inspect
import json
import os
import re
import resource
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO

from rlplan.runtime.processes.child_processes import die_with_parent
from rlplan.runtime.processes.safe_path import run_file

MAX_ANSWER = 4096
"""Bytes of an answer."""
GIVEN = {
    "trl": ("prompts", "completions", "completion_ids"),
    "verl": ("data_source", "solution_str", "ground_truth", "extra_info"),
}
"""What a function of each signature is given; TRL's also gets the row's columns."""
RESPONSE = {"trl": {"completions", "completion_ids"}, "verl": {"solution_str"}}
"""Of these, what holds the response: a function that takes none of it judges nothing."""


class Noted(float):
    """A reward with a note of something that is no failure."""

    note: str

    def __new__(cls, value: float, note: str) -> "Noted":
        """value: the reward. note: a word."""
        noted = super().__new__(cls, value)
        noted.note = note
        return noted


def load_function(path: str, signature: str, columns: Collection[str] | None) -> Callable[[dict[str, Any]], Any]:
    """The user's function as one that takes a request. columns: that every row has; None: not known.

    Raises: TypeError when it cannot be called with what there is.
    """
    file, _, name = path.rpartition(":")
    function = getattr(run_file(file, Path(file).stem), name, None)
    if not callable(function):
        raise TypeError(f"{Path(file).name} has no function {name}")
    if _is_no_plain_function(function):
        raise TypeError(f"{name} is a class, a coroutine or a generator: a plain function is called")
    found = signature_of(function) if signature == "auto" else signature
    check_parameters(function, found, columns)
    return {"verl": _as_verl, "trl": _as_trl}[found](function)


def signature_of(function: Callable[..., Any]) -> str:
    """`trl` or `verl`, by the names of the parameters. Raises: TypeError."""
    parameters = inspect.signature(function).parameters
    if {"solution_str", "ground_truth"} <= set(parameters):
        return "verl"
    if "completions" in parameters and ("prompts" in parameters or taken_by(function) is None):
        return "trl"
    raise TypeError(
        f"it takes ({', '.join(parameters)}): neither (prompts, completions, **columns) as TRL's "
        "nor (data_source, solution_str, ground_truth, extra_info) as verl's"
    )


def check_parameters(function: Callable[..., Any], kind: str, columns: Collection[str] | None) -> None:
    """Bind what a call will give to the function's parameters. Raises: TypeError when that cannot be done."""
    takes, signature = taken_by(function), inspect.signature(function)
    if takes is not None and not takes & RESPONSE[kind]:
        raise TypeError(f"it takes ({', '.join(signature.parameters)}), and no {' or '.join(sorted(RESPONSE[kind]))}")
    offered = set(GIVEN[kind])
    if kind == "trl":
        offered |= set(signature.parameters if columns is None else columns)
    try:
        signature.bind(**chosen(takes, dict.fromkeys(offered)))
    except TypeError as error:
        names = ", ".join([*GIVEN[kind], *sorted(offered - set(GIVEN[kind]))])
        raise TypeError(f"{error}; given by name are {names}") from None


def _is_no_plain_function(function: Any) -> bool:
    called = (function, getattr(function, "__call__", None))  # noqa: B004  # what an object does when it is called
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    return inspect.isclass(function) or any(is_one(each) for is_one in kinds for each in called)


def taken_by(function: Callable[..., Any]) -> set[str] | None:
    """Names of what a function can be given by name; None: whatever there is."""
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    return {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}


def chosen(takes: set[str] | None, offered: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in offered.items() if takes is None or name in takes}


def _as_verl(function: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    takes = taken_by(function)

    def call(request: dict[str, Any]) -> Any:
        columns = request["columns"]
        everything = {
            "data_source": columns.get("data_source", "rlplan"),
            "solution_str": request["text"],
            "ground_truth": request["answer"],
            "extra_info": columns.get("extra_info", {k: v for k, v in columns.items() if k != "data_source"}),
        }
        values = function(**chosen(takes, everything))
        return values["score"] if isinstance(values, dict) else values

    return call


def _as_trl(function: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    takes = taken_by(function)

    def call(request: dict[str, Any]) -> Any:
        columns = {"answer": request["answer"], **request["columns"]}
        everything = {
            **{name: [value] for name, value in columns.items()},
            "prompts": [request["prompt"]],
            "completions": [request["text"]],
            "completion_ids": [request["tokens"]],
        }
        values = function(**chosen(takes, everything))
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise TypeError(f"it gave {type(values).__name__}, not a list with one number for each completion")
        if len(values) != 1:
            raise TypeError(f"it gave {len(values)} values for 1 completion")
        return values[0]

    return call


def load_math(begin: Callable[[], None]) -> Callable[[dict[str, Any]], Any]:
    """Compares mathematics: the answer is parsed as what is right, then the response. Deadlines are the parent's.

    A response that cannot be read as mathematics is wrong, and noted; so is one that takes all memory or levels; two
    that cannot be compared are a failure. begin: called once the row's answer was compared with a plain number, so that
    what exhausts a limit from then on is the response's doing.
    """
    from math_verify import parse, verify

    def read(text: str) -> Any:
        text = text.replace("**", "^")  # Python's power, of which LaTeX would read the first factor alone
        if _POWER_OF_POWERS.search(text):
            raise ValueError(f"{text[:80]!r} does not say which power comes first")
        options = {"parsing_timeout": None, "raise_on_error": True}
        return parse(f"${text}$", **options) or parse(text, **options)

    @lru_cache(maxsize=64)  # the responses of a group have one answer
    def read_answer(answer: str) -> Any:
        if not (right := read(answer)):
            raise ValueError(f"the row's answer {answer[:80]!r} is no mathematics")
        verify(right, read("1"), timeout_seconds=None)
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
            said = read(text)
        except MemoryError:
            raise
        except Exception:
            said = []
        if verify(right, said, timeout_seconds=None):  # also when one of several readings cannot be compared
            return True
        if all(isinstance(reading, str) for reading in said):
            return Noted(0.0, "unreadable")
        return bool(verify(right, said, timeout_seconds=None, raise_on_error=True))

    return call


_POWER_OF_POWERS = re.compile(r"\^[\w.]+\^")


_REFUSED = (
    "os.exec", "os.fork", "os.forkpty", "os.kill", "os.killpg", "os.posix_spawn", "os.remove", "os.rename", "os.rmdir",
    "os.chmod", "os.chown", "os.link", "os.symlink", "os.mkdir", "os.truncate", "os.putenv", "os.spawn", "os.system",
    "subprocess.Popen", "socket.", "ctypes.", "shutil.", "pty.spawn", "webbrowser.open", "ensurepip.bootstrap",
)  # fmt: skip


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """A process with this hook writes no file, starts no other and opens no connection, whatever a response says.

    A second lock: mathematics is parsed by packages that evaluate what they have taken apart. Not a sandbox.
    """
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if writes or event.startswith(_REFUSED):
        raise PermissionError(f"{event} has nothing to do with mathematics")


def _number(value: Any) -> dict[str, Any]:
    """A value as it can travel. Arrays and tensors of one number say so themselves (`item`)."""
    if value is not None and not isinstance(value, bool | int | float | str) and callable(getattr(value, "item", None)):
        value = value.item()
    if isinstance(value, bool | int | float):
        return {"value": float(value).hex(), **({"note": value.note} if isinstance(value, Noted) else {})}
    return {"failure": f"it gave {'None' if value is None else type(value).__name__}, not a number"}


def _answer(call: Callable[[dict[str, Any]], Any], line: bytes) -> dict[str, Any]:
    try:
        return _number(call(json.loads(line)))
    except BaseException as error:  # also SystemExit and KeyboardInterrupt: the run decides when this process ends
        return {"failure": f"{type(error).__name__}: {str(error)[:250]}"}


def _serve(call: Callable[[dict[str, Any]], Any], requests: BinaryIO, answers: int) -> None:
    for line in requests:
        _say(answers, _answer(call, line))


def _serve_in_forks(call: Callable[[dict[str, Any]], Any], requests: BinaryIO, answers: int) -> None:
    """Answer in a copy of this process: one that hangs is killed, and the next has nothing to import again."""
    while True:
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            sys.addaudithook(_refuse)
            _say(answers, {"ready": os.getpid()})
            _serve(call, requests, answers)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code == 0:
            return
        _say(answers, {"ended": code})


def _say(answers: int, what: dict[str, Any]) -> None:
    os.write(answers, json.dumps(what).encode()[:MAX_ANSWER] + b"\n")


def main() -> None:
    die_with_parent()
    requests, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    setting = json.loads(requests.readline())
    resource.setrlimit(resource.RLIMIT_DATA, (setting["memory"], setting["memory"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    is_math = setting["kind"] == "math"
    try:
        begin = partial(_say, answers, {"begun": True})
        call = (
            load_math(begin)
            if is_math
            else load_function(setting["path"], setting["signature"], setting.get("columns"))
        )
        if is_math:
            call({"text": "1", "answer": "2"})  # loads what is loaded late
    except BaseException as error:
        return _say(answers, {"unable": f"{type(error).__name__}: {str(error)[:250]}"})
    if is_math:
        return _serve_in_forks(call, requests, answers)
    _say(answers, {"ready": 0})
    return _serve(call, requests, answers)


if __name__ == "__main__":
    main()
    os._exit(0)  # threads that a reward has left do not hold it up
