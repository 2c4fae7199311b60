"""EnvironmentPool: processes that answer the policy between its turns, each question with a deadline.

In: questions by key. Out: answers by key, as they come, in any order. A process that dies, hangs or says what is no
answer is a failure with its reason, never a silent zero; it is killed, and another takes its place.
Left out: what becomes of an answer (conversations.py).
"""

import json
import math
import os
import queue
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlplan.errors import SpecError
from rlplan.runtime.processes.line_process import Deadline, LineProcess, NoAnswerError
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
    try:
        child.start()
    except NoAnswerError as error:
        raise SpecError(
            f"the environment cannot be used: {error}",
            where=f"{where}: {spec.path}",
            rule="a Python file that can be loaded, and a function in it",
            way_out="correct it; python -m rlplan.runtime.environments.child FILE FUNCTION shows more",
        ) from None
    finally:
        child.kill()


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
        self.process: LineProcess | None = None
        self._is_closed = False

    def ask(self, line: str) -> Answer:
        try:
            process = self.process or self.start()
            deadline = Deadline(self.spec.timeout_s)
            process.say(line, deadline)
            return read_answer(process.hear(deadline))
        except NoAnswerError as error:
            self.kill()
            return Answer(failure=str(error))

    def start(self) -> LineProcess:
        """Start it and hear whether the function is there. Raises: NoAnswerError."""
        if self._is_closed:
            raise NoAnswerError("the run has ended")
        command = module_command("rlplan.runtime.environments.child", str(self.spec.file), self.spec.function)
        with (self.log or Path(os.devnull)).open("ab") as log:
            self.process = process = LineProcess(command, log, MAX_ANSWER_BYTES)
        if self._is_closed:
            self.close()
        said = process.hear(Deadline(scaled(START_S), " before it was ready"))
        if "error" in said:
            raise NoAnswerError(str(said["error"]))
        return process

    def kill(self) -> None:
        """End it, with everything that it started."""
        process, self.process = self.process, None
        if process is not None:
            process.close()

    def close(self) -> None:
        """End it for good; the thread that waits for its answer puts it away."""
        self._is_closed, process = True, self.process
        if process is not None:
            process.kill()


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
