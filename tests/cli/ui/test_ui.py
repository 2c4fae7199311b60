"""`rlplan ui`: who may ask, what is answered, and the page in a real browser."""

import json
import re
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from rlplan_cli.commands.start.ui import command
from rlplan_cli.ui import server as served
from rlplan_cli.ui.answer import Asked, answer
from rlplan_cli.ui.page import LENGTHS
from rlplan_cli.ui.server import MAX_BYTES, Server

from benchmarks.pages.chromium import Chromium
from rlplan.errors import HostError
from rlplan.spec.algorithms import ALGORITHMS
from rlplan.spec.files.job_file import load_job
from tests.waiting import wait_until

FIELDS = {
    "model": "Qwen/Qwen2.5-0.5B", "algorithm": "grpo", "gpus": "2xh100-sxm", "max_prompt_len": "512",
    "max_response_len": "1024", "num_prompts": "32", "num_samples": "8", "placement": "", "zero_stage": "", "tp": "",
    "more": "",
}  # fmt: skip


@pytest.fixture(name="server", scope="module")
def _server() -> Iterator[Server]:
    with Server(0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def asked(server: Server, path: str, body: str | None = None, **headers: str) -> tuple[int, str]:
    """(status, text) of a request."""
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    method = "GET" if body is None else "POST"
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    reply = connection.getresponse()
    text = reply.read().decode()
    connection.close()
    return reply.status, text


def test_nothing_is_answered_without_the_token_or_under_another_name(server: Server) -> None:
    body = json.dumps(FIELDS)
    assert asked(server, "/")[0] == 403
    assert asked(server, "/?token=wrong")[0] == 403
    assert asked(server, "/", body)[0] == 403
    assert asked(server, "/", body, X_Token=server.token, Host="evil.example")[0] == 403
    assert asked(server, f"/?token={server.token}")[0] == 200
    assert asked(server, f"/other?token={server.token}")[0] == 404
    assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("length", ["\xb2", "9" * 5000, "-1", ""])
def test_a_length_that_is_no_number_of_bytes_is_refused(server: Server, length: str) -> None:
    assert asked(server, "/", "{}", X_Token=server.token, Content_Length=length)[0] == 400


def test_a_page_that_goes_away_leaves_nothing_in_the_terminal(
    server: Server, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, gone = threading.Event(), threading.Event()

    def slow(_: object) -> dict[str, str]:
        assert gone.wait(10)
        answered.set()
        return {"html": "x" * 10_000_000}

    monkeypatch.setattr(served, "answer", slow)
    with socket.create_connection(("127.0.0.1", server.server_port)) as page:
        page.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed by a reset
        head = f"POST / HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\nX-Token: {server.token}\r\n"
        page.sendall(f"{head}Content-Length: 2\r\n\r\n{{}}".encode())
        time.sleep(0.1)
    gone.set()
    assert answered.wait(10)
    monkeypatch.undo()
    assert asked(server, "/", json.dumps(FIELDS), X_Token=server.token)[0] == 200
    assert capfd.readouterr().err == ""


def test_a_bug_is_told_to_the_page(
    server: Server, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "answer", lambda _: {}["it"])
    assert asked(server, "/", "{}", X_Token=server.token) == (
        500,
        "a bug in rlplan: KeyError: 'it'. Please report the traceback in the terminal",
    )
    assert "KeyError" in capfd.readouterr().err


def test_one_question_at_a_time_is_searched_and_of_those_that_wait_the_newest(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, searched = threading.Event(), []

    def slow(fields: dict[str, str]) -> dict[str, str]:
        searched.append(fields["model"])
        assert may_end.wait(60)
        return fields

    monkeypatch.setattr(served, "answer", slow)
    answer_text: dict[str, int] = {}

    def ask(name: str) -> None:
        answer_text[name] = asked(server, "/", json.dumps({"model": name}), X_Token=server.token)[0]

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("first", "left", "last")]
    for number, thread in enumerate(threads, server.num_asked + 1):
        thread.start()
        wait_until(lambda number=number: server.num_asked == number, 30, 0.01)
    may_end.set()
    for thread in threads:
        thread.join()
    assert answer_text == {"first": 200, "left": 409, "last": 200}
    assert searched == ["first", "last"]


@pytest.mark.parametrize("body", ["", "{", "[]", '{"model": 7}', '{"model": "' + "x" * MAX_BYTES + '"}'])
def test_what_is_no_question_is_refused(server: Server, body: str) -> None:
    assert asked(server, "/", body, X_Token=server.token)[0] == 400


def test_an_answer_is_the_plan_its_job_file_and_its_command(tmp_path: Path) -> None:
    answer_text = answer(FIELDS)
    assert "Qwen/Qwen2.5-0.5B on 2x h100-sxm" in answer_text["html"]
    assert "data-chart" in answer_text["html"]
    assert answer_text["command"].startswith(
        "rlplan plan --model Qwen/Qwen2.5-0.5B --algorithm grpo --gpus 2xh100-sxm workload."
    )
    (tmp_path / "job.yaml").write_text(answer_text["job"])
    job = load_job(tmp_path / "job.yaml")
    assert (job.workload.max_prompt_len, job.workload.max_response_len) == (512, 1024)
    assert job.hardware.num_devices == 2


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_of_the_menu_is_planned_with_the_first_values(algorithm: str, tmp_path: Path) -> None:
    first = {name: value for name, _, value, _ in LENGTHS}
    answer_text = answer(FIELDS | first | {"algorithm": algorithm})
    assert algorithm in answer_text["html"]
    (tmp_path / "job.yaml").write_text(answer_text["job"])
    assert load_job(tmp_path / "job.yaml").algorithm.name == algorithm


@pytest.mark.parametrize("more", ["algorithm.kl_coef=0.5", "hardware.host_memory=256GiB", "policy.init=random"])
def test_further_keys_go_below_what_the_form_names(more: str, tmp_path: Path) -> None:
    answer_text = answer(FIELDS | {"more": more})
    assert f"  {more.partition('.')[2].replace('=', ': ')}\n" in answer_text["job"]
    (tmp_path / "job.yaml").write_text(answer_text["job"])
    assert load_job(tmp_path / "job.yaml").hardware.num_devices == 2


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"more": "rollout.tp=3"}, "does not divide"),
        ({"more": "'open"}, "the further keys cannot be read"),
        ({"max_response_len": "many"}, "max_response_len"),
        ({"gpus": "8xnothing"}, "nothing"),
        ({"other": "1"}, "unknown field"),
    ],
)
def test_what_is_wrong_is_said_in_four_parts(change: dict[str, str], what: str) -> None:
    answer_text = answer(FIELDS | change)
    assert what in answer_text["html"]
    assert re.findall("<dt>(.*?)</dt>", answer_text["html"]) == ["Where", "Rule", "Way out"]
    assert answer_text["job"] == answer_text["command"] == ""


