"""Runs that cannot go on: one message, the right exit code, nothing left running, a readable run folder."""

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from rlplan.runtime.processes.machine_speed import scale_seconds
from tests.runtime.conftest import (
    FEW_PROCESSES,
    RLPLAN,
    ROOT,
    FinishedRun,
    Runner,
    alive,
    finish,
    list_descendants,
    start,
)
from tests.runtime.run_folder.small_disk import SmallDisk, small_disk
from tests.waiting import limit_time, wait_until

pytestmark = pytest.mark.engine

QUICKSTART = "examples/quickstart.yaml"


def _find_mapped_files(pids: list[int]) -> set[Path]:
    """Files of shared memory that these processes have mapped."""
    paths: set[Path] = set()
    for pid in pids:
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            paths |= {Path(line.split()[5]) for line in lines if " /dev/shm/" in line}
    return paths


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


def run_and_interrupt(process: subprocess.Popen[str], folder: Path, number: signal.Signals) -> FinishedRun:
    """A run in the middle of training that gets a signal: it stops everything within ten seconds, and leaves a folder
    that can be reported on.
    """
    children, began = list_descendants(process.pid), _began(process)
    assert len(children) > 4
    mapped = _find_mapped_files(children)
    with limit_time(10):
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
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3, 120)
    run = run_and_interrupt(process, tmp_path / "run", number)
    assert run.exit_code == exit_code
    assert ("resume with `rlplan run --resume" in run.stderr) == bool(every)


@pytest.mark.nightly
def test_a_run_whose_terminal_is_lost_stops_everything_and_can_be_resumed(tmp_path: Path) -> None:
    """A dropped SSH connection: the kernel sends SIGHUP, and every further write to the terminal fails."""
    folder, (ours, its) = tmp_path / "run", pty.openpty()
    arguments = [RLPLAN, "run", QUICKSTART, "checkpoints.every=1", *FEW_PROCESSES, "--out", str(folder)]
    code = (
        "import fcntl, os, signal, termios\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup\n"
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        f"os.execv({arguments[0]!r}, {arguments!r})"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=its, stdout=its, stderr=its, start_new_session=True
    )
    os.close(its)
    metrics = folder / "metrics.jsonl"

    def has_made_two_steps() -> bool:
        if select.select([ours], [], [], 0)[0]:
            os.read(ours, 65536)  # a terminal that nobody reads fills up, and its writers wait
        return metrics.exists() and metrics.read_text().count("\n") >= 2

    wait_until(has_made_two_steps, 120)
    children = list_descendants(process.pid)
    assert len(children) > 4
    os.close(ours)
    assert process.wait(scale_seconds(20)) == 75
    assert alive(children) == []
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("interrupted", 75)
    assert "stopped by SIGHUP" in status["message"]


@pytest.mark.nightly
def test_a_signal_while_ray_starts_leaves_nothing_behind(tmp_path: Path) -> None:
    process = start("run", QUICKSTART, "--out", str(tmp_path / "run"))
    wait_until(lambda: (tmp_path / "run" / "status.json").exists() and len(list_descendants(process.pid)) > 1, 60)
    children = list_descendants(process.pid)
    with limit_time(10):
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
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, 120)
    children = list_descendants(process.pid)
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
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 1, 120)
    children = list_descendants(process.pid)
    workers = _worker_pids(children)
    assert len(workers) == 4
    process.kill()
    process.communicate(timeout=scale_seconds(20))
    wait_until(lambda: alive(workers) == [], 5)
    wait_until(lambda: alive(children) == [], 90)


@pytest.mark.nightly
def test_a_port_in_use_is_said_with_the_way_out(run_job: Runner) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run = run_job(QUICKSTART, f"hardware.rendezvous_port={taken.getsockname()[1]}")
    assert run.exit_code == 4
    _assert_one_message(run)
    assert "cannot be used" in run.stderr


def _worker_pids(pids: list[int]) -> list[int]:
    import psutil

    names = {pid: " ".join(psutil.Process(pid).cmdline()) for pid in pids if psutil.pid_exists(pid)}
    return sorted(pid for pid, name in names.items() if name.startswith("ray::WorkerProcess"))


