"""Tools of hostile MCP servers: whatever a server sends is an answer in time, over stdio and over HTTP."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rlplan.runtime.environments.mcp_tools import MAX_TOOLS, McpServer
from rlplan.runtime.environments.tool_calls import (
    NOT_JSON,
    OK,
    RAISED,
    TIMED_OUT,
    TOO_LONG,
    WRONG,
    WRONG_RESULT,
    read_calls,
)
from rlplan.runtime.processes.line_process import Deadline, NoAnswerError
from tests.waiting import limit_time

DEADLINE_S = 1.0
LONG = "a" * 200_000 + "!"
DEEP = "[" * 100_000 + "]" * 100_000


def nest_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


SCHEMAS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a pattern that backtracks": ({"properties": {"a": {"pattern": "^(a+)+$"}}}, {"a": LONG}, WRONG),
    "such a pattern in another dialect": (
        {"properties": {"a": {"$schema": "http://json-schema.org/draft-07/schema#", "pattern": "^(a+)+$"}}},
        {"a": LONG},
        WRONG,
    ),
    "such a pattern of names": (
        {"patternProperties": {"^(a+)+$": {}}, "additionalProperties": False},
        {LONG: 1},
        WRONG,
    ),
    "such a pattern of unevaluated names": (
        {"patternProperties": {"^(a+)+$": {}}, "unevaluatedProperties": False},
        {LONG: 1},
        OK,
    ),
    "a pattern that only a server can check": ({"properties": {"a": {"pattern": "^(?!b)(a+)+$"}}}, {"a": LONG}, OK),
    "a pattern that grows": ({"properties": {"a": {"pattern": "((a{1000}){1000}){1000}"}}}, {"a": LONG}, OK),
    "no pattern": ({"properties": {"a": {"pattern": "["}}}, {"a": "a"}, OK),
    "a reference to itself": ({"$ref": "#"}, {}, RAISED),
    "references to each other": (
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {},
        RAISED,
    ),
    "a reference to no schema": ({"default": "a", "properties": {"a": {"$ref": "#/default"}}}, {"a": 1}, RAISED),
    "a reference to elsewhere": ({"$ref": "http://127.0.0.1:9/a"}, {}, OK),
    "branches without an end": (
        {
            "$defs": {f"{n}": {"allOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(50)} | {"50": {}},
            "$ref": "#/$defs/0",
        },
        {},
        TIMED_OUT,
    ),
    "many different elements": (
        {"properties": {"a": {"uniqueItems": True}}},
        {"a": [{"a": n} for n in range(20_000)]},
        OK,
    ),
    "elements alike": ({"properties": {"a": {"uniqueItems": True}}}, {"a": [{"a": 1}, {"a": 1}]}, WRONG),
    "a number too large": ({"properties": {"a": {"multipleOf": 0.1}}}, {"a": 10**400}, RAISED),
    "digits of another script": ({"properties": {"a": {"pattern": r"^\d$"}}}, {"a": "\u0661"}, WRONG),
    "a tree": (
        {"$defs": {"n": {"properties": {"a": {"$ref": "#/$defs/n"}, "b": {"type": "string"}}}}, "$ref": "#/$defs/n"},
        {"a": {"a": {"a": {"b": 1}}}},
        WRONG,
    ),
}
"""Input schemas with arguments, and the outcome of a call."""


class Recorded(BaseHTTPRequestHandler):
    """A server over HTTP with the tools and the result of its class."""

    schema: Any
    pages = 1
    as_stream = False
    answers: tuple[str, ...] = ('{"id": 3, "result": {"content": [{"type": "text", "text": "done"}]}}',)
    """Messages that answer a call, the third request."""

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        method, number = message["method"], message.get("id")
        tools = [{"name": "a", "inputSchema": self.schema}]
        lists: dict[str, Any] = {
            "tools": tools if self.pages == 1 else [],
            "nextCursor": "" if self.pages == 1 else "x",
        }
        results: dict[str, Any] = {"initialize": {"protocolVersion": "2025-06-18"}, "tools/list": lists}
        answers = self.answers
        if method in results:
            answers = (json.dumps({"id": number, "result": results[method]}),)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if self.as_stream else "application/json")
        self.end_headers()
        for answer in answers if number else ():
            self.wfile.write(f"data: {answer}\n\n".encode() if self.as_stream else answer.encode())

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Recorded) as opened:
        thread = threading.Thread(target=opened.serve_forever, args=(0.01,))
        thread.start()
        yield opened
        opened.shutdown()
        thread.join()


def connect(server: ThreadingHTTPServer, **setting: Any) -> McpServer:
    server.RequestHandlerClass = type("Setting", (Recorded,), setting)
    return McpServer(f"http://127.0.0.1:{server.server_port}/mcp")


def call(tools: McpServer, arguments: dict[str, Any] | None = None) -> tuple[str, str]:
    """(the outcome of a call, its text)."""
    with limit_time(1.0, DEADLINE_S):
        answer = tools.call("a", arguments or {}, Deadline(DEADLINE_S))
    tools.close()
    return answer.get("kind", OK), str(answer.get("error", answer.get("said")))


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_schema_is_evaluated_in_time(name: str, server: ThreadingHTTPServer) -> None:
    schema, arguments, outcome = SCHEMAS[name]
    assert call(connect(server, schema=schema), arguments)[0] == outcome


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (nest_schema(100), "nested more than 64 deep"),
        ({"$ref": "#"}, "the input schema of a is not valid: it refers to itself without an end"),
        ({"required": [0, "a"] * 50_000}, "the input schema of a is not valid: required.0: 0 is not of type 'string'"),
        ({"type": "nonsense"}, "the input schema of a is not valid: type: 'nonsense' is not valid"),
        (None, "a tool without a name or without an inputSchema"),
    ],
)
def test_schemas_that_cannot_be_evaluated_are_refused_before_a_run(
    schema: Any, reason: str, server: ThreadingHTTPServer
) -> None:
    with pytest.raises(NoAnswerError, match=reason):
        connect(server, schema=schema).describe_tools(Deadline(10 * DEADLINE_S))


def test_tools_on_endless_pages_are_refused(server: ThreadingHTTPServer) -> None:
    with pytest.raises(NoAnswerError, match=f"more than {MAX_TOOLS} tools, or pages"):
        connect(server, schema={}, pages=2).describe_tools(Deadline(60 * DEADLINE_S))


GOOD = Recorded.answers[0]
MESSAGES: dict[str, tuple[tuple[str, ...], str]] = {
    "the answer": ((GOOD,), OK),
    "another id first": (('{"id": 2, "result": {}}', '{"id": "3", "result": {}}', GOOD), OK),
    "true for an id": (('{"id": true, "result": {}}', GOOD), OK),
    "a request with the same id": (('{"id": 3, "method": "ping"}', GOOD), OK),
    "notifications": (('{"method": "notifications/progress", "params": {}}',) * 1000 + (GOOD,), OK),
    "deep JSON": ((DEEP, GOOD), OK),
    "no JSON": (("{", GOOD), OK),
    "huge numbers": (('{"id": 3, "result": {"content": ' + "9" * 5000 + "}}",), WRONG_RESULT),
    "no numbers": (('{"id": 3, "result": {"content": [NaN, Infinity]}}',), WRONG_RESULT),
    "two answers": ((GOOD, GOOD.replace("done", "again")), OK),
    "answers to other ids only": (('{"id": 4, "result": {}}',), WRONG_RESULT),
    "a result that is none": (('{"id": 3, "result": [1]}',), WRONG_RESULT),
    "a deep result": (('{"id": 3, "result": {"content": ' + DEEP + "}}",), WRONG_RESULT),
    "an error that is none": (('{"id": 3, "error": 7}',), RAISED),
    "too much": ((json.dumps({"a": "x" * (2 << 20)}), GOOD), TOO_LONG),
}
"""Events of a stream that answer request 3, and the outcome of the call."""


@pytest.mark.parametrize("name", MESSAGES)
def test_events_of_a_stream_that_are_not_the_answer_are_passed_over(name: str, server: ThreadingHTTPServer) -> None:
    messages, outcome = MESSAGES[name]
    kind, text = call(connect(server, schema={}, as_stream=True, answers=messages))
    assert kind == outcome
    assert kind != OK or text == "done"


STDIO = """
import json, sys, time
for line in sys.stdin:
    message = json.loads(line)
    if message["method"] == "initialize":
        result = {"protocolVersion": "2025-06-18"}
    elif message["method"] == "tools/list":
        result = {"tools": [{"name": "a", "inputSchema": {}}]}
    elif "id" in message:
        break
    else:
        continue
    print(json.dumps({"id": message["id"], "result": result}), flush=True)
