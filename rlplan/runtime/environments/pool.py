"""EnvironmentPool: child processes that run a job's environment and tools, with a deadline for each request.

A process that dies, hangs or sends an invalid answer causes a failure with a reason, never a silent zero. It is killed
and replaced. All requests of a session go to one process, which keeps the session's state. When a process dies, its
sessions are lost, and their next request is a failure.

In: requests by key. Out: answers by key, in any order. Left out: the handling of answers (conversations.py).
"""

import json
import math
import os
import queue
import subprocess
import threading
import uuid
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlplan.errors import SpecError
from rlplan.runtime.environments.tool_calls import DIED, TIMED_OUT
from rlplan.runtime.processes.line_process import Deadline, LateError, LineProcess, NoAnswerError, make_start_deadline
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.processes.safe_path import make_module_command
from rlplan.spec.parts.environment import EnvironmentSpec

MAX_ANSWER_BYTES = 1 << 20
GRACE_S = 0.8
"""Seconds after a deadline for a process to report that its server timed out, before it is killed; scaled."""
CLOSE_S = 5.0
"""Seconds for threads to end; scaled by machine speed."""


@dataclass(frozen=True, slots=True)
class EnvironmentDescription:
    """Properties of a job's environment and tools, reported by their process."""

    is_stateful: bool = False
    """Whether each rollout has its own environment object."""

    has_tools_alone: bool = False
    """Whether that object has only methods that the policy calls, and no `step`."""

    methods: tuple[str, ...] = ()
    """Names of those methods."""

    schemas: tuple[Any, ...] = ()
    """Schemas of all tools, in the format of chat templates."""

    @property
    def tool_names(self) -> list[str]:
        return [schema["function"]["name"] for schema in self.schemas]


NOTHING = EnvironmentDescription()
"""No environment and no tools."""


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """A process's unchecked answer. failure: why there is none; kind: the failure as one of tool_calls.OUTCOMES."""

    value: Any = None
    failure: str = ""
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """An environment's checked answer to a turn."""

    messages: tuple[dict[str, Any], ...] = ()
    """Messages before the next turn."""

    reward: float | None = None
    is_end: bool = True
    """Whether the rollout ends here."""

    failure: str = ""
    """Reason why there is no valid answer; empty if there is one."""


def describe_environment(spec: EnvironmentSpec) -> EnvironmentDescription:
    """Start one process, read its description, and end it. Raises: SpecError when environment or tools are unusable."""
    child = _Child(spec, None, uuid.uuid4().hex, describes=True)
    try:
        if spec.agent is None:
            child.start()
        hello = child.hello if spec.agent is None else child.describe_agent()
    except NoAnswerError as error:
        hello = {"error": str(error)}
    finally:
        child.kill()
    if "error" in hello:
        key = hello.get("key", "agent" if spec.agent is not None else "path" if spec.path else "tools")
        kind = {"tools": "tool", "mcp": "MCP server", "agent": "agent"}.get(key, "environment")
        raise SpecError(
            f"the {kind} cannot be used: {hello['error']}",
            where=f"rollout.environment.{key}: {hello.get('where', spec.path or ', '.join(spec.tools))}",
            rule=hello.get("rule", "a Python file that loads, and a function or class in it"),
            way_out=hello.get("way_out", "correct it; docs/runtime/environments.md lists the supported forms"),
        )
    if spec.agent is not None:
        return NOTHING
    names = [schema["function"]["name"] for schema in hello["schemas"]]
    if len(set(names)) < len(names):
        raise SpecError(
            f"two tools have the same name: {', '.join(names)}",
            where="rollout.environment.tools",
            rule="functions, methods of the environment and tools of MCP servers have unique names",
            way_out="rename one",
        )
    return EnvironmentDescription(
        hello["is_stateful"], hello["has_tools_alone"], tuple(hello["methods"]), tuple(hello["schemas"])
    )


class EnvironmentPool:
    """See the module docstring. `close` ends every process."""

    def __init__(self, spec: EnvironmentSpec, log: Path, described: EnvironmentDescription = NOTHING) -> None:
        """log: file for the output of the processes."""
        self.spec, self.described = spec, described
        self._work = threading.Condition()
        self._is_closed = False
        self._shared: deque[tuple[Any, str]] = deque()
        """Requests that any process may answer."""
        self._pinned: list[deque[tuple[Any, str]]] = [deque() for _ in range(spec.num_workers)]
        """Requests that need the state of a certain process."""
        self._places: dict[str, int] = {}
        """Index of each session's process."""
        self._answers: queue.SimpleQueue[tuple[Any, RawAnswer]] = queue.SimpleQueue()
        run = uuid.uuid4().hex
        self._children = [_Child(spec, log, run) for _ in range(spec.num_workers)]
        self._threads = [
            threading.Thread(target=self._serve, args=place, daemon=True) for place in enumerate(self._children)
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, key: Any, question: dict[str, Any], session: str | None = None) -> None:
        """Queue a request. session: the session whose state it needs; None: any process may answer."""
        line = json.dumps({**question, "session": session})
        with self._work:
            self._get_queue(session).append((key, line))
            self._work.notify_all()

    def forget(self, session: str) -> None:
        """Forget a session; no request of it will follow."""
        with self._work:
            self._places.pop(session, None)

    def take_answers(self) -> list[tuple[Any, RawAnswer]]:
        answers = []
        while not self._answers.empty():
            answers.append(self._answers.get())
        return answers

    @property
    def pids(self) -> list[int]:
        return [child.process.pid for child in self._children if child.process is not None]

    def close(self) -> None:
        with self._work:
            self._is_closed = True
            self._work.notify_all()
        # before the threads are joined, because each may wait for an answer of its process
        for child in self._children:
            child.close()
        for thread in self._threads:
            thread.join(timeout=scale_seconds(CLOSE_S))
        for child in self._children:
            child.kill()

    def _get_queue(self, session: str | None) -> deque[tuple[Any, str]]:
        if session is None:
            return self._shared
        if session not in self._places:
            load = Counter(self._places.values())  # the process with the fewest sessions gets a new one
            self._places[session] = min(range(len(self._pinned)), key=lambda place: load[place])
        return self._pinned[self._places[session]]

    def _take_next(self, place: int) -> tuple[Any, str] | None:
        with self._work:
            self._work.wait_for(lambda: self._is_closed or self._pinned[place] or self._shared)
            # pinned requests first: no other process can answer them
            return None if self._is_closed else (self._pinned[place] or self._shared).popleft()

    def _serve(self, place: int, child: "_Child") -> None:
        while (question := self._take_next(place)) is not None:
            key, line = question
            self._answers.put((key, child.ask(line)))


