"""One deadline holds for a whole exchange over HTTP, for each client, whatever a server sends in drops or endlessly."""

import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request

import pytest

from rlplan.errors import HostError
from rlplan.runtime.environments.mcp_tools import McpServer
from rlplan.runtime.environments.remote import RemoteEnvironment
from rlplan.runtime.environments.tool_calls import TIMED_OUT, TOO_LONG
from rlplan.runtime.models import hub
from rlplan.runtime.processes.http_exchange import THREAD, fetch
from rlplan.runtime.processes.line_process import Deadline, LateError, NoAnswerError
from tests.hostile_server import CHUNKED, HEAD, SHAPES, TOO_MUCH, Shape, serve_shapes
from tests.waiting import limit_time, wait_until

DEADLINE_S = 1.0


def ask_environment(address: str) -> str:
    try:
        RemoteEnvironment(address, "run", DEADLINE_S).answer({"session": "a", "step": "b"})
    except LateError:
        return TIMED_OUT
    except NoAnswerError as error:
        return TOO_LONG if "more than" in str(error) else str(error)
    return "an answer"


def ask_tool_server(address: str) -> str:
    answer = McpServer(address).call("add", {}, Deadline(DEADLINE_S))
    return answer["kind"] if answer["kind"] in (TIMED_OUT, TOO_LONG) else answer["error"]


def fetch_config(address: str) -> str:
    try:
        hub.fetch_config(f"{address.rpartition('/')[2]}/model")
    except HostError as error:
        return TIMED_OUT if "timeout after" in str(error) else TOO_LONG if "more than" in str(error) else str(error)
    return "an answer"


CLIENTS = {"environment": ask_environment, "tools": ask_tool_server, "hub": fetch_config}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hub, "TIMEOUT_S", DEADLINE_S)


def ask_all(
    client: str, shapes: Mapping[str, Shape], patch: pytest.MonkeyPatch, scheme: str = "http"
) -> dict[str, str]:
    """The outcome of each shape of an answer; all are asked for at the same time."""
    with serve_shapes([*shapes.values()]) as port, ThreadPoolExecutor(len(shapes)) as pool:
        address = f"{scheme}://127.0.0.1:{port}"
        patch.setenv("HF_ENDPOINT", address)
        asked = pool.map(CLIENTS[client], [f"{address}/shape-{number}" for number in range(len(shapes))])
        return dict(zip(shapes, asked, strict=True))


@pytest.mark.parametrize("client", CLIENTS)
def test_answers_in_drops_end_at_the_deadline(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with limit_time(1.0, DEADLINE_S):
        outcomes = ask_all(client, SHAPES, monkeypatch)
    assert outcomes == dict.fromkeys(SHAPES, TIMED_OUT)
    wait_until(lambda: THREAD not in {thread.name for thread in threading.enumerate()}, 10)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_tls_handshake_that_does_not_end_ends_at_the_deadline(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {name: SHAPES[name] for name in ("silence",)}
    with limit_time(1.0, DEADLINE_S):
        assert ask_all(client, shapes, monkeypatch, "https") == dict.fromkeys(shapes, TIMED_OUT)


@pytest.mark.parametrize("client", CLIENTS)
def test_answers_without_an_end_are_refused_as_too_long(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = ask_all(client, TOO_MUCH, monkeypatch)
    assert set(outcomes.values()) <= {TOO_LONG, TIMED_OUT}
    assert outcomes["a long chunk"] == TOO_LONG


def test_a_name_that_is_looked_up_for_ever_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = threading.Event()

    def look_up(*_: Any, **__: Any) -> Any:
        ends.wait(30)
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with limit_time(1.0, 0.2), pytest.raises(LateError):
        fetch(Request("http://example.org"), Deadline(0.2), 100)
    ends.set()


def test_a_server_that_reads_no_request_ends_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        request = Request(f"http://127.0.0.1:{listener.getsockname()[1]}", b"x" * (64 << 20), method="POST")
        with limit_time(1.0, 0.5), pytest.raises(LateError):
            fetch(request, Deadline(0.5), 100)


@pytest.mark.parametrize("shape", [HEAD + b"Content-Length: 5\r\n\r\n{}", CHUNKED + b"5\r\n{}"])
def test_half_an_answer_is_none(shape: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    for client in CLIENTS:
        (outcome,) = ask_all(client, {"": lambda: iter([shape])}, monkeypatch).values()
        assert "IncompleteRead" in outcome


def test_a_deadline_that_has_passed_sends_nothing() -> None:
    deadline = Deadline(0.001)
    time.sleep(0.01)
    with pytest.raises(LateError):
        fetch(Request("http://127.0.0.1:9"), deadline, 100)
