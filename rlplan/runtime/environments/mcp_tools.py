"""Client for tools of MCP servers: lists them with their schemas and calls them with a deadline, over stdio or HTTP.

The client implements three JSON-RPC methods: initialize, tools/list and tools/call. Requests from a server are answered
over stdio only: `ping` with a result, any other with an error. Run as a module, this file is the process of a stdio
server, which ends with the process that started it.

In: places; each is a Python file (a stdio server) or an address (streamable HTTP). Out: schemas in the format of chat
templates, and results as text. Left out: resources, prompts, sampling.
"""

import contextlib
import itertools
import json
import runpy
import sys
from pathlib import Path
from typing import Any

from rlplan.runtime.environments.remote import MAX_BYTES, post
from rlplan.runtime.environments.schemas import SchemaError, check_schema, find_fault
from rlplan.runtime.environments.tool_calls import DIED, RAISED, TIMED_OUT, TOO_LONG, WRONG, WRONG_RESULT
from rlplan.runtime.environments.tools import MAX_RESULT
from rlplan.runtime.processes.child_processes import die_with_parent
from rlplan.runtime.processes.line_process import (
    Deadline,
    GarbledError,
    LateError,
    LineProcess,
    NoAnswerError,
    TooLongError,
    parse_json,
)
from rlplan.runtime.processes.safe_path import make_module_command
from rlplan.version import __version__

PROTOCOL_VERSION = "2025-06-18"
MAX_TOOLS = 128
"""Most tools of one server."""
MAX_NAME = 128
"""Most characters of a tool's name."""
_NO_METHOD, _WRONG_PARAMETERS = -32601, -32602
"""Error codes of JSON-RPC 2.0, section 5.1."""


class McpError(Exception):
    """A server reported an error. code: JSON-RPC error code."""

    def __init__(self, code: object, message: str) -> None:
        super().__init__(message)
        self.code = code


