"""Environments behind HTTP and tools of MCP servers: real servers on this machine, and every way in which they fail."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlplan.errors import SpecError
from rlplan.runtime.environments.pool import Answer, EnvironmentPool, RawAnswer, describe_environment, read_answer
from rlplan.runtime.environments.tool_calls import DIED, OK, RAISED, TIMED_OUT, TOO_LONG, WRONG
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.spec.parts.environment import EnvironmentSpec
from rlplan.vocabulary import TOKEN_VARIABLE
from tests.repository.at_night import mark_nightly
from tests.waiting import wait_until

TOKEN = "a-token-of-the-test"

MCP_SERVER = '''
import sys, time
from mcp.server import MCPServer

server = MCPServer("numbers")

@server.tool()
def add(a: int, b: int = 1) -> int:
    """Adds two numbers."""
    return a + b

@server.tool()
def talk(how: str) -> str:
    """Fails."""
    if how == "hang":
        time.sleep(60)
    if how == "raise":
        raise ValueError("no such thing")
    return "x" * {"long": 100_000, "huge": 10_000_000}[how]

if sys.argv[1:]:
    server.run("streamable-http", port=int(sys.argv[1]))
server.run()
'''


class Counting(BaseHTTPRequestHandler):
    """Sessions that count their steps and end at the second; some words misbehave."""

    sessions: ClassVar[dict[str, int]] = {}
    tokens: ClassVar[set[str]] = set()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        session, what = asked["session"], self.path.rpartition("/")[2]
        self.tokens.add(self.headers.get("Authorization", ""))
        if what == "reset":
            self.sessions[session] = 0
            return self._say({"observation": f" {asked['row']['answer']}"})
        if what == "close":
            return self._say({"reward": 0.25} if self.sessions.pop(session, 0) else {})
        return self._step(session, asked["action"])

    def _step(self, session: str, action: str) -> None:
        if action == "hang":
            time.sleep(scale_seconds(3))
        if action == "elsewhere":
            self.send_response(302)
            self.send_header("Location", "http://127.0.0.1:9/")
            return self.end_headers()
        if action == "fail":
            return self.send_error(500)
        self.sessions[session] += 1
        count = self.sessions[session]
        return self._say(
            {"list": [1], "text": {"reward": "1"}, "huge": {"observation": "x" * 10_000_000}}.get(
                action, {"observation": f"{count}", "reward": 0.5, "done": count == 2}
            )
        )

    def _say(self, what: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(what).encode())

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Counting)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/games"
    server.shutdown()
    server.server_close()


def said(pool: EnvironmentPool, *questions: tuple[dict[str, Any], str | None]) -> list[RawAnswer]:
    for index, (question, session) in enumerate(questions):
        pool.ask(index, question, session)
    answers: dict[int, RawAnswer] = {}
    wait_until(lambda: answers.update(pool.take_answers()) or len(answers) == len(questions), 60, pause_s=0.005)
    return [answers[index] for index in range(len(questions))]


def test_an_environment_behind_http_keeps_a_session_for_each_rollout(url: str, tmp_path: Path) -> None:
    spec = EnvironmentSpec(url=url, timeout_s=scale_seconds(1.0), num_workers=2)
    described = describe_environment(spec)
    assert (described.is_stateful, described.has_tools_alone, described.schemas) == (True, False, ())
    pool = EnvironmentPool(spec, tmp_path / "log.txt", described)
    first, other = "generate/1#0", "generate/1#1"
    row = {"reset": {"prompt": [{"role": "user", "content": "play"}], "answer": "7"}}
    try:
        begun = [read_answer(each).messages[0]["content"] for each in said(pool, (row, first), (row, other))]
        steps = [read_answer(each) for each in said(pool, ({"step": "a"}, first), ({"step": "b"}, first))]
        failed = said(pool, ({"step": "hang"}, other))
        late = read_answer(said(pool, ({"step": "c"}, other))[0])
        ends = [read_answer(each) for each in said(pool, ({"finish": first}, first), ({"finish": other}, other))]
    finally:
        pool.close()
    assert begun == [" 7", " 7"]
    assert [(step.messages[0]["content"], step.reward, step.is_end) for step in steps] == [
        ("1", 0.5, False),
        ("2", 0.5, True),
    ]
    assert failed[0].kind == TIMED_OUT
    assert not late.failure, "what one step took too long for, the session has outlived"
    assert [end.reward for end in ends] == [0.25, 0.25]
    assert Counting.tokens == {f"Bearer {TOKEN}"}
    assert TOKEN not in spec.model_dump_json()


NO_ANSWERS = (
    ("list", "the answer is '[1]', not a dict"),
    ("text", "reward is '1', not a finite number"),
    ("huge", "an answer of more than 1048576 bytes"),
    ("fail", "answered with status 500"),
    ("elsewhere", "answered with status 302"),
)


@pytest.mark.parametrize(("action", "reason"), mark_nightly(NO_ANSWERS, but=NO_ANSWERS[2:]))
def test_a_server_that_says_what_is_no_answer_fails_that_rollout_by_name(
    url: str, action: str, reason: str, tmp_path: Path
) -> None:
    pool = EnvironmentPool(EnvironmentSpec(url=url, timeout_s=scale_seconds(2.0), num_workers=1), tmp_path / "log.txt")
    try:
        _, answer = said(pool, ({"reset": {"answer": ""}}, "s"), ({"step": action}, "s"))
    finally:
        pool.close()
    assert reason in read_answer(answer).failure
    assert read_answer(answer) == Answer(failure=read_answer(answer).failure)


def test_servers_that_do_not_answer_are_refused_before_a_run(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"http://127.0.0.1:{probe.getsockname()[1]}/x"
        for key, spec in {"url": EnvironmentSpec(url=place), "mcp": EnvironmentSpec(mcp=(place,))}.items():
            with pytest.raises(SpecError, match="does not answer") as caught:
                describe_environment(spec)
            assert caught.value.where == f"rollout.environment.{key}: {place}"
            assert TOKEN_VARIABLE in caught.value.way_out
    file = tmp_path / "server.py"
    file.write_text("print('hello', flush=True)\nimport time; time.sleep(60)")
    with pytest.raises(SpecError, match="the MCP server cannot be used: an answer that is not JSON"):
        describe_environment(EnvironmentSpec(mcp=(str(file),)))


def is_there(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(params=["stdio", pytest.param("http", marks=pytest.mark.nightly)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A server made with the mcp package."""
    file = tmp_path / "numbers.server.py"
    file.write_text(MCP_SERVER)
    if request.param == "stdio":
        yield str(file)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, str(file), str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_until(lambda: is_there(port), 60)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


