"""A run that goes on is followed from outside: only what is new is read, and how it ended is shown."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import RunError, SpecError
from rlplan.planner.plan import write_plan
from rlplan.runtime.run_folder.following import Follower, check_success, find_newest_run, is_running
from rlplan.runtime.run_folder.run_lock import LOCK_NAME, lock_run_folder
from rlplan.trace import MemorySample, Span, record_line
from tests.factories import make_plan


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder in which nothing has happened yet, held by this process."""
    folder = tmp_path / "runs" / "small" / "1"
    folder.mkdir(parents=True)
    write_plan(make_plan(), folder / "plan.json")
    (folder / LOCK_NAME).write_text(f"{os.getpid()}\n")
    return folder


def add(folder: Path, name: str, *rows: dict[str, Any] | str) -> None:
    with (folder / name).open("a") as file:
        file.writelines(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)


def status(folder: Path, state: str, exit_code: int | None = None, message: str = "") -> None:
    value = {"state": state, "exit_code": exit_code, "message": message, "seconds": 9.0}
    (folder / "status.json").write_text(json.dumps(value))


def memory_line(process: str, size: int, statistic: str = "resident", kind: str = "total") -> str:
    return record_line(MemorySample("generate", 1, process, "cpu:0", "policy", kind, statistic, size, 2.0)) + "\n"


def test_a_run_is_followed_from_its_first_step_to_its_end(run: Path) -> None:
    follower = Follower(run)
    assert (follower.read_new().state, follower.read_new().step) == ("starting", 0)
    status(run, "running")
    add(run, "metrics.jsonl", {"step": 1, "reward/mean": 0.5})
    add(run, "timings.jsonl", {"step": 1, "step_s": 2.0, "throughput/tokens_per_sec": 10.0})
    span = record_line(Span("generate", 1, "rollout_engine/0", "cpu:0", 1.0, 2.0)) + "\n"
    add(run, "trace.jsonl", span, memory_line("rollout_engine/0", 7), memory_line("rollout_engine/0", 11, "peak"))
    add(run, "alarms.jsonl", {"step": 1, "kind": "leak", "text": "it grows"})
    now = follower.read_new()
    assert (now.state, now.step, now.doing, now.seconds) == ("running", 1, "generate", 9.0)
    assert [*now.steps] == [{"step": 1, "reward/mean": 0.5, "step_s": 2.0, "throughput/tokens_per_sec": 10.0}]
    assert (now.peaks, now.held) == ({"rollout_engine/0": 11}, {"rollout_engine/0": 7})
    assert [*now.alarms] == ["step 1: it grows"]
    add(run, "trace.jsonl", memory_line("rollout_engine/0", 5))
    assert follower.read_new().held == {"rollout_engine/0": 5}
    (run / LOCK_NAME).unlink()
    status(run, "finished", 0)
    now = follower.read_new()
    assert (now.state, now.exit_code, now.is_going_on) == ("finished", 0, False)
    check_success(now, run)
    assert json.loads(json.dumps(now.as_json()))["peaks"] == {"rollout_engine/0": 11}


def test_half_a_line_waits_for_its_other_half_and_nonsense_is_left_out(run: Path) -> None:
    follower = Follower(run)
    add(run, "metrics.jsonl", '{"step": 1, "reward/mean"')
    assert not follower.read_new().steps
    add(run, "metrics.jsonl", ": 1.0}\n", "nonsense\n", "[1]\n", '{"step": "x"}\n', '{"step": 2}\n')
    assert [row["step"] for row in follower.read_new().steps] == [1, 2]


def test_a_run_that_goes_back_is_read_anew(run: Path) -> None:
    follower = Follower(run)
    add(run, "metrics.jsonl", {"step": 1}, {"step": 2}, {"step": 3})
    assert follower.read_new().step == 3
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    assert follower.read_new().step == 1


@pytest.mark.parametrize(
    ("state", "code", "expected", "words"),
    [
        ("failed", 5, 5, "the run has ended: it broke"),
        ("interrupted", 75, 75, "--resume"),
        ("running", None, 5, "ended without writing a final status"),
    ],
)
def test_a_run_that_did_not_end_well_gives_its_own_exit_code(
    run: Path, state: str, code: int | None, expected: int, words: str
) -> None:
    (run / LOCK_NAME).unlink()
    status(run, state, code, "it broke\nbadly")
    now = Follower(run).read_new()
    assert not now.is_going_on
    with pytest.raises(RunError, match=words) as caught:
        check_success(now, run)
    assert caught.value.exit_code == expected


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Path]:
    """A folder that another process holds locked, under the id of a process that is none."""
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'r+'); fcntl.flock(file, fcntl.LOCK_EX); print(1, flush=True);"
        "sys.stdin.read()"
    )
    lock = tmp_path / LOCK_NAME
    lock.write_text("4194304999\n")
    with subprocess.Popen(
        [sys.executable, "-c", code, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield tmp_path
        process.communicate(timeout=30)


def test_a_lock_that_is_held_says_that_a_run_goes_on_wherever_its_process_is(holder: Path) -> None:
    assert is_running(holder)


def test_a_lock_that_is_not_held_says_nothing(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_text("4194304999\n")
    assert not is_running(tmp_path)
    assert not is_running(tmp_path / "nowhere")
    (tmp_path / LOCK_NAME).write_text(f"{os.getpid()}\n")
    assert is_running(tmp_path)
    os.utime(tmp_path / LOCK_NAME, (1e9, 1e9))
    assert not is_running(tmp_path), "the process of that id began later"
    with lock_run_folder(tmp_path / "run"):
        assert is_running(tmp_path / "run")
    assert not is_running(tmp_path / "run")


def test_the_newest_run_is_found_and_what_is_none_is_refused(run: Path, tmp_path: Path) -> None:
    assert find_newest_run(tmp_path / "runs") == run
    with pytest.raises(SpecError, match="there is no run below"):
        find_newest_run(tmp_path / "nowhere")
    with pytest.raises(SpecError, match="is not a run folder"):
        Follower(tmp_path)