def test_what_is_typed_comes_back_as_text() -> None:
    assert "<script>" not in answer(FIELDS | {"gpus": "8x<script>alert(1)</script>"})["html"]


def test_a_job_that_does_not_fit_says_what_would_help() -> None:
    answer_text = answer(FIELDS | {"model": "Qwen/Qwen2.5-7B", "gpus": "1xrtx4090"})
    assert "Does not fit" in answer_text["html"]
    assert "What would help" in answer_text["html"]


def test_an_answer_is_the_plan_that_a_command_finds() -> None:
    answer_text = answer(FIELDS | {"gpus": "4xrtx4090"})["html"]
    assert "assumes hosts of 256 GiB" in answer_text
    assert "<dt>Step time</dt>" in answer_text
    assert "worst case" in answer_text


def test_an_empty_field_is_left_to_rlplan() -> None:
    assert Asked.parse({"model": "Qwen/Qwen2.5-0.5B", "tp": " ", "more": "seed=1"}).overrides == ("seed=1",)


def test_a_browser_is_opened_without_the_token_on_its_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[Path, int, str]] = []

    def look(url: str) -> None:
        path = Path(unquote(urlsplit(url).path))
        opened.append((path, stat.S_IMODE(path.stat().st_mode), path.read_text()))

    printed: list[str] = []
    monkeypatch.setattr("webbrowser.open_new_tab", look)
    monkeypatch.setattr(Server, "serve_forever", lambda server: printed.append(server.address))
    command(port=0, opens=True)
    [(path, mode, text)] = opened
    assert (mode, path.exists()) == (0o600, False)
    assert printed[0] in text


def test_a_port_in_use_is_one_message() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(HostError, match=rf"port {port} cannot be used: address already in use") as error:
            Server(port)
    assert "--port 0" in str(error.value)


SAMPLES = "[...document.forms[0].elements.num_samples.parentElement.children].map((one) => one.disabled)"


