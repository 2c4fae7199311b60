"""Hostile answers of environments, reward services and tool servers: a value or a message by the deadline.

The shapes of tests/hostile_server.py drip and flood below HTTP; these are whole answers that are costly to take in.
"""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rlplan.runtime.environments.mcp_tools import McpServer
from rlplan.runtime.environments.pool import RawAnswer, read_answer
from rlplan.runtime.environments.remote import RemoteEnvironment
from rlplan.runtime.environments.tool_calls import OK, RAISED, TIMED_OUT, TOO_LONG, WRONG, WRONG_RESULT
from rlplan.runtime.processes.line_process import Deadline, NoAnswerError
from tests.waiting import limit_time

DEADLINE_S = 1.0
MAX_LATE_S = 1.0
"""Seconds that an answer may come after the deadline."""
MAX_MESSAGE = 2_000
JSON = "application/json"
STREAM = "text/event-stream"
DONE = '{"id": 3, "result": {"content": [{"type": "text", "text": "done"}]}}'

BODIES: dict[str, tuple[str, bytes]] = {
    "lists within lists": (JSON, b"[" * 900_000 + b"]" * 900_000),
    "objects within objects": (JSON, b'{"a":' * 300_000 + b"1" + b"}" * 300_000),
    "a deep reward": (JSON, b'{"reward": ' + b"[" * 900 + b"]" * 900 + b"}"),
    "a reward of a million digits": (JSON, b'{"reward": ' + b"9" * 1_000_000 + b"}"),
    "a reward of 4,300 digits": (JSON, b'{"reward": ' + b"9" * 4_300 + b"}"),
    "a reward that is infinite": (JSON, b'{"reward": 1e999}'),
    "a reward that is no number": (JSON, b'{"reward": NaN}'),
    "a reward that is true": (JSON, b'{"reward": true}'),
    "many rewards": (JSON, b'{"reward": [' + b"0," * 900_000 + b"0]}"),
    "empty objects": (JSON, b'{"observation": [' + b"{}," * 600_000 + b"{}]}"),
    "equal keys": (JSON, b"{" + b'"reward": 1, ' * 150_000 + b'"reward": 0}'),
    "many keys": (JSON, b"{" + b", ".join(b'"k%d": 1' % n for n in range(120_000)) + b', "reward": 1}'),
    "half of a pair": (JSON, b'{"observation": "' + b"\\ud800" * 300_000 + b'"}'),
    "escapes": (JSON, b'{"observation": "' + b"\\u0000" * 300_000 + b'"}'),
    "spaces": (JSON, b" " * 1_900_000 + b'{"reward": 1}'),
    "no UTF-8": (JSON, b'{"observation": "' + b"\xff\xfe" * 900_000 + b'"}'),
    "UTF-16": (JSON, '{"observation": "a"}'.encode("utf-16") * 10_000),
    "no answer": (JSON, b""),
    "an answer of text": ("text/html; charset=nonsense", b"<html>" * 300_000),
    "two answers": (JSON, b'{"reward": 1}{"reward": 1}'),
}
"""Answers to a step: the type of the content, the body."""


def nest(depth: int, word: str) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {word: schema}
    return schema


def number_names(count: int) -> dict[str, int]:
    return {f"a{n}": n for n in range(count)}


