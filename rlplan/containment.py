"""One limited child process for everything that is parsed from outside: scripts, configurations, logs, run folders.

The child is a fork, so it starts in milliseconds with the modules of its parent. It has a budget of processor time and
memory, writes nothing, starts nothing and opens no connection. What it reads crosses the pipe as JSON: the parent gets
data or a message, whatever the file does to its reader.

In: a function that reads. Out: JSON data, or a SpecError. Left out: readers' own limits, which bound each computation
before it begins and name the place in the file; files that rlplan brings along, and a job's own YAML.
"""

import gc
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from rlplan import errors
from rlplan.errors import RlplanError, SpecError
from rlplan.reading import describe_path_error, is_file

if TYPE_CHECKING:
    from pydantic import TypeAdapter


@dataclass(frozen=True)
class Budget:
    """What the reader of one file may use."""

    cpu_s: float = 1.25
    """Processor seconds: 21,000 nodes of YAML, the most that are read, take 0.8 s."""
    memory_bytes: int = 384 << 20
    """Bytes that may be mapped in addition to those of the parent."""
    answer_bytes: int = 32 << 20
    """Size limit of the answer as JSON."""

    @property
    def deadline_s(self) -> float:
        """Wall-clock seconds: a reader may wait for a busy machine or a slow disk."""
        return 20 + 10 * self.cpu_s


READING = Budget()
BYTES_PER_S, MEMORY_PER_BYTE, ANSWER_PER_BYTE = 2 << 20, 16, 4
"""Bytes of a large file that take a second more, and bytes of memory and of the answer for each."""
Value = TypeVar("Value")
MAX_PART = 4_000
"""Characters of a part of a message: a file's own text may stand in it."""
_DENIED = (
    "os.exec", "os.fork", "os.forkpty", "os.kill", "os.killpg", "os.posix_spawn", "os.remove", "os.rename", "os.rmdir",
    "os.chmod", "os.chown", "os.link", "os.symlink", "os.mkdir", "os.truncate", "os.putenv", "os.spawn", "os.system",
    "subprocess.Popen", "socket.", "ctypes.", "shutil.", "pty.spawn", "webbrowser.open", "ensurepip.bootstrap",
)  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR
_is_contained = False
"""Whether this process is such a child already."""


def read_contained(
    read: Callable[[], Value], path: Path, kind: type[Value] | None = None, budget: Budget = READING
) -> Value:
    """What `read` returns in a limited child process. path: the file, for messages. kind: its type, if not JSON data.

    Raises: the RlplanError of `read`; SpecError where it exceeds its budget or fails in any other way.
    """
    data: Any = _exchange(read if kind is None else lambda: _adapt(kind).dump_python(read(), mode="json"), path, budget)
    return data if kind is None else _adapt(kind).validate_python(data)


def measure_budget(*paths: Path) -> Budget:
    """The budget for logs and other files that may be large: it grows with them."""
    size = sum(path.stat().st_size for path in paths if is_file(path))
    return Budget(
        READING.cpu_s + size / BYTES_PER_S,
        READING.memory_bytes + MEMORY_PER_BYTE * size,
        READING.answer_bytes + ANSWER_PER_BYTE * size,
    )


@cache
def _adapt(kind: type) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter  # the workers of rewards have no use for it

    return TypeAdapter(kind)


def _exchange(read: Callable[[], Any], path: Path, budget: Budget) -> Any:
    """JSON data from a child; in a limited process, from `read` itself."""
    if _is_contained:
        return _unpack(_answer(read), path, budget)
    receiver, sender = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns where other threads exist: the child takes no lock of theirs, and has a deadline
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _serve(read, budget, sender)
    os.close(sender)
    try:
        answer = _receive(receiver, budget)
    finally:
        os.close(receiver)
        os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if answer is None:
        raise _refuse(path, f"reading it takes more than {budget.deadline_s:g} s")
    return _unpack(answer or _describe_end(-status, budget), path, budget)


