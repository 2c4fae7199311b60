"""One limited child process for everything that is parsed from outside: scripts, configurations, logs, run folders.

The child is a fork, so it starts in milliseconds with the modules of its parent. It has a budget of processor time and
memory, writes nothing, starts nothing and opens no connection. It sends its result through a pipe as JSON: the parent
gets data or a message, whatever the file does to its reader.

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
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from rlplan import errors
from rlplan.errors import HostError, RlplanError, SpecError
from rlplan.reading import describe_path_error, is_file

if TYPE_CHECKING:
    from pydantic import TypeAdapter


@dataclass(frozen=True)
class Budget:
    """Limits on the reader of one file."""

    cpu_s: float = 1.25
    """Processor seconds: 21,000 nodes of YAML, the most that are read, take 0.8 s."""
    memory_bytes: int = 384 << 20
    """Bytes that may be mapped in addition to those of the parent."""
    answer_bytes: int = 32 << 20
    """Size limit of the answer as JSON."""


READING = Budget()
BYTES_PER_S, MEMORY_PER_BYTE, ANSWER_PER_BYTE = 2 << 20, 16, 4
"""Bytes of a large file that allow one second more; bytes of memory, and of the answer, that each of them allows."""
DEADLINE_S = 30.0
"""Wall-clock seconds in addition to ten times the processor time, for a busy machine or a slow file system."""
MAX_PART = 4_000
"""Maximum characters of each part of a message, because a message may quote the file."""
BUG = "a bug in its reader:"
"""Beginning of the message about an error that a reader did not expect."""
Value = TypeVar("Value")
_DENIED = (
    "os.exec", "os.fork", "os.forkpty", "os.kill", "os.killpg", "os.posix_spawn", "os.remove", "os.rename", "os.rmdir",
    "os.chmod", "os.chown", "os.link", "os.symlink", "os.mkdir", "os.truncate", "os.putenv", "os.spawn", "os.system",
    "subprocess.Popen", "socket.", "ctypes.", "shutil.", "pty.spawn", "webbrowser.open", "ensurepip.bootstrap",
)  # fmt: skip
_is_contained = False
"""Whether this process has already entered containment."""


def read_contained(
    read: Callable[[], Value], path: Path, kind: type[Value] | None = None, budget: Budget = READING
) -> Value:
    """The result of `read` in a limited child process. path: the file, for messages. kind: its type, if not JSON data.

    Raises: the RlplanError of `read`; SpecError where it exceeds its budget or fails in any other way; HostError where
    no child can be started.
    """

    adapter: TypeAdapter[Value] | None = None if kind is None else _adapt(cast("Hashable", kind))

    def dump() -> Any:
        return read() if adapter is None else adapter.dump_python(read(), mode="json")

    outcome = json.loads(_answer(dump)) if _is_contained else _ask_child(dump, budget)
    if "failed" in outcome:
        raise SpecError(
            f"{path.name} cannot be read: {outcome['failed']}",
            where=str(path),
            rule=f"a file is read within {budget.cpu_s:g} s of processor time and {budget.memory_bytes >> 20} MiB",
            way_out="give the part of it that matters as a file of its own, and report the file if it is a usual one",
        )
    if "refused" in outcome:
        raise getattr(errors, outcome["kind"], SpecError)(**outcome["refused"])
    data: Value = outcome["value"]
    return data if adapter is None else adapter.validate_python(data)


def measure_budget(*paths: Path) -> Budget:
    """The budget for logs and other files that may be large: it grows with them."""
    size = sum(path.stat().st_size for path in paths if is_file(path))
    return Budget(
        READING.cpu_s + size / BYTES_PER_S,
        READING.memory_bytes + MEMORY_PER_BYTE * size,
        READING.answer_bytes + ANSWER_PER_BYTE * size,
    )


def enter_containment(budget: Budget) -> None:
    """Make this process a limited one: it maps at most so much more memory, and neither writes, starts nor connects.

    It cannot be undone. The processor time is limited by `read_contained` only, for each file.
    """
    global _is_contained
    limit_memory(budget.memory_bytes)
    if not _is_contained:
        sys.addaudithook(deny_side_effects)
    _is_contained = True


def limit_memory(more: int) -> None:
    """Let this process map at most `more` bytes in addition to its current mappings, and write no core file."""
    mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    _lower_limit(resource.RLIMIT_AS, mapped + more)
    _lower_limit(resource.RLIMIT_CORE, 0)


def deny_side_effects(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook that denies writing files, starting processes and opening connections."""
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if writes or event.startswith(_DENIED):
        raise PermissionError(f"{event} is not allowed in this process")