SCHEMAS: dict[str, tuple[Any, Any, set[str]]] = {
    "many patterns for many names": (
        {"patternProperties": {f"^b{n}(a+)+$": {} for n in range(1500)}, "additionalProperties": False},
        number_names(3000),
        {WRONG, TIMED_OUT},
    ),
    "large patterns": (
        {"properties": {"a": {"allOf": [{"pattern": f"^((a{{0,30}}){{0,30}}b{n}){{0,9}}$"} for n in range(400)]}}},
        {"a": "a" * 9_000},
        {WRONG, TIMED_OUT, OK},
    ),
    "alternatives without an end": (
        {"properties": {"a": {"pattern": "^(" + "|".join("a" * n for n in range(1, 900)) + ")*$"}}},
        {"a": "a" * 50_000 + "!"},
        {WRONG, OK},
    ),
    "a reference back": ({"properties": {"a": {"pattern": r"^(a+)\1+$"}}}, {"a": "a" * 50_000 + "!"}, {OK}),
    "dynamic references to itself": ({"$dynamicAnchor": "a", "$dynamicRef": "#a"}, {}, {RAISED}),
    "an anchor to itself": ({"$anchor": "a", "allOf": [{"$ref": "#a"}] * 2}, {}, {RAISED, TIMED_OUT}),
    "not of itself": ({"not": {"$ref": "#"}}, {}, {RAISED, TIMED_OUT}),
    "if of itself": ({"if": {"$ref": "#"}, "then": {"$ref": "#"}, "else": {"$ref": "#"}}, {}, {RAISED, TIMED_OUT}),
    "one of many branches": (
        {"properties": {"a": {"oneOf": [{"type": "string"}] * 3_000}}},
        {"a": [1] * 3_000},
        {WRONG},
    ),
    "any of twice any of": (
        {
            "$defs": {f"{n}": {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(40)} | {"40": False},
            "$ref": "#/$defs/0",
        },
        {},
        {TIMED_OUT},
    ),
    "contains of contains": (
        {"properties": {"a": {"contains": {"contains": {"contains": {"const": 1}}}}}},
        {"a": [[[0] * 60] * 60] * 60},
        {WRONG, TIMED_OUT},
    ),
    "identifiers": (
        {
            "$defs": {f"{n}": {"$id": f"http://a/{n}", "$anchor": f"b{n}"} for n in range(2_000)},
            "allOf": [{"$ref": f"http://a/{n}#b{n}"} for n in range(2_000)],
        },
        {},
        {OK, RAISED, TIMED_OUT},
    ),
    "identifiers that are no addresses": ({"$id": "http://[", "$ref": "//["}, {}, {OK, RAISED}),
    "a pointer with many steps": ({"$ref": "#" + "/a" * 100_000}, {}, {OK, RAISED}),
    "many allowed values": ({"properties": {"a": {"enum": [[n] for n in range(60_000)]}}}, {"a": [-1]}, {WRONG}),
    "many needed names": ({"required": [f"b{n}" for n in range(60_000)]}, number_names(2_000), {WRONG}),
    "names that need names": (
        {"dependentRequired": {f"a{n}": [f"a{m}" for m in range(100)] for n in range(600)}},
        number_names(600),
        {OK, TIMED_OUT},
    ),
    "names by a schema": ({"propertyNames": {"pattern": "^(a+)+$"}}, number_names(3_000), {WRONG}),
    "not within not": (nest(50, "not"), {}, {OK, WRONG}),
    "a step of nothing": ({"properties": {"a": {"multipleOf": 1e-308}}}, {"a": 1e308}, {OK, WRONG, RAISED}),
}
"""Input schemas with arguments, and the outcomes that a call may have."""

RESULTS: dict[str, tuple[str, set[str]]] = {
    "data without an end of the event": ("data: " + DONE + "\ndata: x\n" * 60_000, {WRONG_RESULT}),
    "events of one character": ("data: 1\n\n" * 150_000 + f"data: {DONE}\n\n", {OK, TOO_LONG}),
    "comments": (":\n" * 600_000 + f"data: {DONE}\n\n", {OK, TOO_LONG}),
    "fields that are unknown": ("a: b\n" * 250_000 + f"data: {DONE}\n\n", {OK, TOO_LONG}),
    "deep events": (("data: " + "[" * 900 + "]" * 900 + "\n\n") * 500 + f"data: {DONE}\n\n", {OK}),
    "answers with other numbers": ('data: {"id": 3.0, "result": {}}\n\n' * 30_000 + f"data: {DONE}\n\n", {OK}),
    "an error within errors": ('data: {"id": 3, "error": {"message": ' + "[" * 60 + "]" * 60 + "}}\n\n", {RAISED}),
    "many blocks": (
        'data: {"id": 3, "result": {"content": [' + '{"type": "text", "text": "a"},' * 30_000
        + '{"type": "text", "text": "a"}]}}\n\n',
        {OK, TOO_LONG},
    ),
}  # fmt: skip
"""Streams that answer a call, and the outcomes that it may have."""


class Hostile(BaseHTTPRequestHandler):
    """A server that answers every step with one body, or a tool server with one schema and one result."""

    body: tuple[str, bytes] | None = None
    schema: Any
    result = f"data: {DONE}\n\n"

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind, body = self.body or (STREAM, self._answer(message.get("method"), message.get("id")).encode())
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body)

    def _answer(self, method: str, number: object) -> str:
        results: dict[str, Any] = {
            "initialize": {"protocolVersion": "2025-06-18"},
            "tools/list": {"tools": [{"name": "a", "inputSchema": self.schema}]},
        }
        if method not in results:
            return self.result if number else ""
        return f"data: {json.dumps({'id': number, 'result': results[method]})}\n\n"

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hostile) as opened:
        thread = threading.Thread(target=opened.serve_forever, args=(0.01,))
        thread.start()
        yield opened
        opened.shutdown()
        thread.join()


def set_up(server: ThreadingHTTPServer, **setting: Any) -> str:
    """Choose what the server answers; return its address."""
    server.RequestHandlerClass = type("Setting", (Hostile,), setting)
    return f"http://127.0.0.1:{server.server_port}/hostile"


def call(tools: McpServer, arguments: Any) -> str:
    """The outcome of a call."""
    before = time.process_time()
    with limit_time(MAX_LATE_S, DEADLINE_S):
        answer = tools.call("a", arguments, Deadline(DEADLINE_S))
    assert time.process_time() - before < DEADLINE_S + MAX_LATE_S
    return str(answer.get("kind", OK))


def ask(environment: RemoteEnvironment) -> str:
    """The failure of a step; empty for an answer."""
    try:
        return read_answer(RawAnswer(environment.answer({"session": "a", "action": "b"}))).failure
    except NoAnswerError as error:
        return str(error)


@pytest.mark.parametrize("name", BODIES)
def test_a_hostile_answer_of_an_environment_is_a_value_or_a_message(name: str, server: ThreadingHTTPServer) -> None:
    environment = RemoteEnvironment(set_up(server, body=BODIES[name]), "run", DEADLINE_S)
    with limit_time(MAX_LATE_S, DEADLINE_S):
        failure = ask(environment)
    assert len(failure) < MAX_MESSAGE


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_hostile_schema_is_evaluated_by_the_deadline(name: str, server: ThreadingHTTPServer) -> None:
    schema, arguments, outcomes = SCHEMAS[name]
    tools = McpServer(set_up(server, schema=schema))
    tools.list_tools(Deadline(30 * DEADLINE_S))
    assert call(tools, arguments) in outcomes


@pytest.mark.parametrize("name", RESULTS)
def test_a_hostile_stream_of_a_tool_server_ends_by_the_deadline(name: str, server: ThreadingHTTPServer) -> None:
    result, outcomes = RESULTS[name]
    tools = McpServer(set_up(server, schema={}, result=result))
    tools.list_tools(Deadline(30 * DEADLINE_S))
    assert call(tools, {}) in outcomes