SHORT_STEPS = ("workload.num_steps=1000", "workload.evaluate_every=1000", "workload.num_prompts_per_step=8")
SMALL_BATCH = ("workload.mini_batch_size=64", "preflight.rehearses=false")
KEEPS_ALL = ("checkpoints.every=1", "checkpoints.keep_last=50")


def test_a_run_lives_through_a_lost_engine_and_a_lost_checkpoint_and_is_resumed_and_stopped_as_it_says(
    tmp_path: Path,
) -> None:
    """One run for all: half of what a run costs is starting its processes.

    A disk that fills up costs a checkpoint, then the run; with room it is resumed, until a signal stops it.
    """
    with small_disk(tmp_path / "disk", "128m") as disk:
        job = (QUICKSTART, *SHORT_STEPS, *SMALL_BATCH, *KEEPS_ALL, *FEW_PROCESSES)
        folder = disk.path("run")
        with until_ended(_start_on_disk(disk, "run", *job, "--out", str(disk.folder / "run"))) as process:
            wait_until(disk.path("run/checkpoints/latest.json").exists, 120)
            lost = lose_engine(process, folder, signal.SIGKILL)
            children, began = list_descendants(process.pid), _began(process)
            disk.fill(leaving=5_000_000)  # less than a checkpoint takes, more than a busy machine's steps write
            alarms = disk.path("run/alarms.jsonl")
            assert "rollout_engine/0 is gone" in alarms.read_text()
            wait_until(lambda: "no checkpoint of step" in alarms.read_text(), 120)
            wait_for_steps(folder, 1, process)  # a line beside the checkpoint may have been refused, and have ended it
            wait_until(lambda: disk.fill() or process.poll() is not None, 60)  # a checkpoint that fails gives room back
            run = finish(process, folder)
        assert run.exit_code == 5, run.stderr
        _assert_one_message(run)
        assert re.search(r"^error: \S+ cannot be written: the disk is full \(.* free\)$", run.stderr, re.MULTILINE)
        assert alive([*children, *lost]) == []
        assert _arenas([process.pid, *children], began) == set()
        assert (run.status["state"], run.status["exit_code"]) == ("failed", 5)
        way_out = re.search(r"resume with `rlplan (.*)`$", run.stderr, re.MULTILINE)
        assert way_out
        disk.path("filler").unlink()
        with until_ended(_start_on_disk(disk, *way_out[1].split())) as resumed:
            wait_until(lambda: '"resume"' in alarms.read_text(), 60)
            wait_for_steps(folder, 2)
            ended = run_and_interrupt(resumed, folder, signal.SIGTERM)
        assert ended.exit_code == 75, ended.stderr
        assert "resume with `rlplan run --resume" in ended.stderr
        assert [row["step"] for row in ended.metrics] == list(range(len(ended.metrics)))
        assert max(row.get("sync/logprob_difference_max", 0.0) for row in ended.metrics) < 1e-4


def engine_pid(folder: Path) -> int:
    """The process of a run's engine; 0 before there is one."""
    log = folder / "logs" / "rollout_engine-0.log"
    matches = re.findall(r"rollout_engine/0 is process (\d+)", log.read_text()) if log.exists() else []
    return int(matches[-1]) if matches else 0


def wait_for_steps(folder: Path, number: int, process: "subprocess.Popen[str] | None" = None) -> None:
    """Until so many more rows of metrics are written, or the process has ended."""
    metrics = folder / "metrics.jsonl"
    before = metrics.read_text().count("\n") if metrics.exists() else 0

    def has_finished() -> bool:
        has_ended = process is not None and process.poll() is not None
        return has_ended or (metrics.exists() and metrics.read_text().count("\n") >= before + number)

    wait_until(has_finished, 120)


def lose_engine(process: subprocess.Popen[str], folder: Path, number: signal.Signals) -> list[int]:
    """Send a run's engine a signal, and wait until another one has taken part in a step. Out: the processes before."""
    pid = engine_pid(folder)
    before = [pid, *list_descendants(process.pid)]
    os.kill(pid, number)
    wait_until(lambda: engine_pid(folder) != pid, 120)
    wait_for_steps(folder, 2)
    return before


def _start_on_disk(disk: SmallDisk, *arguments: str) -> "subprocess.Popen[str]":
    """An `rlplan` command that sees the disk."""
    command, pipe = disk.command(RLPLAN, *arguments), subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


@contextmanager
def until_ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """A command, whose process group is ended with the block."""
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