def _lower_limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    limit = most if hard == resource.RLIM_INFINITY else min(hard, most)
    resource.setrlimit(kind, (limit, limit))


@cache
def _adapt(kind: Hashable) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter  # the workers of rewards have no use for it

    return TypeAdapter(cast("type[Any]", kind))


def _ask_child(read: Callable[[], Any], budget: Budget) -> dict[str, Any]:
    """The outcome of `read` in a child, also where the child does not answer."""
    receiver, sender, pid = _fork_child()
    if pid == 0:
        _serve(read, budget, sender)
    os.close(sender)
    parts, size, end, part = list[bytes](), 0, time.monotonic() + DEADLINE_S + 10 * budget.cpu_s, b"-"
    try:
        while part and size <= budget.answer_bytes:
            if not select.select([receiver], [], [], max(0.0, end - time.monotonic()))[0]:
                return {"failed": "reading it takes too long"}
            part = os.read(receiver, 1 << 16)
            parts.append(part)
            size += len(part)
    finally:
        os.close(receiver)
        if part:
            os.kill(pid, signal.SIGKILL)
        number = -os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if size > budget.answer_bytes:
        return {"failed": f"it holds more than {budget.answer_bytes >> 20} MiB of settings"}
    if number in (signal.SIGPROF, signal.SIGXCPU):
        return {"failed": f"reading it takes more than {budget.cpu_s:g} s of processor time"}
    if number:
        return {"failed": "reading it takes too much memory, or ends its process"}
    outcome: dict[str, Any] = json.loads(b"".join(parts))
    return outcome


def _fork_child() -> tuple[int, int, int]:
    """Both ends of a pipe, and the process id of a new child, which is 0 in the child. Raises: HostError."""
    ends: tuple[int, ...] = ()
    try:
        receiver, sender = ends = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 warns of deadlocks with other threads; a child that deadlocks is killed at its deadline
            warnings.simplefilter("ignore", DeprecationWarning)
            return receiver, sender, os.fork()
    except OSError as error:  # EAGAIN: no processes are left; ENOMEM: no memory; EMFILE: no open files
        for end in ends:
            os.close(end)
        raise HostError(
            f"no process can be started to read a file: {error.strerror}",
            where="this machine",
            rule="each file from outside is read in a process of its own, which needs a process, memory and a pipe",
            way_out="end other programs, or raise the limits on processes, memory and open files (`ulimit -a`)",
        ) from None


def _serve(read: Callable[[], Any], budget: Budget, sender: int) -> NoReturn:
    """Answer once, as the child, and end."""
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        silence = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(silence, descriptor)
        os.closerange(3, sender)  # pipes of other children would stay open until this child ends
        os.closerange(sender + 1, 1 << 16)
        gc.freeze()  # a collection would copy the parent's pages
        signal.setitimer(signal.ITIMER_PROF, budget.cpu_s)
        # whole seconds, and later: the kernel's own limit holds even if the reader stops the timer
        _lower_limit(resource.RLIMIT_CPU, int(budget.cpu_s) + 2)
        _lower_limit(resource.RLIMIT_FSIZE, 0)
        enter_containment(budget)
        answer = _answer(read)
        signal.setitimer(signal.ITIMER_PROF, 0)
        while answer:
            answer = answer[os.write(sender, answer) :]
        code = 0
    finally:
        os._exit(code)  # runs no exit handler and flushes no buffer of the parent


def _answer(read: Callable[[], Any]) -> bytes:
    """The outcome of `read` as JSON: `value`, `refused` with the parts of an error, or `failed` with the reason."""
    outcome: dict[str, Any]
    try:
        return json.dumps({"value": read()}).encode()
    except MemoryError:
        outcome = {"failed": "reading it takes too much memory"}
    except RecursionError:
        outcome = {"failed": "it is nested too deep to be read"}
    except Exception as error:
        known = error if isinstance(error, RlplanError) else describe_path_error(error)
        if known is None:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}"
            outcome = {"failed": f"{BUG} {place}: {str(error)[:200]}"}
        else:
            parts = {name: str(getattr(known, name))[:MAX_PART] for name in ("what", "where", "rule", "way_out")}
            outcome = {"refused": parts, "kind": type(known).__name__}
    return json.dumps(outcome).encode()
