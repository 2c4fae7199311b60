"""RewardProcess: a process that computes one reward, asked with a deadline, and replaced when it does not keep it.

In: a request. Out: a number, or a RewardFailure. A hang costs its timeout; then the process group is killed.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from rlplan.errors import SpecError
from rlplan.runtime.processes.machine_speed import scaled
from rlplan.runtime.processes.safe_path import module_command
from rlplan.runtime.rewards.child import MAX_ANSWER
from rlplan.runtime.rewards.verdict import RewardFailure, finite

START_S, DEATH_S = 60.0, 1.0
"""For a process to import what it needs; DEATH_S: to be gone once its output is closed. Both scaled."""
ANSWERS = {"value", "failure", "ready", "unable", "ended"}
OWN_PIPE = "it wrote into the run's own pipe"


@dataclass(frozen=True, slots=True)
class _Deadline:
    """So many seconds from now. during: what took longer, for the message."""

    seconds: float
    during: str = ""
    at: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", time.monotonic() + self.seconds)

    def passed(self) -> RewardFailure:
        return RewardFailure(f"timeout after {self.seconds:.4g} s{self.during}")

    def waits_for(self, pipe: int, event: int) -> bool:
        poll = select.poll()
        poll.register(pipe, event)
        return bool(poll.poll(1000 * max(0.0, self.at - time.monotonic())))


class RewardProcess:
    """One process at a time; used by one thread. setting: what child.py reads first. label: the reward's name."""

    def __init__(self, label: str, setting: dict[str, Any], timeout_s: float) -> None:
        self.label, self.setting, self.timeout_s = label, setting, timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready, self._fork, self._unread = False, 0, b""

    def start(self, columns: Collection[str] | None = None) -> None:
        """Start it, unless it runs. columns: that every row has, for a function that asks for some; None: not known.

        Raises: SpecError when it cannot do its work at all.
        """
        self.setting = {**self.setting, "columns": None if columns is None else sorted(columns)}
        try:
            self._be_ready()
        except RewardFailure as error:
            raise SpecError(
                f"the reward {self.label} cannot be computed: {error.reason}",
                where=f"rewards: {self.label}",
                rule="a reward's process starts; its function has the parameters of TRL's or of verl's and asks for no "
                "column that a row lacks",
                way_out="mend the function or the rows, or install what it imports",
            ) from None

    def ask(self, request: dict[str, Any]) -> tuple[float, str]:
        """(reward, note of what is no failure). Raises: RewardFailure."""
        self._be_ready()
        deadline, is_alone = _Deadline(self.timeout_s), False
        try:
            self._say(request, deadline)
            is_alone = True  # in what it does now: the pipes are in order
            said = self._hear(deadline)
            if "ended" in said:
                raise RewardFailure(_ended(int(said["ended"])))
            if self._unread:
                raise RewardFailure(OWN_PIPE)
        except RewardFailure as error:
            self._replace(by_a_fork=is_alone and error.reason != OWN_PIPE)
            raise
        if "failure" in said:
            raise RewardFailure(str(said["failure"]))
        return finite(float.fromhex(str(said["value"]))), str(said.get("note", ""))

    def _launch(self) -> None:
        self._process = subprocess.Popen(
            module_command("rlplan.runtime.rewards.child"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self._say(self.setting, _started())

    def _be_ready(self) -> None:
        """Raises: RewardFailure when there is no process that could be asked."""
        if self._is_ready:
            return
        deadline = _started()
        try:
            if self._process is None:
                self._launch()
            said = self._hear(deadline)
            while "ready" not in said and "unable" not in said:  # last words of the one before
                said = self._hear(deadline)
        except RewardFailure:
            self.close()
            raise
        if "unable" in said:
            self.close()
            raise RewardFailure(str(said["unable"]))
        self._is_ready, self._fork = True, int(said["ready"])

    def _replace(self, *, by_a_fork: bool) -> None:
        """End the one that failed, and begin the next at once: it gets ready while others are asked.

        by_a_fork: it may be a copy of the process that it was a copy of.
        """
        if by_a_fork and self._fork:
            self._is_ready = False
            with contextlib.suppress(OSError):
                os.kill(self._fork, signal.SIGKILL)
            return
        self.close()
        with contextlib.suppress(RewardFailure):
            self._launch()

    def close(self) -> None:
        """End it with everything that it started in its group."""
        process, self._process = self._process, None
        self._is_ready, self._fork, self._unread = False, 0, b""
        if process is None:
            return
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        process.wait()

    def _say(self, request: dict[str, Any], deadline: _Deadline) -> None:
        assert self._process is not None, "it was started"
        assert self._process.stdin is not None, "a pipe"
        pipe, left = self._process.stdin.fileno(), memoryview(json.dumps(request).encode() + b"\n")
        os.set_blocking(pipe, False)
        while left:
            if not deadline.waits_for(pipe, select.POLLOUT):
                raise deadline.passed()
            try:
                left = left[os.write(pipe, left[: select.PIPE_BUF]) :]
            except OSError:
                raise RewardFailure(self._death()) from None

    def _hear(self, deadline: _Deadline) -> dict[str, Any]:
        assert self._process is not None, "it was started"
        assert self._process.stdout is not None, "a pipe"
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            if not deadline.waits_for(pipe, select.POLLIN):
                raise deadline.passed()
            piece = os.read(pipe, MAX_ANSWER)
            if not piece:
                raise RewardFailure(self._death())
            self._unread += piece
            if len(self._unread) > 3 * MAX_ANSWER:
                raise RewardFailure(OWN_PIPE)
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            said = json.loads(line)
        except ValueError:
            raise RewardFailure(OWN_PIPE) from None
        if not isinstance(said, dict) or not ANSWERS & set(said):
            raise RewardFailure(OWN_PIPE)
        return said

    def _death(self) -> str:
        assert self._process is not None, "it was started"
        with contextlib.suppress(subprocess.TimeoutExpired):
            return _ended(self._process.wait(scaled(DEATH_S)))
        return "its process closed its output"


def _ended(code: int) -> str:
    return f"its process ended by signal {-code}" if code < 0 else f"its process ended with exit code {code}"


def _started() -> _Deadline:
    return _Deadline(scaled(START_S), " before it was ready")
