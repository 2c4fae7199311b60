"""LineProcess: a process that is asked and answers line by line, in JSON, each time with a deadline.

In: a command, and lines. Out: answers, or a NoAnswerError that says why there is none. It is started in a process group
of its own, which ends with it.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from rlplan.runtime.processes.machine_speed import scaled

DEATH_S = 1.0
"""To be gone once its output is closed; scaled."""


class NoAnswerError(Exception):
    """Nothing came that is an answer; says why."""


class LateError(NoAnswerError):
    """Nothing came in time."""


class GarbledError(NoAnswerError):
    """What came is no answer."""


class TooLongError(GarbledError):
    """What came is longer than an answer may be."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """So many seconds from now. during: what took longer, for the message."""

    seconds: float
    during: str = ""
    at: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", time.monotonic() + self.seconds)

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.at

    def wait_for(self, pipe: int, event: int) -> None:
        """Until a pipe can be read or written. Raises: LateError at the deadline."""
        poll = select.poll()
        poll.register(pipe, event)
        if not poll.poll(1000 * max(0.0, self.at - time.monotonic())):
            raise LateError(f"timeout after {self.seconds:.4g} s{self.during}")


class LineProcess:
    """See the module docstring. errors: where its standard error goes. max_bytes: of an answer. unread: after it."""

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
        os.set_blocking(self._pipes[0].fileno(), False)

    def say(self, line: str, deadline: Deadline) -> None:
        """Raises: NoAnswerError where it does not take the line."""
        pipe, left = self._pipes[0].fileno(), memoryview(line.encode() + b"\n")
        while left:
            deadline.wait_for(pipe, select.POLLOUT)
            try:
                left = left[os.write(pipe, left[: select.PIPE_BUF]) :]
            except OSError:
                raise NoAnswerError(self._death()) from None

    def hear(self, deadline: Deadline) -> dict[str, Any]:
        """The next answer. Raises: NoAnswerError."""
        pipe = self._pipes[1].fileno()
        while b"\n" not in self.unread:
            deadline.wait_for(pipe, select.POLLIN)
            piece = os.read(pipe, 1 << 16)
            if not piece:
                raise NoAnswerError(self._death())
            self.unread += piece
            if len(self.unread) > self.max_bytes:
                raise TooLongError(f"an answer of more than {self.max_bytes} bytes")
        line, _, self.unread = self.unread.partition(b"\n")
        try:
            said = json.loads(line)
        except ValueError:
            raise GarbledError("an answer that is not JSON") from None
        if not isinstance(said, dict):
            raise GarbledError("an answer that is no JSON object")
        return said

    def kill(self) -> None:
        """End it with everything that it started in its group; a thread that waits for its answer gets an error."""
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill it, and leave nothing of it."""
        self.kill()
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.wait()

    def _death(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return ended(self._process.wait(scaled(DEATH_S)))
        return "its process closed its output"


def ended(code: int) -> str:
    """How a process ended, in words."""
    return f"its process ended by signal {-code}" if code < 0 else f"its process ended with exit code {code}"
