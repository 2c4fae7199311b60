"""The child process in which a job's environment and tools run: it answers JSON requests line by line.

A request is `play` (all turns, for a function), `reset`, `step` or `finish` (of the environment that `session` names),
or `call` (of a tool). An answer is {"said": ...} or {"error": "...", "kind": "..."}. The first line describes the
environment. Printed text and tracebacks go to the run's log. The code is the job's own and runs with the user's rights;
requests to the job's servers are made here too.

In: a setting as the argument, then one JSON request per line. Out: one JSON answer per line.
"""

import json
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

from rlplan.runtime.environments.protocols import Environment, load_environment
from rlplan.runtime.environments.tools import Tool, UnusableError, describe_tools
from rlplan.runtime.processes.answer_channel import AnswerChannel
from rlplan.runtime.processes.child_processes import die_with_parent
from rlplan.runtime.processes.line_process import Deadline, LateError, NoAnswerError
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.processes.safe_path import load_file
from rlplan.vocabulary import TOKEN_VARIABLE

if TYPE_CHECKING:
    from rlplan.runtime.environments.mcp_tools import McpServer
    from rlplan.runtime.environments.remote import RemoteEnvironment

CONNECT_S = 15.0
"""Seconds for a server to describe itself before a run; scaled by machine speed."""
LOST_STATE = "its state was lost when another rollout ended the process"


class Answers:
    """The environment and tools of a setting.

    Keys of the setting: path, tools (FILE.py:NAME), url, mcp; describes (whether schemas are wanted); run (an id that
    is part of the session ids at a server).
    """

    def __init__(self, setting: dict[str, Any]) -> None:
        self.setting = setting
        self.environment: Environment | None = None
        self.remote, self.servers = _connect(setting)
        self.tools: dict[str, Tool] = {}
        self.served: dict[str, McpServer] = {}
        """MCP server of each served tool, by the tool's name."""
        self.sessions: dict[str, Any] = {}
        self._asked = ("path", setting["path"])
        """(key, value) of the setting that is being loaded, for the message of an error."""
        try:
            self.hello = self._describe()
        except UnusableError as error:
            self.hello = {"error": str(error), **error.parts}
        except NoAnswerError as error:
            rule = "a server must answer before a run starts, with a schema for each tool"
            self.hello = {"error": str(error), "rule": rule}
            self.hello["way_out"] = f"start it, or correct the address; set a token in {TOKEN_VARIABLE}"
        except BaseException as error:  # a job's file may raise SystemExit
            self.hello = {"error": _describe_error(error)}
        if "error" in self.hello:
            self.hello = dict(zip(("key", "where"), self._asked, strict=True)) | self.hello

    def _describe(self) -> dict[str, Any]:
        """Load and describe everything. Raises: any error of the job's files, UnusableError, NoAnswerError."""
        path, describes = self.setting["path"], self.setting["describes"]
        if path is not None:
            self.environment = load_environment(_load_named(path))
        for place in self.setting["tools"]:
            self._asked = ("tools", place)
            tool = Tool(_load_named(place), place)
            self.tools[tool.name] = tool
        self._asked = ("path", path) if path else self._asked
        methods = self.environment.tools(str(path)) if self.environment else {}
        schemas = describe_tools([*self.tools.values(), *methods.values()]) if describes else []
        if describes and self.remote is not None:
            self._asked = ("url", self.setting["url"])
            self.remote.check(Deadline(scale_seconds(CONNECT_S)))
        for server in self.servers:
            self._asked = ("mcp", server.place)
            described = server.describe_tools(Deadline(scale_seconds(CONNECT_S)))
            schemas += described if describes else []
            self.served |= {schema["function"]["name"]: server for schema in described}
        return {
            "is_stateful": self.remote is not None or (self.environment is not None and self.environment.is_stateful),
            "has_tools_alone": self.environment is not None and self.environment.has_tools_alone,
            "methods": [*methods],
            "schemas": schemas,
        }

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        session = question["session"]
        if "call" in question:
            name, arguments = question["call"], question["arguments"]
            if name in self.served:
                return self.served[name].call(name, arguments, Deadline(self.setting["timeout_s"]))
            tool = self.tools[name] if session is None else self._get_session(session).tool(name)
            return tool.call(arguments)
        if self.remote is not None:
            return {"said": self.remote.answer(question)}
        assert self.environment is not None, "there is one"
        if "play" in question:
            return {"said": self.environment.play(question["play"], question["answer"])}
        if "reset" in question:
            self.sessions[session] = self.environment.begin()
            return {"said": self.sessions[session].reset(question["reset"])}
        if "step" in question:
            return {"said": self._get_session(session).step(question["step"])}
        ended = self._get_session(session)
        del self.sessions[session]
        return {"said": ended.finish()}

    def _get_session(self, name: str) -> Any:
        if name not in self.sessions:
            raise RuntimeError(LOST_STATE)
        return self.sessions[name]


def _connect(setting: dict[str, Any]) -> "tuple[RemoteEnvironment | None, list[McpServer]]":
    """The HTTP environment and MCP servers of a setting; their modules are imported only for jobs that use them."""
    if not (setting["url"] or setting["mcp"]):
        return None, []
    from rlplan.runtime.environments.mcp_tools import McpServer
    from rlplan.runtime.environments.remote import RemoteEnvironment

    url = setting["url"]
    remote = RemoteEnvironment(url, setting["run"], setting["timeout_s"]) if url else None
    return remote, [McpServer(place) for place in setting["mcp"]]


def main(setting: dict[str, Any]) -> None:
    """Answer until standard input closes."""
    die_with_parent()
    channel = AnswerChannel()
    answers = Answers(setting)
    _say(channel, answers.hello)
    if "error" in answers.hello:
        return
    for line in channel.requests:
        try:
            answer = answers.answer(json.loads(line))
        except NoAnswerError as failure:  # a server of the job, not this process
            answer = {"error": str(failure), "kind": "timed_out" if isinstance(failure, LateError) else "died"}
        except Exception as failure:
            traceback.print_exc()
            answer = {"error": _describe_error(failure), "kind": "raised"}
        _say(channel, answer)


def _load_named(path: str) -> Any:
    """The function or class FILE.py:NAME. Raises: any error of the file; UnusableError without that name."""
    file, _, name = path.rpartition(":")
    module = load_file(file, f"job_{os.path.basename(file)[:-3]}")  # noqa: PTH119
    function = getattr(module, name, None)
    if not callable(function):
        own = (key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__)
        names = [key for key in own if not key.startswith("_")][:10]
        raise UnusableError(
            f"there is no function '{name}' in {os.path.basename(file)}",  # noqa: PTH119
            way_out=f"use one of {', '.join(names)}" if names else "write it: the file has no function",
        )
    return function


def _describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _say(channel: AnswerChannel, answer: dict[str, Any]) -> None:
    """Write one answer; a value that JSON cannot represent becomes an error."""
    try:
        channel.send(answer)
    except (TypeError, ValueError) as failure:
        channel.send({"error": f"the answer is not JSON: {failure}", "kind": "wrong_result"})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
