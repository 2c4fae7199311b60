"""LineProcess: a child process that gets requests and returns answers as JSON lines, each with a deadline.

It runs in its own process group, which is killed with it. Rewards, environments, tokenizers and MCP servers all run
untrusted or fragile code through this mechanism.

In: a command, and lines. Out: answers, or a NoAnswerError with the reason.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from rlplan.runtime.processes.machine_speed import scale_seconds

START_S = 60.0
"""Seconds for a process to import its packages, and the job's files; scaled by machine speed."""
MAX_DEPTH = 64
"""Deepest nesting of an answer: readers recurse, some with eight calls per level, and Python allows 1,000 calls."""
DEATH_S = 1.0
"""Seconds for a process to exit after it closed its output; scaled by machine speed."""


class NoAnswerError(Exception):
    """There is no valid answer; the message gives the reason."""


class LateError(NoAnswerError):
    """No answer arrived before the deadline."""


class GarbledError(NoAnswerError):
    """The output is not a valid answer."""


class TooLongError(GarbledError):
    """The output is longer than an answer may be."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time, counted from the creation of this object."""

    seconds: float
    """Allowed time."""

    during: str = ""
    """Suffix of the timeout message, such as ` while it started`."""

    at: float = field(init=False)
    """The deadline on the monotonic clock."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", time.monotonic() + self.seconds)

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self.at - time.monotonic())

    def make_error(self) -> LateError:
        """The error for a deadline that has passed."""
        return LateError(f"timeout after {self.seconds:.4g} s{self.during}")

    def check(self) -> float:
        """Positive seconds until the deadline. Raises: LateError when none are left."""
        if not (remaining_s := self.remaining_s):
            raise self.make_error()
        return remaining_s

    def await_pipe(self, pipe: int, event: int, *, looks_once: bool = False) -> None:
        """Wait until a pipe can be read or written. Raises: LateError at the deadline, even if it can.

        looks_once: whether a pipe that is ready at once is accepted after the deadline too.
        """
        poll = select.poll()
        poll.register(pipe, event)
        if not poll.poll(1000 * (self.remaining_s if looks_once else self.check())):
            raise self.make_error()


def make_start_deadline() -> Deadline:
    """The deadline for the first answer of a new process."""
    return Deadline(scale_seconds(START_S), " while it started")


class LineProcess:
    """See the module docstring. `unread` holds output that follows the last answer."""

    def __init__(
        self,
        command: Sequence[str],
        errors: int | IO[bytes],
        max_bytes: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=errors, env=environment, start_new_session=True
        )
        assert self._process.stdin is not None, "a pipe"
        assert self._process.stdout is not None, "a pipe"
        self._pipes = (self._process.stdin, self._process.stdout)
        self.pid, self.max_bytes, self.unread = self._process.pid, max_bytes, b""
        os.set_blocking(self._pipes[0].fileno(), False)  # a write to a process that does not read must not block

    def send(self, line: str, deadline: Deadline) -> None:
        """Send a line. Raises: NoAnswerError when the process does not read it."""
        pipe, left = self._pipes[0].fileno(), memoryview(line.encode() + b"\n")
        while left:
            deadline.await_pipe(pipe, select.POLLOUT)
            try:
                # POLLOUT guarantees room for PIPE_BUF bytes only.
                left = left[os.write(pipe, left[: select.PIPE_BUF]) :]
            except OSError:
                raise NoAnswerError(self._describe_death(deadline)) from None

    def receive(self, deadline: Deadline) -> dict[str, Any]:
        """Wait for the next answer; with 0 s, take one that has already arrived. Raises: NoAnswerError."""
        pipe, looks_once = self._pipes[1].fileno(), not deadline.seconds
        while b"\n" not in self.unread:
            deadline.await_pipe(pipe, select.POLLIN, looks_once=looks_once)
            looks_once = False  # an answer that comes piece by piece would never end
            piece = os.read(pipe, 1 << 16)
            if not piece:
                raise NoAnswerError(self._describe_death(deadline))
            self.unread += piece
            if len(self.unread) > self.max_bytes:
                raise TooLongError(f"an answer of more than {self.max_bytes} bytes")
        line, _, self.unread = self.unread.partition(b"\n")
        answer = parse_json(line)
        if not isinstance(answer, dict):
            raise GarbledError("an answer that is not a JSON object")
        return answer

    def kill(self) -> None:
        """Kill the process group; a thread that waits for an answer gets an error."""
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process group, close the pipes and reap the process."""
        self.kill()
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.wait()

    def _describe_death(self, deadline: Deadline) -> str:
        death_s = scale_seconds(DEATH_S)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return describe_exit(self._process.wait(min(death_s, deadline.remaining_s)))
        return "its process closed its output"


def parse_json(text: bytes) -> Any:
    """Parse an answer. Raises: GarbledError."""
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        raise GarbledError("an answer that is not JSON") from None
    check_depth(answer)
    return answer


def check_depth(value: Any) -> None:
    """Check that a value of JSON is not nested so deeply that its readers fail. Raises: GarbledError."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [part for container in level for part in _list_parts(container)]
        if not level:
            return
    raise GarbledError(f"JSON nested more than {MAX_DEPTH} deep")


def _list_parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def describe_exit(code: int) -> str:
    """How a process ended, in words."""
    return f"its process ended by signal {-code}" if code < 0 else f"its process ended with exit code {code}"
