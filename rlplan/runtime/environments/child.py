"""The process in which a job's environment and tools answer: a loop over lines of JSON.

In: a setting as its argument; then one line a question: `play` (all turns, of a function), `reset`, `step` and `finish`
(of a rollout's own environment, by `session`), `call` (of a tool). Out: one line an answer, {"said": ...}, or
{"error": "...", "kind": "..."}. The first line out says what was found. What is printed goes to the run's log, and so
does what raises. It is the job's own code, and runs with the user's rights; servers that a job names are asked here.
"""

import json
import os
import sys
import traceback
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rlplan.runtime.environments.protocols import Environment, load_environment
from rlplan.runtime.environments.tools import Tool, ToolError, describe_tools
from rlplan.runtime.processes.child_processes import die_with_parent
from rlplan.runtime.processes.line_process import Deadline, LateError, NoAnswerError
from rlplan.runtime.processes.machine_speed import scaled
from rlplan.runtime.processes.safe_path import run_file
from rlplan.vocabulary import TOKEN_VARIABLE

if TYPE_CHECKING:
    from rlplan.runtime.environments.mcp_tools import McpServer
    from rlplan.runtime.environments.remote import RemoteEnvironment

CONNECT_S = 15.0
"""For a server to say what it has, before a run; scaled."""
LOST = "its state was lost with its process, which another rollout had ended"


class _MissingError(Exception):
    """A file without the function that is named."""

    def __init__(self, file: str, name: str, module: ModuleType) -> None:
        super().__init__(f"there is no function '{name}' in {os.path.basename(file)}")  # noqa: PTH119
        own = (key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__)
        there = [key for key in own if not key.startswith("_")][:10]
        self.way_out = f"one of {', '.join(there)}" if there else "write it: the file has none"


class Answers:
    """What the setting names: path, tools (FILE.py:NAME), url, mcp. describes: whether schemas are asked for.

    run: an id of this run, which is part of the sessions' ids at a server.
    """

    def __init__(self, setting: dict[str, Any]) -> None:
        self.setting = setting
        self.environment: Environment | None = None
        self.remote, self.servers = _connect(setting)
        self.tools: dict[str, Tool] = {}
        self.served: dict[str, McpServer] = {}
        """The server of each tool that MCP servers have, by the tool's name."""
        self.sessions: dict[str, Any] = {}
        self._asked = ("path", setting["path"])
        try:
            self.hello = self._describe()
        except ToolError as error:
            self.hello = {"error": str(error), "key": "tools", "where": error.where, "rule": error.rule}
            self.hello["way_out"] = error.way_out
        except _MissingError as error:
            self.hello = {"error": str(error), "way_out": error.way_out}
        except NoAnswerError as error:
            self.hello = {"error": str(error), "rule": "a server answers before a run starts, each tool with a schema"}
            self.hello["way_out"] = f"start it, or correct the address; a token is given in {TOKEN_VARIABLE}"
        except BaseException as error:  # a file can end its process
            self.hello = {"error": _describe_error(error)}
        if "error" in self.hello:
            self.hello = dict(zip(("key", "where"), self._asked, strict=True)) | self.hello

    def _describe(self) -> dict[str, Any]:
        """What there is. Raises: what the job's own files do, ToolError, _MissingError, NoAnswerError."""
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
            self.remote.check(Deadline(scaled(CONNECT_S)))
        for server in self.servers:
            self._asked = ("mcp", server.place)
            described = server.describe_tools(Deadline(scaled(CONNECT_S)))
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
            raise RuntimeError(LOST)
        return self.sessions[name]


def _connect(setting: dict[str, Any]) -> "tuple[RemoteEnvironment | None, list[McpServer]]":
    """What speaks HTTP or MCP is imported where a job names such a thing, and nowhere else."""
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
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the job's code prints is no answer
    answers = Answers(setting)
    _say(out, answers.hello)
    if "error" in answers.hello:
        return
    for line in sys.stdin:
        try:
            answer = answers.answer(json.loads(line))
        except NoAnswerError as failure:
            answer = {"error": str(failure), "kind": "timed_out" if isinstance(failure, LateError) else "died"}
        except Exception as failure:
            traceback.print_exc()
            answer = {"error": _describe_error(failure), "kind": "raised"}
        _say(out, answer)


def _load_named(path: str) -> Any:
    """What FILE.py:NAME names. Raises: whatever the file does; _MissingError where it has no such name."""
    file, _, name = path.rpartition(":")
    module = run_file(file, f"job_{os.path.basename(file)[:-3]}")  # noqa: PTH119
    function = getattr(module, name, None)
    if not callable(function):
        raise _MissingError(file, name, module)
    return function


def _describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _say(answers: Any, what: dict[str, Any]) -> None:
    """Write a line; what JSON does not know is said to be so."""
    try:
        line = json.dumps(what)
    except (TypeError, ValueError) as failure:
        line = json.dumps({"error": f"the answer is not JSON: {failure}", "kind": "wrong_result"})
    answers.write(line + "\n")
    answers.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