def test_a_job_is_moved_in_a_browser_and_answered_at_once(server: Server, tmp_path: Path) -> None:
    answered = "document.querySelector('.ui').dataset.state === 'answered'"
    with Chromium() as browser:
        for size, dark in (("wide", False), ("phone", True)):
            browser.open(server.address, size, dark=dark)
            browser.wait(answered, 60)
            assert browser.said == []
            assert browser.says("document.querySelector('#answer h1').innerText") == "Qwen/Qwen2.5-7B on 8x h100-sxm"
            assert browser.says("document.documentElement.scrollWidth") <= (1366 if size == "wide" else 390)
        browser.says("void (window.left = charts.figures.flatMap((one) => one.plots))")
        browser.says("charts.showTip(9, 9, 'of a chart that is exchanged', [])")
        browser.says("(() => { const one = document.forms[0].elements.max_response_len; one.value = 2048;"
                     "one.dispatchEvent(new Event('change', {bubbles: true})); })()")  # fmt: skip
        browser.wait("document.getElementById('job').textContent.includes('max_response_len: 2048')", 60)
        browser.wait(answered)
        assert "max_response_len=2048" in browser.says("document.getElementById('command').textContent")
        assert browser.says("document.querySelector('#answer canvas') !== null")
        assert browser.says("left.length") > 1
        assert browser.says("left.filter((one) => uPlot.sync(one.cursor.sync.key).plots.includes(one)).length") == 0
        assert browser.says("charts.figures.every((one) => one.box.isConnected) && charts.tip.hidden")
        assert browser.says(SAMPLES) == [False, False]
        browser.says("(() => { const one = document.forms[0].elements.algorithm; one.value = 'sft';"
                     "one.dispatchEvent(new Event('change', {bubbles: true})); })()")  # fmt: skip
        browser.wait("document.getElementById('job').textContent.includes('algorithm: sft')", 60)
        assert browser.says(SAMPLES) == [True, True]
        browser.says("(() => { const one = document.forms[0].elements.more; one.value = 'rollout.tp=3';"
                     "one.dispatchEvent(new Event('change', {bubbles: true})); })()")  # fmt: skip
        browser.wait("document.querySelector('#answer .bad')?.innerText.includes('does not divide')", 60)
        assert browser.said == []


def test_words_fill_the_form_and_what_they_leave_out_stays() -> None:
    answer_text = answer(FIELDS | {"ask": "qwen3 8b on a 4090, 2k responses, tp 1"})
    assert answer_text["fields"] | {"more": ""} == {
        name: value for name, value in FIELDS.items() if name != "max_response_len"
    } | {"model": "Qwen/Qwen3-8B", "gpus": "1xrtx-4090", "max_response_len": "2048", "tp": "1", "more": ""}
    assert answer_text["html"].count("data-fix=") >= 1  # a fix is a button


def test_a_pasted_script_is_checked_on_the_gpus_of_the_form() -> None:
    script = "python3 -m verl.trainer.main_ppo \\\n  actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B \\\n"
    script += "  trainer.n_gpus_per_node=8\n"
    assert "Qwen/Qwen2.5-0.5B on 8x h100-sxm" in answer(FIELDS | {"ask": script, "gpus": "8xH100"})["html"]


def test_a_permalink_holds_the_question_and_a_fix_is_pressed(server: Server) -> None:
    with Chromium() as browser:
        browser.open(f"{server.address}#model=Qwen%2FQwen3-8B&gpus=1xrtx-4090", "phone")
        browser.wait("document.querySelector('[data-fix]') !== null", 60)
        fold = browser.says("document.querySelector('[data-fix]').getBoundingClientRect().bottom")
        assert fold <= 844  # verdict and first fix are seen without scrolling
        browser.says("document.querySelector('[data-fix]').click()")
        browser.wait("document.querySelector('#answer .status').innerText.startsWith('Fits')", 60)
        assert "more=training." in browser.says("location.hash")


def send_bytes(server: Server, data: bytes) -> bytes:
    """Send bytes on a connection of its own; return the whole answer."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@pytest.mark.parametrize(
    "line",
    ["", "GET", "\0\1\2", "GET / HTTP/x", "GET / / /", "POST /", "GET http://[ HTTP/1.0", "\x16\x03\x01\x02"],
)
def test_a_malformed_request_line_is_answered(server: Server, line: str) -> None:
    assert send_bytes(server, line.encode() + b"\r\n\r\n").startswith(b"HTTP/1.0 400 ")


def test_requests_in_drops_are_ended_and_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "REQUEST_S", 0.5)
    monkeypatch.setattr(served, "MAX_CONNECTIONS", 4)
    with Server(0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        start = b"POST / HTTP/1.1\r\nContent-Length: 9\r\nHost: 127.0.0.1:%d\r\nX-Token: %s\r\n\r\n{" % (
            server.server_port,
            server.token.encode(),
        )
        connections = [socket.create_connection(("127.0.0.1", server.server_port), timeout=30) for _ in range(4)]
        for connection, part in zip(connections, (b"", b"GET", b"GET / HTTP/1.1\r\nX: ", start), strict=True):
            connection.sendall(part)
        wait_until(lambda: len(server._connections) == 4, 10, pause_s=0.01)
        refused = socket.create_connection(("127.0.0.1", server.server_port), timeout=30)
        assert refused.recv(100).startswith(b"HTTP/1.0 503 ")
        wait_until(lambda: not server._connections, 10, pause_s=0.02)
        assert asked(server, f"/?token={server.token}")[0] == 200
        for connection in (*connections, refused):
            connection.close()
        server.shutdown()
        thread.join()
