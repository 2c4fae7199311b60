"""A worker group that closes: where Ray itself has lost a process, nobody is asked to go and waited for."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlplan.emit.execution import execution_spec
from rlplan.runtime.cluster import worker_group
from rlplan.runtime.cluster.worker_group import WorkerGroup
from tests.factories import make_plan

IGNORES_ITS_END = "trap '' TERM; while true; do sleep 0.1; done"


@pytest.fixture
def worker() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["/bin/sh", "-c", IGNORES_ITS_END]) as process:
        yield process
        process.kill()


def closed(monkeypatch: pytest.MonkeyPatch, folder: Path, said: str | None, worker: Any) -> tuple[list[bool], float]:
    """(whether the worker lived when Ray was left, seconds of closing). said: what has ended of Ray."""
    monkeypatch.setattr(worker_group, "STOP_S", 1.0)
    monkeypatch.setattr(worker_group, "scaled", float)
    others = {child.pid for child in worker_group.child_processes()} - {worker.pid}
    group, lived = WorkerGroup(execution_spec(make_plan()), folder), list[bool]()
    stands_in: Any = SimpleNamespace(
        address=None, dead_service=lambda: said, release=lambda: lived.append(worker.poll() is None)
    )
    group.cluster, group._foreign_pids = stands_in, others
    begun = time.monotonic()
    group.close()
    assert worker.poll() is not None
    return lived, time.monotonic() - begun


def test_where_a_process_of_ray_s_is_gone_workers_end_before_ray_is_left(
    worker: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert closed(monkeypatch, tmp_path, "Ray's gcs_server (process 7) is gone", worker)[0] == [False]


def test_where_ray_lives_they_get_their_time(
    worker: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lived, seconds = closed(monkeypatch, tmp_path, None, worker)
    assert lived == [True]
    assert seconds >= 0.5