class _Child:
    """One process, started on first use. hello: its own description."""

    def __init__(self, spec: EnvironmentSpec, log: Path | None, run: str, *, describes: bool = False) -> None:
        """run: id of this run, part of session ids at a server. describes: whether tool schemas are wanted."""
        self.spec, self.log, self.describes = spec, log, describes
        named = {"path": spec.path, "tools": spec.tools, "url": spec.url, "mcp": spec.mcp, "timeout_s": spec.timeout_s}
        self.setting = {**named, "describes": describes, "run": run}
        self.process: LineProcess | None = None
        self.hello: dict[str, Any] = {}
        self._is_closed = False

    def ask(self, line: str) -> RawAnswer:
        try:
            process = self.process or self.start()
            # A process that waits for a server has the same deadline itself; it must be able to report the timeout.
            deadline = Deadline(self.spec.timeout_s + (scale_seconds(GRACE_S) if self.spec.is_remote else 0.0))
            process.send(line, deadline)
            answer = process.receive(deadline)
        except NoAnswerError as error:
            self.kill()
            return RawAnswer(failure=str(error), kind=TIMED_OUT if isinstance(error, LateError) else DIED)
        if "error" in answer:
            return RawAnswer(failure=str(answer["error"])[:500], kind=str(answer.get("kind", DIED)))
        return RawAnswer(answer.get("said"))

    def start(self) -> LineProcess:
        """Start the process and read its description. Raises: NoAnswerError."""
        if self._is_closed:
            raise NoAnswerError("the run has ended")
        command = make_module_command("rlplan.runtime.environments.child", json.dumps(self.setting))
        with (self.log or Path(os.devnull)).open("ab") as log:
            self.process = process = LineProcess(command, log, MAX_ANSWER_BYTES)
        if self._is_closed:  # `close` may have come between the check above and the assignment
            self.close()
        self.hello = process.receive(make_start_deadline())
        if "error" in self.hello and not self.describes:
            raise NoAnswerError(str(self.hello["error"]))
        return process

    def describe_agent(self) -> dict[str, Any]:
        """Let the process that starts agents load the agent's file. Raises: NoAnswerError."""
        command = make_module_command("rlplan.runtime.gateway.agent_starter", json.dumps(self.spec.agent))
        self.process = LineProcess(command, subprocess.DEVNULL, MAX_ANSWER_BYTES)
        return dict(self.process.receive(make_start_deadline())["lines"])

    def kill(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.close()

    def close(self) -> None:
        """End the process for good; the thread that waits for its answer then cleans up."""
        self._is_closed, process = True, self.process
        if process is not None:
            process.kill()


def measure_resident_bytes(pids: Sequence[int]) -> int:
    """Resident memory of processes, in bytes; processes that have ended count as 0."""
    total = 0
    for pid in pids:
        with suppress(OSError, IndexError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total


def read_answer(raw: RawAnswer) -> Answer:
    """Check a process's answer; an invalid answer becomes a failure.

    >>> read_answer(RawAnswer({"observation": "too low"})).messages[0]["content"]
    'too low'
    >>> read_answer(RawAnswer({"reward": "1"})).failure
    "reward is '1', not a finite number"
    """
    answer = raw.value
    if raw.failure:
        return Answer(failure=raw.failure)
    if not isinstance(answer, dict) or not set(answer) <= {"observation", "reward", "done"}:
        return Answer(failure=f"the answer is {str(answer)[:200]!r}, not a dict with observation, reward or both")
    observation, reward = answer.get("observation"), answer.get("reward")
    single = [] if observation is None else [{"role": "user", "content": observation}]
    messages = observation if isinstance(observation, list) else single
    if not all(_is_message(message) for message in messages):
        return Answer(failure=f"observation is {str(observation)[:200]!r}, not a text or a list of messages")
    if reward is not None and not _is_number(reward):
        return Answer(failure=f"reward is {str(reward)[:200]!r}, not a finite number")
    is_done = answer.get("done", reward is not None)
    if not isinstance(is_done, bool):
        return Answer(failure=f"done is {str(is_done)[:200]!r}, not true or false")
    return Answer(tuple(messages), None if reward is None else float(reward), is_done or not messages)


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _is_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False
