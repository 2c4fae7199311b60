"""Runs that cannot go on: one message, the right exit code, nothing left running, a readable run folder."""

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from rlplan.runtime.processes.machine_speed import scaled
from tests.runtime.conftest import FEW_PROCESSES, RLPLAN, FinishedRun, Runner, alive, descendants_of, finish, start
from tests.runtime.run_folder.small_disk import SmallDisk, small_disk
from tests.waiting import at_most, wait_for

pytestmark = pytest.mark.engine

QUICKSTART = "examples/quickstart.yaml"


def _mapped(pids: list[int]) -> set[Path]:
    """Files of shared memory that these processes have mapped."""
    found: set[Path] = set()
    for pid in pids:
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {Path(line.split()[5]) for line in lines if " /dev/shm/" in line}
    return found


def _arenas(pids: list[int], since: float) -> set[Path]:
    """Files of shared memory that these processes have made for weights. since: ids were others' before."""
    named = {path for pid in pids for path in Path("/dev/shm").glob(f"rlplan-{pid}-*")}
    return {path for path in named if path.stat().st_ctime >= since}


def _began(process: subprocess.Popen[str]) -> float:
    return psutil.Process(process.pid).create_time()


def _assert_one_message(run: FinishedRun) -> None:
    assert "Traceback" not in run.stderr
    assert len(re.findall(r"^error: ", run.stderr, flags=re.MULTILINE)) == 1, run.stderr
    for label in ("where:", "rule:", "way out:"):
        assert label in run.stderr


def interrupted(process: subprocess.Popen[str], folder: Path, number: signal.Signals) -> FinishedRun:
    """A run in the middle of training that gets a signal: it stops everything within ten seconds, and leaves a folder
    that can be reported on.
    """
    children, began = descendants_of(process.pid), _began(process)
    assert len(children) > 4
    mapped = _mapped(children)
    with at_most(10):
        process.send_signal(number)
        run = finish(process, folder)
    _assert_one_message(run)
    assert alive(children) == []
    assert [path for path in mapped if path.exists()] == []
    assert _arenas(children, began) == set()
    assert run.status["state"] == "interrupted"
    assert run.status["exit_code"] == run.exit_code
    assert [row["step"] for row in run.metrics][:3] == [0, 1, 2]
    assert run.trace.spans
    report = finish(start("report", str(folder)), folder.parent)
    assert report.exit_code == 0, report.stderr
    return run


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("number", "exit_code", "every"),
    [pytest.param(signal.SIGINT, 130, 0, id="Ctrl-C"), pytest.param(signal.SIGTERM, 75, 1, id="resumable")],
)
def test_a_signal_in_the_middle_of_training_stops_everything_within_ten_seconds(
    number: signal.Signals, exit_code: int, every: int, tmp_path: Path
) -> None:
    process = start("run", QUICKSTART, f"checkpoints.every={every}", "--out", str(tmp_path / "run"))
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3, 120)
    run = interrupted(process, tmp_path / "run", number)
    assert run.exit_code == exit_code
    assert ("resume with `rlplan run --resume" in run.stderr) == bool(every)


@pytest.mark.nightly
def test_a_signal_while_ray_starts_leaves_nothing_behind(tmp_path: Path) -> None:
    process = start("run", QUICKSTART, "--out", str(tmp_path / "run"))
    wait_for(lambda: (tmp_path / "run" / "status.json").exists() and len(descendants_of(process.pid)) > 1, 60)
    children = descendants_of(process.pid)
    with at_most(10):
        process.send_signal(signal.SIGTERM)
        run = finish(process, tmp_path / "run")
    assert run.exit_code == 143
    assert "Traceback" not in run.stderr
    assert alive(children) == []
    assert run.status["state"] == "interrupted"


@pytest.mark.nightly
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
    process.communicate(timeout=scaled(20))
    wait_for(lambda: alive(workers) == [], 5)
    wait_for(lambda: alive(children) == [], 90)


@pytest.mark.nightly
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
    run = run_job(QUICKSTART, f"data.prompts={tmp_path / 'train.jsonl'}")
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


SHORT_STEPS = ("workload.num_steps=1000", "workload.evaluate_every=1000", "workload.num_prompts_per_step=8")
SMALL_BATCH = ("workload.mini_batch_size=64", "preflight.rehearses=false")
KEEPS_ALL = ("checkpoints.every=1", "checkpoints.keep_last=50")


def test_a_disk_that_fills_up_costs_a_checkpoint_then_the_run_and_with_room_it_is_resumed_as_said(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path / "disk", "128m") as disk:
        job = (QUICKSTART, *SHORT_STEPS, *SMALL_BATCH, *KEEPS_ALL, *FEW_PROCESSES)
        with _started_on(disk, "run", *job, "--out", str(disk.folder / "run")) as process:
            wait_for(disk.path("run/checkpoints/latest.json").exists, 120)
            disk.fill(leaving=5_000_000)  # less than a checkpoint takes, more than a busy machine's steps write
            alarms, metrics = disk.path("run/alarms.jsonl"), disk.path("run/metrics.jsonl")
            wait_for(lambda: "no checkpoint of step" in alarms.read_text(), 120)
            steps = metrics.read_text().count("\n")
            wait_for(lambda: metrics.read_text().count("\n") > steps, 120)
            children, began = descendants_of(process.pid), _began(process)
            wait_for(lambda: disk.fill() or process.poll() is not None, 60)  # a checkpoint that fails gives room back
            run = finish(process, disk.path("run"))
        assert run.exit_code == 5, run.stderr
        _assert_one_message(run)
        assert re.search(r"^error: \S+ cannot be written: the disk is full \(.* free\)$", run.stderr, re.MULTILINE)
        assert alive(children) == []
        assert _arenas([process.pid, *children], began) == set()
        assert (run.status["state"], run.status["exit_code"]) == ("failed", 5)
        way_out = re.search(r"resume with `rlplan (.*)`$", run.stderr, re.MULTILINE)
        assert way_out
        disk.path("filler").unlink()
        with _started_on(disk, *way_out[1].split()) as resumed:
            wait_for(lambda: '"resume"' in alarms.read_text(), 60)
            resumed.terminate()
            ended = finish(resumed, disk.path("run"))
        assert ended.exit_code == 75, ended.stderr


@contextmanager
def _started_on(disk: SmallDisk, *arguments: str) -> "Iterator[subprocess.Popen[str]]":
    """An `rlplan` command that sees the disk, ended with the block."""
    command = disk.command(RLPLAN, *arguments)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