class McpServer:
    """One server. It connects on first use and reconnects after a failure. place: a Python file or an address."""

    def __init__(self, place: str) -> None:
        self.place = place
        self._wire: _Stdio | _Http | None = None
        self._tools: dict[str, dict[str, Any]] = {}

    def list_tools(self, deadline: Deadline) -> dict[str, dict[str, Any]]:
        """Schemas by name. Raises: NoAnswerError, McpError."""
        if self._wire is None:
            self._wire = _Stdio(self.place) if self.place.endswith(".py") else _Http(self.place)
            self._tools = self._fetch_tools(self._wire, deadline)
        return self._tools

    def describe_tools(self, deadline: Deadline) -> list[dict[str, Any]]:
        """Schemas of all tools, checked to be valid JSON schemas. Raises: NoAnswerError."""
        try:
            schemas = [*self.list_tools(deadline).values()]
            for schema in schemas:
                check_schema(schema["function"]["parameters"], deadline)
        except McpError as error:
            raise NoAnswerError(str(error)) from None
        except SchemaError as error:
            name = schema["function"]["name"]
            raise NoAnswerError(f"the input schema of {name} is not valid: {error}") from None
        return schemas

    def call(self, name: str, arguments: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        """Call a tool. Returns: its result as text, or an error with its outcome."""
        try:
            schema = self.list_tools(deadline)[name]["function"]["parameters"]
            if wrong := find_fault(arguments, schema, deadline):
                return {"error": f"wrong arguments of {name}: {wrong}", "kind": WRONG}
            assert self._wire is not None, "list_tools has connected"
            return _read_text(name, self._wire.ask("tools/call", {"name": name, "arguments": arguments}, deadline))
        except McpError as error:
            kind = WRONG if error.code == _WRONG_PARAMETERS else RAISED
            return {"error": f"{name}: {str(error)[:300]}", "kind": kind}
        except SchemaError as error:
            return {"error": f"the input schema of {name} is not valid: {error}", "kind": RAISED}
        except NoAnswerError as error:
            self.close()
            return {"error": f"{name}: {error}", "kind": _classify_error(error)}
        except KeyError:
            return {"error": f"the server at {self.place} no longer has the tool {name}", "kind": RAISED}

    def close(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()

    def _fetch_tools(self, wire: "_Stdio | _Http", deadline: Deadline) -> dict[str, dict[str, Any]]:
        try:
            client = {"name": "rlplan", "version": __version__}
            hello = {"protocolVersion": PROTOCOL_VERSION, "capabilities": {}, "clientInfo": client}
            wire.ask("initialize", hello, deadline)
            wire.tell("notifications/initialized", deadline)
            schemas: list[dict[str, Any]] = []
            cursor: dict[str, Any] = {}
            for _ in range(MAX_TOOLS):  # pages may be empty, so their number is bounded too
                page = wire.ask("tools/list", cursor, deadline)
                schemas += map(_read_schema, _read_list(page, "tools"))
                if len(schemas) > MAX_TOOLS:
                    break
                if not page.get("nextCursor"):
                    return _index_by_name(schemas)
                cursor = {"cursor": page["nextCursor"]}
            raise McpError(0, f"it has more than {MAX_TOOLS} tools, or pages of them")
        except BaseException:
            self.close()
            raise


class _Stdio:
    """A server in a child process, with one JSON message per line."""

    def __init__(self, file: str) -> None:
        self._ids = itertools.count(1)
        self._process = LineProcess(make_module_command(__name__, file), sys.stderr.fileno(), MAX_BYTES)

    def ask(self, method: str, parameters: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        """Raises: NoAnswerError, McpError."""
        number = next(self._ids)
        self._say({"id": number, "method": method, "params": parameters}, deadline)
        while True:
            deadline.check()  # a server may send notifications without end
            answer = self._process.receive(deadline)
            if _answers(answer, number):
                return _read_result(answer)
            if "method" in answer and "id" in answer:
                alive: dict[str, Any] = {"result": {}}
                none = {"error": {"code": _NO_METHOD, "message": "not supported"}}
                self._say({"id": answer["id"], **(alive if answer["method"] == "ping" else none)}, deadline)

    def tell(self, method: str, deadline: Deadline) -> None:
        self._say({"method": method}, deadline)

    def close(self) -> None:
        self._process.close()

    def _say(self, message: dict[str, Any], deadline: Deadline) -> None:
        self._process.send(json.dumps({"jsonrpc": "2.0", **message}), deadline)


class _Http:
    """A server at an address. Each message is a POST, answered with JSON or a stream of server-sent events."""

    def __init__(self, url: str) -> None:
        self.url, self._ids = url, itertools.count(1)
        self._headers = {"Accept": "application/json, text/event-stream"}

    def ask(self, method: str, parameters: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        """Raises: NoAnswerError, McpError."""
        number = next(self._ids)
        message = {"jsonrpc": "2.0", "id": number, "method": method, "params": parameters}
        events = _Events(number)
        text, headers = post(self.url, message, deadline, self._headers, events.read)
        if session := headers.get("Mcp-Session-Id"):
            self._headers["Mcp-Session-Id"] = session
        is_stream = headers.get_content_type() == "text/event-stream"
        answer = events.answer if is_stream else parse_json(text)
        if not isinstance(answer, dict) or not _answers(answer, number):
            raise GarbledError("an answer to another request")
        result = _read_result(answer)
        if method == "initialize":  # MCP requires the header in every later request over HTTP
            self._headers["MCP-Protocol-Version"] = str(result.get("protocolVersion", PROTOCOL_VERSION))[:MAX_NAME]
        return result

    def tell(self, method: str, deadline: Deadline) -> None:
        post(self.url, {"jsonrpc": "2.0", "method": method}, deadline, self._headers)

    def close(self) -> None:
        """Do nothing: no connection stays open between messages."""


class _Events:
    """Looks for the answer to request `number` in server-sent events as they arrive. Source: WHATWG, HTML standard."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.answer: dict[str, Any] | None = None
        self._line: list[bytes] = []
        """Parts of the line that has not ended yet."""
        self._data: list[bytes] = []

    def read(self, part: bytes) -> bool:
        """Read the next part of the stream; whether the answer is there."""
        first, *others = part.split(b"\n")
        self._line.append(first)
        for start in others:
            self._read_line(b"".join(self._line).removesuffix(b"\r"))
            self._line = [start]
        return self.answer is not None

    def _read_line(self, line: bytes) -> None:
        if line.startswith(b"data:"):
            self._data.append(line[5:].strip())
        elif not line and self._data:
            data, self._data = b"\n".join(self._data), []
            with contextlib.suppress(GarbledError):
                answer = parse_json(data)
                if self.answer is None and _answers(answer, self.number):
                    self.answer = answer


def _answers(message: Any, number: int) -> bool:
    """Whether a message is the answer to request `number`, and no request or notification of the server."""
    if not isinstance(message, dict) or "method" in message:
        return False
    return type(message.get("id")) is int and message["id"] == number


def _read_result(answer: dict[str, Any]) -> dict[str, Any]:
    """Raises: McpError, GarbledError."""
    if "error" in answer:
        error = answer["error"] if isinstance(answer["error"], dict) else {}
        raise McpError(error.get("code"), str(error.get("message", "an error without a message")))
    if not isinstance(answer.get("result"), dict):
        raise GarbledError("an answer without a result")
    result: dict[str, Any] = answer["result"]
    return result


def _read_list(page: dict[str, Any], name: str) -> list[Any]:
    items = page.get(name)
    if not isinstance(items, list):
        raise GarbledError(f"an answer without {name}")
    return items


def _read_schema(tool: Any) -> dict[str, Any]:
    """A tool's schema in the format of chat templates. Raises: McpError."""
    name, parameters = (tool.get("name"), tool.get("inputSchema")) if isinstance(tool, dict) else (None, None)
    if not isinstance(name, str) or not name or len(name) > MAX_NAME or not isinstance(parameters, dict):
        raise McpError(0, f"a tool without a name or without an inputSchema: {str(tool)[:200]}")
    described = {"name": name, "description": str(tool.get("description") or name), "parameters": parameters}
    return {"type": "function", "function": described}


def _index_by_name(schemas: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    by_name = {schema["function"]["name"]: schema for schema in schemas}
    if len(by_name) < len(schemas):
        raise McpError(0, f"two of its tools have the same name: {', '.join(sorted(by_name))[:300]}")
    return by_name


def _read_text(name: str, result: dict[str, Any]) -> dict[str, Any]:
    blocks = result.get("content")
    if not isinstance(blocks, list) or not all(_is_text(block) for block in blocks):
        return {"error": f"{name} returned something other than text", "kind": WRONG_RESULT}
    text = "\n".join(block["text"] for block in blocks)
    if result.get("isError"):
        return {"error": f"{name}: {text[:300]}", "kind": RAISED}
    if len(text) > MAX_RESULT:
        return {"error": f"{name} returned {len(text)} characters, the limit is {MAX_RESULT}", "kind": TOO_LONG}
    return {"said": text}


def _is_text(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str)


def _classify_error(error: NoAnswerError) -> str:
    if isinstance(error, LateError):
        return TIMED_OUT
    if isinstance(error, GarbledError):
        return TOO_LONG if isinstance(error, TooLongError) else WRONG_RESULT
    return DIED


if __name__ == "__main__":
    # The server sees the arguments and search path of `python FILE`.
    die_with_parent()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
