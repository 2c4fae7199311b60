"""EnvironmentPool: processes that answer the policy between its turns, each question with a deadline.

In: questions by key. Out: answers by key, as they come, in any order. A process that dies, hangs or says what is no
answer is a failure with its reason, never a silent zero; it is killed, and another takes its place.
Left out: what becomes of an answer (conversations.py).
"""

import json
import math
import os
import queue
import select
import signal
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rlplan.errors import SpecError
from rlplan.runtime.processes.machine_speed import scaled
from rlplan.runtime.processes.safe_path import module_command
from rlplan.spec.parts.environment import EnvironmentSpec

MAX_ANSWER_BYTES = 1 << 20
START_S, CLOSE_S = 60.0, 5.0
"""For the job's own imports, which come before the first question; for threads to end. Both scaled."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What an environment says of a turn: an observation for another turn, a reward at the end, both or neither.

    failure: why there is none.
    """

    observation: str | None = None
    reward: float | None = None
    failure: str = ""


def check_environment(spec: EnvironmentSpec, where: str = "rollout.environment.path") -> None:
    """Start one process and end it. Raises: SpecError when the function cannot be had."""
    child = _Child(spec, None)
    failure = child.start()
    child.kill()
    if failure:
        raise SpecError(
            f"the environment cannot be used: {failure}",
            where=f"{where}: {spec.path}",
            rule="a Python file that can be loaded, and a function in it",
            way_out="correct it; python -m rlplan.runtime.environments.child FILE FUNCTION shows more",
        )


class EnvironmentPool:
    """See the module docstring. `close` ends every process."""

    def __init__(self, spec: EnvironmentSpec, log: Path) -> None:
        """log: what the processes print."""
        self.spec = spec
        self._questions: queue.SimpleQueue[tuple[Any, str] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, Answer]] = queue.SimpleQueue()
        self._children = [_Child(spec, log) for _ in range(spec.num_workers)]
        self._threads = [threading.Thread(target=self._serve, args=(child,), daemon=True) for child in self._children]
        for thread in self._threads:
            thread.start()

    def ask(self, key: Any, messages: list[dict[str, str]], answer: str) -> None:
        """Begin to ask. messages: the turns so far; answer: the prompt's right answer."""
        self._questions.put((key, json.dumps({"messages": messages, "answer": answer})))

    def ready(self) -> list[tuple[Any, Answer]]:
        found = []
        while not self._answers.empty():
            found.append(self._answers.get())
        return found

    @property
    def pids(self) -> list[int]:
        return [child.process.pid for child in self._children if child.process is not None]

    def resident_bytes(self) -> int:
        total = 0
        for pid in self.pids:
            with suppress(OSError, IndexError):
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return total

    def close(self) -> None:
        for _ in self._threads:
            self._questions.put(None)
        for child in self._children:
            child.close()
        for thread in self._threads:
            thread.join(timeout=scaled(CLOSE_S))
        for child in self._children:
            child.kill()

    def _serve(self, child: "_Child") -> None:
        while (question := self._questions.get()) is not None:
            key, line = question
            self._answers.put((key, child.ask(line)))


class _Child:
    """One process, started when it is first needed."""

    def __init__(self, spec: EnvironmentSpec, log: Path | None) -> None:
        self.spec, self.log = spec, log
        self.process: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self._is_closed = False

    def ask(self, line: str) -> Answer:
        if self.process is None and (failure := self.start()):
            self.kill()
            return Answer(failure=failure)
        assert self.process is not None, "it was started"
        try:
            _pipe(self.process.stdin).write(line.encode() + b"\n")
            _pipe(self.process.stdin).flush()
        except OSError:
            self.kill()
            return Answer(failure="the process is gone")
        said, failure = self._line(self.spec.timeout_s)
        if failure:
            self.kill()
            return Answer(failure=failure)
        return read_answer(said)

    def start(self) -> str:
        """Start it and hear whether the function is there. Gives what is wrong."""
        if self._is_closed:
            return "the run has ended"
        command = module_command("rlplan.runtime.environments.child", str(self.spec.file), self.spec.function)
        self._rest = b""
        with (self.log or Path(os.devnull)).open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )
        if self._is_closed:
            self.close()
        said, failure = self._line(scaled(START_S))
        return failure or str(said.get("error", ""))

    def kill(self) -> None:
        """End it, with everything that it started."""
        process, self.process = self.process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                _pipe(pipe).close()

    def close(self) -> None:
        """End it for good."""
        self._is_closed = True
        process = self.process
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # whoever waits for its answer hears that it is gone

    def _line(self, timeout_s: float) -> tuple[dict[str, Any], str]:
        """(the next line, what is wrong). Reads no more than a line may have, and waits no longer than it may take."""
        assert self.process is not None, "it was started"
        source, deadline = _pipe(self.process.stdout), time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([source], [], [], left_s)[0]:
                return {}, f"no answer within {timeout_s:.4g} s"
            part = os.read(source.fileno(), 1 << 16)
            if not part:
                return {}, "the process is gone"
            self._rest += part
            if len(self._rest) > MAX_ANSWER_BYTES:
                return {}, f"an answer of more than {MAX_ANSWER_BYTES} bytes"
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            said = json.loads(line)
        except ValueError:
            return {}, "an answer that is not JSON"
        return (said, "") if isinstance(said, dict) else ({}, "an answer that is not JSON")


def read_answer(said: dict[str, Any]) -> Answer:
    """What a process said, checked: an answer that is none is a failure.

    >>> read_answer({"said": {"observation": "too low"}}).observation, read_answer({"said": {"reward": "1"}}).failure
    ('too low', "reward is '1', not a finite number")
    """
    if "error" in said:
        return Answer(failure=str(said["error"])[:500])
    answer = said.get("said")
    if not isinstance(answer, dict) or not set(answer) <= {"observation", "reward"}:
        return Answer(failure=f"the answer is {str(answer)[:200]!r}, not a dict with observation, reward or both")
    observation, reward = answer.get("observation"), answer.get("reward")
    if observation is not None and not isinstance(observation, str):
        return Answer(failure=f"observation is {str(observation)[:200]!r}, not a text")
    if reward is not None and not _is_number(reward):
        return Answer(failure=f"reward is {str(reward)[:200]!r}, not a finite number")
    return Answer(observation, None if reward is None else float(reward))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _pipe(pipe: Any) -> BinaryIO:
    assert pipe is not None, "the process has pipes"
    file: BinaryIO = pipe
    return file