def enter_containment(budget: Budget = READING) -> None:
    """Make this process a limited one: it maps at most so much more memory, and neither writes, starts nor connects.

    It cannot be undone. The processor time is limited by `read_contained` only, for each file.
    """
    global _is_contained
    _is_contained = True
    limit_memory(budget.memory_bytes)
    sys.addaudithook(deny_side_effects)


def limit_memory(more: int) -> None:
    """Let this process map at most `more` bytes in addition to its current mappings, and write no core file."""
    mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = mapped + more if hard == resource.RLIM_INFINITY else min(hard, mapped + more)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def deny_side_effects(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook that denies writing files, starting processes and opening connections."""
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES
    if writes or event.startswith(_DENIED):
        raise PermissionError(f"{event} is not allowed in this process")


def _serve(read: Callable[[], Any], budget: Budget, sender: int) -> NoReturn:
    """The child: it answers once and ends."""
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        silence = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(silence, descriptor)
        gc.freeze()  # a collection would copy the parent's pages
        signal.setitimer(signal.ITIMER_PROF, budget.cpu_s)
        seconds = int(budget.cpu_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        enter_containment(budget)
        answer = _answer(read)
        signal.setitimer(signal.ITIMER_PROF, 0)
        while answer:
            answer = answer[os.write(sender, answer) :]
        code = 0
    finally:
        os._exit(code)  # no handler, buffer or file of the parent's is touched


def _answer(read: Callable[[], Any]) -> bytes:
    """The outcome of `read` as JSON: `value`, `refused` with the parts of an error, or `failed` with the reason."""
    outcome: dict[str, Any]
    try:
        return json.dumps({"value": read()}).encode()
    except RlplanError as error:
        parts = {key: part[:MAX_PART] if isinstance(part, str) else part for key, part in vars(error).items()}
        outcome = {"refused": parts, "kind": type(error).__name__}
    except MemoryError:
        outcome = {"failed": "reading it takes too much memory"}
    except RecursionError:
        outcome = {"failed": "it is nested too deep to be read"}
    except Exception as error:
        known = describe_path_error(error)
        outcome = {"refused": vars(known), "kind": "SpecError"} if known else {"failed": _describe_bug(error)}
    return json.dumps(outcome).encode()


def _describe_bug(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{BUG} {type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}: {str(error)[:200]}"


BUG = "a bug in its reader:"
"""Beginning of the message about an error that a reader did not expect."""


def _receive(receiver: int, budget: Budget) -> bytes | None:
    """What the child writes, as far as the budget allows; None where it has not ended at the deadline."""
    end, parts, size = time.monotonic() + budget.deadline_s, list[bytes](), 0
    while size <= budget.answer_bytes:
        if not select.select([receiver], [], [], max(0.0, end - time.monotonic()))[0]:
            return None
        part = os.read(receiver, 1 << 16)
        if not part:
            break
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _describe_end(number: int, budget: Budget) -> bytes:
    """The outcome of a child that ended without an answer, by the signal that ended it."""
    if number in (signal.SIGPROF, signal.SIGXCPU):
        return json.dumps({"failed": f"reading it takes more than {budget.cpu_s:g} s of processor time"}).encode()
    return json.dumps({"failed": "reading it takes too much memory, or ends its process"}).encode()


def _unpack(answer: bytes, path: Path, budget: Budget) -> Any:
    if len(answer) > budget.answer_bytes:
        raise _refuse(path, f"it holds more than {budget.answer_bytes >> 20} MiB of settings")
    outcome = json.loads(answer)
    if "value" in outcome:
        return outcome["value"]
    if "failed" in outcome:
        raise _refuse(path, outcome["failed"])
    parts = outcome["refused"]
    error = getattr(errors, outcome["kind"])(*(parts.pop("what"),), **{key: parts.pop(key) for key in _PARTS})
    vars(error).update(parts)
    raise error


_PARTS = ("where", "rule", "way_out")


def _refuse(path: Path, what: str) -> SpecError:
    return SpecError(
        f"{path.name} cannot be read: {what}",
        where=str(path),
        rule=f"a file is read within {READING.cpu_s:g} s of processor time and {READING.memory_bytes >> 20} MiB",
        way_out="give the part of it that matters as a file of its own, and report the file if it is a usual one",
    )
