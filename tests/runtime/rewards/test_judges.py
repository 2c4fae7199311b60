"""A judge behind HTTP that fails, answers nonsense or hangs: these responses fail by name, the others have rewards."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest

from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.rewards.reward_pool import RewardPool
from tests.factories import make_job
from tests.runtime.rewards.test_batches import rollout

JUDGE = """
import json, urllib.request

def ask(data_source, solution_str, ground_truth, extra_info=None):
    with urllib.request.urlopen("ADDRESS", solution_str.encode()) as answer:
        return json.load(answer)["score"]
"""
ANSWERS: dict[str, tuple[int, bytes]] = {
    "2": (200, b'{"score": 0.5}'),
    "500": (500, b"{}"),
    "empty": (200, b""),
    "page": (200, b"<html>busy</html>"),
    "list": (200, b"[]"),
    "words": (200, b'{"score": "very good"}'),
    "NaN": (200, b'{"score": NaN}'),
    "no score": (200, b'{"mark": 1}'),
    "no UTF-8": (200, b'{"score": "\xff"}'),
}
"""Status and body by response."""
FAILURES = {
    "500": "HTTP Error 500",
    "empty": "JSONDecodeError",
    "page": "JSONDecodeError",
    "list": "TypeError",
    "words": "returned str",
    "NaN": "returned nan",
    "no score": "KeyError: 'score'",
    "no UTF-8": "UnicodeDecodeError",
    "hangs": "timeout after",
}


@pytest.fixture
def address() -> Iterator[str]:
    is_over = Event()

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"])).decode()
            if text == "hangs":
                is_over.wait(60)
                return
            status, body = ANSWERS[text]
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    is_over.set()
    server.shutdown()
    server.server_close()


def test_a_judge_s_error_or_nonsense_fails_its_response_alone(address: str, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(JUDGE.replace("ADDRESS", address))
    path = f"{tmp_path / 'judge.py'}:ask"
    reward = {"kind": "function", "path": path, "name": "ask", "timeout_s": scale_seconds(2.0)}
    texts = ["2", *FAILURES, "2"]
    rollouts = [rollout(text, number) for number, text in enumerate(texts)]
    pool = RewardPool(make_job(rewards=[reward]))
    try:
        pool.start({"answer"})
        pool.judge(rollouts)
    finally:
        pool.close()
    assert [each.rewards for each in rollouts if each.text == "2"] == [{"ask": 0.5}] * 2
    for each in rollouts[1:-1]:
        assert each.has_failed
        assert not each.rewards
        assert FAILURES[each.text] in each.failure, json.dumps([each.text, each.failure])
    notes, _ = pool.take_notes()
    assert notes["ask/late"] == 1