while True:
    try:
        sys.stdout.write(PART)
        sys.stdout.flush()
        time.sleep(PAUSE)
    except OSError:
        break
"""
STREAMS = {
    "silence": ("", 0.01, TIMED_OUT),
    "a dripped line": (" ", 0.01, TIMED_OUT),
    "dripped notifications": ('{"method": "a"}\n', 0.01, TIMED_OUT),
    "endless notifications": ('{"method": "a"}\n' * 1000, 0.0, TIMED_OUT),
    "endless answers to other requests": ('{"id": 1, "result": {}}\n' * 1000, 0.0, TIMED_OUT),
    "endless requests": ('{"id": 1, "method": "ping"}\n' * 1000, 0.0, TIMED_OUT),
    "an endless line": (" " * 10_000, 0.0, TOO_LONG),
    "deep JSON": (DEEP + "\n", 0.0, WRONG_RESULT),
    "huge numbers": ("9" * 5000 + "\n", 0.0, WRONG_RESULT),
}
"""Output of a server over stdio after a call: a repeated part, seconds between two, the outcome."""


@pytest.mark.parametrize("name", STREAMS)
def test_output_that_is_no_answer_ends_at_the_deadline(name: str, tmp_path: Path) -> None:
    part, pause_s, outcome = STREAMS[name]
    file = tmp_path / "server.py"
    file.write_text(f"PART, PAUSE = {part!r}, {pause_s}\n{STDIO}")
    tools = McpServer(str(file))
    tools.list_tools(Deadline(30 * DEADLINE_S))
    assert call(tools)[0] == outcome


def test_a_server_that_closes_its_output_but_stays_ends_at_the_deadline(tmp_path: Path) -> None:
    file = tmp_path / "server.py"
    file.write_text("import os, time\nos.close(1)\ntime.sleep(60)")
    with limit_time(1.0, DEADLINE_S), pytest.raises(NoAnswerError, match="closed its output"):
        McpServer(str(file)).list_tools(Deadline(DEADLINE_S))


def test_a_deep_call_of_a_policy_is_no_call() -> None:
    text = '<c>{"name": "a", "arguments": {"a": %s}}</c>' % ("[" * 500 + "]" * 500)
    (read,) = read_calls(text, "<c>(.*?)</c>", ["a"])
    assert (read.fault, "nested more than 64 deep" in read.why) == (NOT_JSON, True)