def test_tools_of_an_mcp_server_are_called_side_by_side_and_every_fault_is_counted_by_its_kind(
    place: str, tmp_path: Path
) -> None:
    spec = EnvironmentSpec(mcp=(place,), timeout_s=scale_seconds(4.0), num_workers=2)
    described = describe_environment(spec)
    assert described.tool_names == ["add", "talk"]
    assert described.schemas[0]["function"]["parameters"]["required"] == ["a"]
    pool = EnvironmentPool(spec, tmp_path / "log.txt", described)
    calls = [("add", {"a": 2, "b": 3}), ("add", {"a": "2"}), ("talk", {"how": "raise"}), ("talk", {"how": "long"})]
    try:
        first = said(pool, *[({"call": name, "arguments": setting}, None) for name, setting in calls])
        huge, hung = said(pool, *[({"call": "talk", "arguments": {"how": how}}, None) for how in ("huge", "hang")])
    finally:
        pool.close()
    assert first[0].value == "5"
    assert [each.kind or OK for each in first] == [OK, WRONG, RAISED, TOO_LONG]
    assert "'2' is not of type 'integer'" in first[1].failure
    assert (huge.kind, hung.kind) == (TOO_LONG, TIMED_OUT)
    assert DIED not in {each.kind for each in (*first, huge, hung)}


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"url": "http://example.org/games"}, "neither https://"),
        ({"url": "ftp://127.0.0.1/games"}, "neither https://"),
        ({"url": "https://user:secret@example.org"}, "no user, password"),
        ({"mcp": ["https://example.org/mcp?key=secret"]}, "no user, password"),
        ({"mcp": ["server.js"]}, "neither https://"),
        ({"url": "https://[example"}, "is not an address"),
        ({"url": "https://example.org", "path": "game.py:play"}, "a rollout has one"),
    ],
)
def test_addresses_that_could_be_read_on_their_way_or_hold_a_secret_are_refused(setting: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        EnvironmentSpec(**setting)
    assert EnvironmentSpec(url="http://[::1]:8000/x", mcp=("https://example.org/mcp",)).is_remote
