"""RewardProcess: a process that computes one reward, asked with a deadline, and replaced when it does not keep it.

In: a request. Out: a number, or a RewardFailure. A hang costs its timeout; then the process group is killed.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

from rlplan.errors import SpecError
from rlplan.runtime.rewards.child import MAX_ANSWER
from rlplan.runtime.rewards.verdict import RewardFailure, finite

START_S = 60.0
"""For a process to import what it needs."""


class RewardProcess:
    """One process at a time; used by one thread. setting: what child.py reads first. label: the reward's name."""

    def __init__(self, label: str, setting: dict[str, Any], timeout_s: float) -> None:
        self.label, self.setting, self.timeout_s = label, setting, timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, unless it runs. Raises: SpecError when it cannot do its work at all."""
        if self._process is not None:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlplan.runtime.rewards.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            self._say(self.setting, time.monotonic() + START_S)
            said = self._hear(time.monotonic() + START_S)
        except RewardFailure as error:
            said = {"failure": error.reason}
        if "failure" in said:
            self.close()
            raise SpecError(
                f"the reward {self.label} cannot be computed: {said['failure']}",
                where=f"rewards: {self.label}",
                rule="a reward's process starts, and its function has the parameters of TRL's or of verl's",
                way_out="mend the function, or install what it imports",
            )

    def ask(self, request: dict[str, Any]) -> float:
        """The reward. Raises: RewardFailure."""
        self.start()
        deadline = time.monotonic() + self.timeout_s
        try:
            self._say(request, deadline)
            said = self._hear(deadline)
        except RewardFailure:
            self.close()
            raise
        if "failure" in said:
            raise RewardFailure(str(said["failure"]))
        return finite(float.fromhex(str(said["value"])))

    def close(self) -> None:
        """End it with everything that it started in its group."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        process.wait()

    def _say(self, request: dict[str, Any], deadline: float) -> None:
        assert self._process is not None, "it was started"
        assert self._process.stdin is not None, "a pipe"
        pipe, left = self._process.stdin.fileno(), memoryview(json.dumps(request).encode() + b"\n")
        os.set_blocking(pipe, False)
        while left:
            if not _is_ready(pipe, select.POLLOUT, deadline):
                raise RewardFailure("timeout")
            try:
                left = left[os.write(pipe, left[: select.PIPE_BUF]) :]
            except OSError:
                raise RewardFailure(self._death()) from None

    def _hear(self, deadline: float) -> dict[str, Any]:
        assert self._process is not None, "it was started"
        assert self._process.stdout is not None, "a pipe"
        pipe, heard = self._process.stdout.fileno(), b""
        while not heard.endswith(b"\n"):
            if not _is_ready(pipe, select.POLLIN, deadline):
                raise RewardFailure(f"timeout after {self.timeout_s:g} s")
            piece = os.read(pipe, MAX_ANSWER)
            if not piece:
                raise RewardFailure(self._death())
            heard += piece
            if len(heard) > 2 * MAX_ANSWER:
                raise RewardFailure("it wrote into the run's own pipe")
        try:
            said = json.loads(heard)
        except ValueError:
            raise RewardFailure("it wrote into the run's own pipe") from None
        if not isinstance(said, dict) or not {"value", "failure", "ready"} & set(said):
            raise RewardFailure("it wrote into the run's own pipe")
        return said

    def _death(self) -> str:
        assert self._process is not None, "it was started"
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(1.0)
            return f"its process ended by signal {-code}" if code < 0 else f"its process ended with exit code {code}"
        return "its process closed its output"


def _is_ready(pipe: int, event: int, deadline: float) -> bool:
    poll = select.poll()
    poll.register(pipe, event)
    return bool(poll.poll(1000 * max(0.0, deadline - time.monotonic())))
