"""The process that starts agents: a forked copy of itself for a function, another program for a command.

A function's file is loaded here once, so that its packages are in memory. Each fork loads the file and the modules
beside it again, with the rollout's environment variables. So a client that a module creates at its import belongs to
the right rollout. Agents have process groups of their own, which are killed when the agent ends.

In: the agent as the argument, then orders to start and kill, as JSON lines. Out: a description, then the outcome of
each agent that has ended.
"""

import ctypes
import gc
import json
import math
import os
import select
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlplan.runtime.environments.protocols import call_by_name
from rlplan.runtime.processes.answer_channel import AnswerChannel
from rlplan.runtime.processes.child_processes import die_with_parent, list_child_processes, raise_open_files
from rlplan.runtime.processes.line_process import describe_exit
from rlplan.runtime.processes.safe_path import EXECUTABLE, load_file

MAX_ANSWER = 1 << 20
"""Most bytes of an agent's answer; the rest of a command's output is dropped."""
ENDED = '{"failure": "the agent ended its process without a result"}'
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True, slots=True)
class _Agent:
    """A running agent. output: a file in memory with its standard output, or its function's result."""

    name: str
    pid: int
    output: int


class AgentStarter:
    """See the module docstring. agent: FILE.py:NAME, or a command."""

    def __init__(self, agent: str | list[str], channel: AnswerChannel) -> None:
        self.agent, self.channel, self.poll = agent, channel, select.poll()
        self._running: dict[int, _Agent] = {}
        """Agents by a descriptor that is readable once the agent has exited."""
        self._groups: set[int] = set()
        """Process groups of ended agents that may still have members."""

    def serve(self) -> None:
        """Obey orders until the other end closes or sends {}; then kill all agents and processes that they started."""
        orders, unread = self.channel.requests.fileno(), b""
        self.poll.register(orders, select.POLLIN)
        while True:
            for descriptor, _ in self.poll.poll():
                if descriptor in self._running:
                    self._end(descriptor)
                    continue
                data = os.read(orders, 1 << 16)
                *lines, unread = (unread + data).split(b"\n")
                if not data or b"{}" in lines:
                    for process in list_child_processes():
                        process.kill()
                    return
                for line in lines:
                    self._obey(json.loads(line))

    def _obey(self, order: dict[str, Any]) -> None:
        if "start" in order:
            try:
                self._start(order)
            except OSError as error:
                self._report(order["start"], {"failure": f"the agent cannot be started: {error}"})
        for agent in [agent for agent in self._running.values() if agent.name == order.get("kill")]:
            _kill_group(agent.pid)

    def _start(self, order: dict[str, Any]) -> None:
        output, starter = os.memfd_create("output"), os.getpid()
        if not (pid := os.fork()):
            die_with_parent()
            if os.getppid() != starter:  # it was killed before this process asked to die with it
                os._exit(1)
            _become_agent(self.agent, order, output)
        with suppress(OSError):  # here and in the child, so that the group exists before either goes on
            os.setpgid(pid, pid)
        leaving = os.pidfd_open(pid)
        self._running[leaving] = _Agent(order["start"], pid, output)
        self.poll.register(leaving, select.POLLIN)

    def _end(self, leaving: int) -> None:
        """Clean up after an agent that has exited, and report its outcome."""
        agent = self._running.pop(leaving)
        _kill_group(agent.pid)  # before it is reaped: its id cannot belong to another group yet
        code = os.waitstatus_to_exitcode(os.waitpid(agent.pid, 0)[1])
        self._groups.add(agent.pid)
        for group in [*self._groups]:  # killed members become this process's children, and die a moment later
            try:
                while os.waitpid(-group, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                self._groups.remove(group)
        self.poll.unregister(leaving)
        text = os.pread(agent.output, MAX_ANSWER, 0).decode("utf-8", "replace")
        for descriptor in (leaving, agent.output):
            os.close(descriptor)
        outcome = {"failure": describe_exit(code)}
        if not code:
            outcome = {"answer": text.strip()} if isinstance(self.agent, list) else json.loads(text or ENDED)
        self._report(agent.name, outcome)

    def _report(self, name: str, outcome: dict[str, Any]) -> None:
        self.channel.send({"lines": [[name, outcome]]})


def describe_agent(agent: str | list[str]) -> dict[str, str]:
    """Load the function's file. Returns: the fault, if it cannot be used; else nothing."""
    if isinstance(agent, list):
        return {}
    path, _, name = agent.rpartition(":")
    os.environ.setdefault("OPENAI_API_KEY", "set for each rollout")
    try:
        is_there = callable(getattr(load_file(path, "job_agent"), name, None))
        with suppress(Exception):  # a client imports much when it is first used: once here, not in each fork
            sys.modules["openai"].OpenAI(api_key="-").chat.completions.create  # noqa: B018
        gc.freeze()  # forks share these objects' memory as long as no collection visits them
    except BaseException as error:  # a job's file may raise SystemExit
        return {"error": f"{type(error).__name__}: {str(error)[:500]}", "where": agent}
    return {} if is_there else {"error": f"there is no function '{name}' in {path}", "where": agent}


def _become_agent(agent: str | list[str], order: dict[str, Any], output: int) -> None:
    """Become the agent; never return. A command reads the row on standard input, and its output is the answer."""
    code = 1
    try:
        os.setpgid(0, 0)
        os.environ.update(order["variables"])
        if isinstance(agent, list):
            row = os.memfd_create("row")
            os.write(row, json.dumps(order["row"]).encode())
            os.lseek(row, 0, os.SEEK_SET)
            os.dup2(row, 0)
            os.dup2(output, 1)
            os.execvp(EXECUTABLE if agent[0] in ("python", "python3") else agent[0], agent)
        result = json.dumps(_call(agent, order["row"])).encode()
        if len(result) > MAX_ANSWER:
            result = json.dumps({"failure": f"the agent's answer has more than {MAX_ANSWER} bytes"}).encode()
        os.write(output, result)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(code)  # not `sys.exit`, which would run the starter's own code and exit handlers in the fork


def _call(agent: str, row: dict[str, Any]) -> dict[str, Any]:
    """Call the agent's function with the columns that it takes, and return its outcome."""
    path, _, name = agent.rpartition(":")
    folder = Path(path).resolve().parent
    files = {key: getattr(module, "__file__", None) for key, module in sys.modules.items()}
    for key in [key for key, file in files.items() if file and Path(file).parent == folder]:
        del sys.modules[key]
    try:
        return read_result(call_by_name(getattr(load_file(path, "job_agent"), name), row))
    except BaseException as error:
        traceback.print_exc()
        return {"failure": f"{type(error).__name__}: {str(error)[:500]}"}


def read_result(result: Any) -> dict[str, Any]:
    """A function's result as an outcome: a text is the answer, a number the reward; or a dict with either or both.

    >>> read_result("42"), read_result(0.5), read_result(None)
    ({'answer': '42'}, {'reward': 0.5}, {})
    >>> read_result({"answer": "42", "score": 1})["failure"]
    "the agent returned {'answer': '42', 'score': 1}, not a text, a number, or a dict with answer and reward"
    """
    kinds = {str: "answer", int: "reward", float: "reward"}
    outcome = {} if result is None else {kinds.get(type(result), ""): result}
    if isinstance(result, dict):
        outcome = {key: value for key, value in result.items() if value is not None or key not in ("answer", "reward")}
    for key, value in outcome.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not (isinstance(value, str) if key == "answer" else key == "reward" and is_number):
            why = f"the agent returned {str(result)[:200]}, not a text, a number, or a dict with answer and reward"
            return {"failure": why}
    return outcome


def _kill_group(pid: int) -> None:
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent()
    raise_open_files()
    # What leaves its agent's process group stays below this process, which kills it at the end.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    agent_of_job, to_driver = json.loads(sys.argv[1]), AnswerChannel()
    description = describe_agent(agent_of_job)
    to_driver.send({"lines": description})
    if not description:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)  # the driver's end closes the pipe, and everything is cleaned up
        AgentStarter(agent_of_job, to_driver).serve()
