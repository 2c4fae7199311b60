"""The process that starts agents: a forked copy of itself for a function, another program for a command.

A function's file is loaded here once, so that its packages are in memory. Each fork loads the file and the modules
beside it again, with the rollout's environment variables: a client that a module creates when it is imported belongs to
its rollout. Agents have process groups of their own, which are killed when the agent ends.

In: the agent as the argument, then orders to start and kill, as JSON lines. Out: a description, then one line per agent
that has ended.
"""

import json
import math
import os
import select
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlplan.runtime.environments.protocols import call_by_name
from rlplan.runtime.processes.answer_channel import AnswerChannel
from rlplan.runtime.processes.child_processes import die_with_parent, list_child_processes
from rlplan.runtime.processes.line_process import describe_exit
from rlplan.runtime.processes.safe_path import load_file

MAX_ANSWER = 1 << 20
"""Most bytes of an agent's answer; the rest is dropped."""
_CHUNK_BYTES = 1 << 16
_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class _Agent:
    """A running agent. pipe: its standard output, or its function's result."""

    name: str
    pid: int
    pipe: int
    output: bytearray = field(default_factory=bytearray)


class AgentStarter:
    """See the module docstring. agent: FILE.py:NAME, or a command."""

    def __init__(self, agent: str | list[str]) -> None:
        self.agent = agent
        self._by_exit: dict[int, _Agent] = {}
        """Running agents by a descriptor that is readable once the agent has exited."""
        self._by_pipe: dict[int, _Agent] = {}

    def describe(self) -> dict[str, str]:
        """Load the function's file; the fault, if it cannot be used."""
        if isinstance(self.agent, list):
            return {}
        path, _, name = self.agent.rpartition(":")
        os.environ.setdefault("OPENAI_API_KEY", "set for each rollout")
        try:
            module = load_file(path, "job_agent")
        except BaseException as error:  # a job's file may raise SystemExit
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {str(error)[:500]}", "where": self.agent}
        if not callable(getattr(module, name, None)):
            return {"error": f"there is no function '{name}' in {path}", "where": self.agent}
        return {}

    def serve(self, channel: AnswerChannel) -> None:
        """Obey orders until the other end closes; then kill all agents."""
        orders, unread = channel.requests.fileno(), b""
        self._poll = select.poll()
        self._poll.register(orders, select.POLLIN)
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._by_exit:
                    channel.send(self._end(descriptor))
                elif descriptor in self._by_pipe:
                    self._read(self._by_pipe[descriptor])
                elif descriptor == orders:
                    data = os.read(orders, _CHUNK_BYTES)
                    if not data:
                        return self._close()
                    *lines, unread = (unread + data).split(b"\n")
                    for line in lines:
                        self._obey(json.loads(line), channel)

    def _obey(self, order: dict[str, Any], channel: AnswerChannel) -> None:
        if "start" in order:
            try:
                self._start(order)
            except OSError as error:
                channel.send({"ended": order["start"], "failure": f"the agent cannot be started: {error}"})
        for agent in [agent for agent in self._by_exit.values() if agent.name == order.get("kill")]:
            _kill_group(agent.pid)

    def _start(self, order: dict[str, Any]) -> None:
        read, write = os.pipe()
        if not (pid := os.fork()):
            _become_agent(self.agent, order, write)
        os.close(write)
        os.set_blocking(read, False)
        with suppress(OSError):  # here and in the child, so that the group exists before either goes on
            os.setpgid(pid, pid)
        agent, leaving = _Agent(order["start"], pid, read), os.pidfd_open(pid)
        self._by_exit[leaving] = self._by_pipe[read] = agent
        self._poll.register(leaving, select.POLLIN)
        self._poll.register(read, select.POLLIN)

    def _read(self, agent: _Agent) -> None:
        """Read what there is; unregister the pipe at its end."""
        with suppress(BlockingIOError):
            while data := os.read(agent.pipe, _CHUNK_BYTES):
                agent.output += data[: MAX_ANSWER - len(agent.output)]
            self._poll.unregister(agent.pipe)
            del self._by_pipe[agent.pipe]

    def _end(self, leaving: int) -> dict[str, Any]:
        """Clean up after an agent that has exited, and return its outcome."""
        agent = self._by_exit.pop(leaving)
        _kill_group(agent.pid)  # before it is reaped: its id cannot belong to another group yet
        code = os.waitstatus_to_exitcode(os.waitpid(agent.pid, 0)[1])
        if agent.pipe in self._by_pipe:
            self._read(agent)
        if agent.pipe in self._by_pipe:  # a process outside of the group still holds it
            self._poll.unregister(agent.pipe)
            del self._by_pipe[agent.pipe]
        self._poll.unregister(leaving)
        os.close(leaving)
        os.close(agent.pipe)
        return {"ended": agent.name, **self._read_outcome(bytes(agent.output), code)}

    def _read_outcome(self, output: bytes, code: int) -> dict[str, Any]:
        text = output.decode("utf-8", "replace")
        if isinstance(self.agent, list):
            return {"answer": text.strip()} if not code else {"failure": describe_exit(code)}
        try:
            return dict(json.loads(text))
        except ValueError:
            return {"failure": describe_exit(code) + (", without a result" if not code else "")}

    def _close(self) -> None:
        """Kill every agent, and what agents left behind outside of their process groups."""
        for agent in self._by_exit.values():
            _kill_group(agent.pid)
        for process in list_child_processes():
            with suppress(Exception):
                process.kill()


