"""Runs that cannot go on: one message, the right exit code, nothing left running, a readable run folder."""

import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.runtime.conftest import FinishedRun, Runner, alive, descendants_of, finish, start, wait_for

pytestmark = pytest.mark.engine

QUICKSTART = "examples/quickstart.yaml"


def _shared_memory_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("rlplan-", "deepspeed"))}


def _assert_one_message(run: FinishedRun) -> None:
    assert "Traceback" not in run.stderr
    assert len(re.findall(r"^error: ", run.stderr, flags=re.MULTILINE)) == 1, run.stderr
    for label in ("where:", "rule:", "way out:"):
        assert label in run.stderr


@pytest.mark.parametrize(
    ("number", "exit_code", "every"),
    [
        pytest.param(signal.SIGINT, 130, 0, id="Ctrl-C", marks=pytest.mark.nightly),
        pytest.param(signal.SIGTERM, 75, 1, id="resumable"),
    ],
)
def test_a_signal_in_the_middle_of_training_stops_everything_within_ten_seconds(
    number: signal.Signals, exit_code: int, every: int, tmp_path: Path
) -> None:
    before = _shared_memory_files()
    process = start("run", QUICKSTART, f"checkpoints.every={every}", "--out", str(tmp_path / "run"))
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3, 120)
    children = descendants_of(process.pid)
    assert len(children) > 4
    began = time.monotonic()
    process.send_signal(number)
    run = finish(process, tmp_path / "run")
    assert time.monotonic() - began < 10
    assert run.exit_code == exit_code
    _assert_one_message(run)
    assert alive(children) == []
    assert _shared_memory_files() == before
    assert run.status["state"] == "interrupted"
    assert run.status["exit_code"] == exit_code
    assert ("resume with `rlplan run --resume" in run.stderr) == bool(every)
    assert [row["step"] for row in run.metrics][:3] == [0, 1, 2]
    assert run.trace.spans
    report = finish(start("report", str(run.folder)), tmp_path)
    assert report.exit_code == 0, report.stderr


def test_a_signal_while_ray_starts_leaves_nothing_behind(tmp_path: Path) -> None:
    process = start("run", QUICKSTART, "--out", str(tmp_path / "run"))
    wait_for(lambda: (tmp_path / "run" / "status.json").exists() and len(descendants_of(process.pid)) > 1, 60)
    children = descendants_of(process.pid)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    run = finish(process, tmp_path / "run")
    assert time.monotonic() - began < 10
    assert run.exit_code == 143
    assert "Traceback" not in run.stderr
    assert alive(children) == []
    assert run.status["state"] == "interrupted"


def test_a_killed_worker_fails_the_run_by_name(tmp_path: Path) -> None:
    process = start("run", QUICKSTART, "--out", str(tmp_path / "run"))
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, 120)
    children = descendants_of(process.pid)
    os.kill(_worker_pids(children)[0], signal.SIGKILL)
    run = finish(process, tmp_path / "run")
    assert run.exit_code == 5
    _assert_one_message(run)
    assert re.search(r"error: \w+[/\w]* is gone", run.stderr)
    assert alive(children) == []
    assert run.status["state"] == "failed"


@pytest.mark.nightly
def test_a_driver_that_is_killed_outright_takes_its_workers_along(tmp_path: Path) -> None:
    """Workers, which hold the memory, are gone at once; two small agents of Ray take up to a minute."""
    process = start("run", QUICKSTART, "--out", str(tmp_path / "run"))
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 1, 120)
    children = descendants_of(process.pid)
    workers = _worker_pids(children)
    assert len(workers) == 4
    process.kill()
    process.communicate(timeout=20)
    wait_for(lambda: alive(workers) == [], 5)
    wait_for(lambda: alive(children) == [], 90)


def test_a_port_in_use_is_said_with_the_way_out(run_job: Runner) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run = run_job(QUICKSTART, f"hardware.rendezvous_port={taken.getsockname()[1]}")
    assert run.exit_code == 4
    _assert_one_message(run)
    assert "cannot be used" in run.stderr


def test_a_plan_that_needs_more_memory_than_is_free_does_not_start(run_job: Runner) -> None:
    run = run_job(QUICKSTART, "hardware.memory=64TiB", "rollout.kv_cache_memory=32TiB")
    assert run.exit_code == 4
    _assert_one_message(run)
    assert re.search(r"needs 3\d\.\d TiB of memory, \d+\.?\d* GiB is free", run.stderr)
    assert not (run.folder / "trace.jsonl").exists()


def test_a_malformed_row_is_named_by_its_line(run_job: Runner, tmp_path: Path) -> None:
    rows = [{"id": str(number), "prompt": "Sort: 31245", "answer": "12345"} for number in range(40)]
    lines = [json.dumps(row) for row in rows]
    lines[16] = '{"id": "x", "prompt": "Sort: 1'
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    run = run_job(QUICKSTART, f"workload.prompts={tmp_path / 'train.jsonl'}")
    assert run.exit_code == 2
    _assert_one_message(run)
    assert "row 17: the line is not JSON" in run.stderr


def test_a_run_folder_is_not_used_twice(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious.txt").write_text("mine")
    run = finish(start("run", QUICKSTART, "--out", str(tmp_path / "run")), tmp_path / "run")
    assert run.exit_code == 2
    _assert_one_message(run)
    assert (tmp_path / "run" / "precious.txt").read_text() == "mine"


def _worker_pids(pids: list[int]) -> list[int]:
    import psutil

    names = {pid: " ".join(psutil.Process(pid).cmdline()) for pid in pids if psutil.pid_exists(pid)}
    return sorted(pid for pid, name in names.items() if name.startswith("ray::WorkerProcess"))
