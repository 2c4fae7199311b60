"""Trackers online: a resumed run goes on under its id, and a server that is away or slow stops nothing."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from rlplan.errors import HostError
from rlplan.runtime.driver.preflight import _check_loggers
from rlplan.runtime.run_folder.recorder import Recorder
from rlplan.runtime.sinks.followers import Followers
from rlplan.spec.parts.conduct import MetricsSpec
from tests.factories import make_job
from tests.waiting import wait_until


class Server(ThreadingHTTPServer):
    """A tracking server that answers as MLflow's REST API says. runs: by id, with metrics as (step, key, value)."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.headers: list[str] = []
        super().__init__(("127.0.0.1", port), Handler)

    def answer(self, path: str, body: dict[str, Any], query: dict[str, list[str]]) -> tuple[int, dict[str, Any]]:
        match path:
            case "experiments/get-by-name":
                name = query["experiment_name"][0]
                if name not in self.experiments:
                    return 404, {"error_code": "RESOURCE_DOES_NOT_EXIST"}
                return 200, {"experiment": {"experiment_id": self.experiments[name]}}
            case "experiments/create":
                self.experiments[body["name"]] = str(len(self.experiments))
                return 200, {"experiment_id": self.experiments[body["name"]]}
            case "runs/search":
                tag = body["filter"].removeprefix("tags.`rlplan_run_id` = '").removesuffix("'")
                tagged = [run for run in self.runs.values() if {"key": "rlplan_run_id", "value": tag} in run["tags"]]
                return 200, {"runs": [{"info": {"run_id": run["id"]}} for run in tagged]} if tagged else {}
            case "runs/create":
                run = {"id": f"r{len(self.runs)}", "metrics": [], "status": "RUNNING", **body}
                self.runs[run["id"]] = run
                return 200, {"run": {"info": {"run_id": run["id"]}}}
            case "runs/log-batch":
                assert len(body["metrics"]) <= 1000
                self.runs[body["run_id"]]["metrics"] += [(m["step"], m["key"], m["value"]) for m in body["metrics"]]
                return 200, {}
            case "runs/update":
                self.runs[body["run_id"]]["status"] = body["status"]
                return 200, {}
        return 400, {"error_code": "BAD_REQUEST"}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *words: object) -> None:
        pass

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        url = urlsplit(self.path)
        self.server.headers.append(self.headers.get("Authorization", ""))
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        code, answer = self.server.answer(url.path.removeprefix("/api/2.0/mlflow/"), body, parse_qs(url.query))
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving(port: int = 0) -> Iterator[Server]:
    server = Server(port)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def do_steps(folder: Path, *steps: int, after: int | None = None) -> Recorder:
    (folder / "logs").mkdir(exist_ok=True)
    recorder = Recorder(folder, {}, after)
    recorder.write_status("running", None)
    for step in steps:
        recorder.write_row("metrics.jsonl", {"step": step, "reward/mean": step / 2})
        recorder.write_row("timings.jsonl", {"step": step, "step_s": 1.0})
    recorder.close()
    return recorder


def follow(folder: Path, recorder: Recorder, after: int = -1, **metrics: Any) -> Followers:
    return Followers(MetricsSpec(**metrics), folder, "quickstart", recorder.facts["run_id"], after)


def test_a_resumed_run_continues_the_same_run_of_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"sinks": ("mlflow",), "project": "sorting", "run_name": "first try"}
    with serving() as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "sesame")
        follow(tmp_path, do_steps(tmp_path, 1, 2, 3), **settings).close()
        follow(tmp_path, do_steps(tmp_path, 3, 4, after=2), 2, **settings).close()
        other = tmp_path / "other"
        other.mkdir()
        follow(other, do_steps(other, 1), **settings).close()
    assert {*server.headers} == {"Bearer sesame"}
    assert list(server.experiments) == ["sorting"]
    first, second = server.runs.values()
    assert (first["run_name"], first["status"]) == ("first try", "FINISHED")
    assert [step for step, key, _ in first["metrics"] if key == "reward/mean"] == [1, 2, 3, 3, 4]
    assert [value for _, key, value in second["metrics"] if key == "reward/mean"] == [0.5]


def test_metrics_wait_for_a_server_that_comes_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    followers = follow(tmp_path, do_steps(tmp_path, 1, 2), sinks=("mlflow",))
    lines: list[str] = []
    wait_until(lambda: lines.extend(followers.take_problems()) or lines, 30)
    assert lines[0].startswith("MLflow is not reached (")
    with serving(port) as server:
        followers.close()
    (run,) = server.runs.values()
    assert [step for step, key, _ in run["metrics"] if key == "step_s"] == [1, 2]


@pytest.mark.parametrize("sink", ["mlflow", pytest.param("wandb", marks=pytest.mark.nightly)])
def test_a_server_that_never_answers_costs_no_more_than_the_deadline(
    sink: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        monkeypatch.setenv("WANDB_BASE_URL", address)
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        followers = follow(tmp_path, do_steps(tmp_path, 1), sinks=(sink,), is_online=True, sink_timeout_s=4)
        lines: list[str] = []
        wait_until(lambda: lines.extend(followers.take_problems()) or lines, 60)
        assert "is not reached" in lines[0]
        start = time.monotonic()
        followers.close()
        assert time.monotonic() - start < 4 + 5
    if sink == "wandb":
        assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb")), "its metrics can be uploaded later"


def test_mlflow_without_a_server_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(HostError, match="MLFLOW_TRACKING_URI is not set"):
        _check_loggers(make_job(metrics={"sinks": ["mlflow"]}))