def _become_agent(agent: str | list[str], order: dict[str, Any], output: int) -> None:
    """Be the agent; never returns. A command reads the row on standard input, and its output is the answer."""
    code = 1
    try:
        die_with_parent()
        with suppress(OSError):
            os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the driver's to handle
        os.environ.update(order["variables"])
        if isinstance(agent, list):
            command = [sys.executable if agent[0] in ("python", "python3") else agent[0], *agent[1:]]
            rows = os.memfd_create("row")
            os.write(rows, json.dumps(order["row"]).encode())
            os.lseek(rows, 0, os.SEEK_SET)
            os.dup2(rows, 0)
            os.dup2(output, 1)
            os.execvp(command[0], command)
        result = _call(agent, order["row"])
        os.set_blocking(output, True)
        left = memoryview(json.dumps(result).encode())
        while left:
            left = left[os.write(output, left) :]
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(code)


def _call(agent: str, row: dict[str, Any]) -> dict[str, Any]:
    """Call the agent's function with the columns that it takes; its outcome as JSON."""
    path, _, name = agent.rpartition(":")
    folder = str(Path(path).resolve().parent)
    beside = [key for key, module in sys.modules.items() if str(getattr(module, "__file__", "")).startswith(folder)]
    for key in beside:
        del sys.modules[key]
    try:
        result = call_by_name(getattr(load_file(path, "job_agent"), name), row)
    except BaseException as error:
        traceback.print_exc()
        return {"failure": f"{type(error).__name__}: {str(error)[:500]}"}
    return read_result(result)


def read_result(result: Any) -> dict[str, Any]:
    """A function's result as an outcome: a text is the answer, a number the reward; or a dict with either or both.

    >>> read_result("42"), read_result(0.5)
    ({'answer': '42'}, {'reward': 0.5})
    >>> read_result({"answer": "42", "score": 1})["failure"]
    "the agent returned {'answer': '42', 'score': 1}, not a text, a number, or a dict with answer and reward"
    """
    outcome = result if isinstance(result, dict) else {"answer": result} if isinstance(result, str) else {}
    if isinstance(result, int | float):
        outcome = {"reward": result}
    answer, reward = outcome.get("answer"), outcome.get("reward")
    is_number = isinstance(reward, int | float) and math.isfinite(reward)
    is_valid = (answer is None or isinstance(answer, str)) and (reward is None or is_number)
    if not is_valid or not set(outcome) <= {"answer", "reward"} or (result is not None and not outcome):
        why = f"the agent returned {str(result)[:200]}, not a text, a number, or a dict with answer and reward"
        return {"failure": why}
    return {**outcome, **({"reward": float(reward)} if is_number else {})}


def _kill_group(pid: int) -> None:
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def main(agent: str | list[str]) -> None:
    """Describe the agent, then obey orders."""
    import ctypes

    die_with_parent()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what leaves its group stays below this process
    channel, starter = AnswerChannel(), AgentStarter(agent)
    hello = starter.describe()
    channel.send({"hello": hello})
    if not hello:
        starter.serve(channel)


if __name__ == "__main__":
    main(json.loads(sys.argv[1])["agent"])
