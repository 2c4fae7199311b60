"""A cluster that closes, and one that stays: Ray is left once, and where it lost a process nobody is waited for."""

import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rlplan.emit.ray import RayPlacement
from rlplan.runtime.cluster import ray_cluster
from rlplan.runtime.cluster.ray_cluster import Cluster

IGNORES_ITS_END = "trap '' TERM; while true; do sleep 0.1; done"
ALONE = RayPlacement(bundles=(), islands=(), workers=())
OTHER = RayPlacement(bundles=({"CPU": 1.0},), islands=(), workers=())


@pytest.fixture
def worker() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["/bin/sh", "-c", IGNORES_ITS_END]) as process:
        yield process
        process.kill()


def closed(monkeypatch: pytest.MonkeyPatch, message: str | None, worker: Any) -> tuple[list[bool], float]:
    """(whether the worker lived when Ray was left, seconds of closing). said: what has ended of Ray."""
    monkeypatch.setattr(ray_cluster, "STOP_S", 1.0)
    monkeypatch.setattr(ray_cluster, "scale_seconds", float)
    cluster, lived = Cluster(), list[bool]()
    cluster.foreign_pids -= {worker.pid}
    monkeypatch.setattr(cluster, "dead_service", lambda: message)
    monkeypatch.setattr(cluster, "_leave", lambda: lived.append(worker.poll() is None))
    begun = time.monotonic()
    cluster.close()
    assert worker.poll() is not None
    return lived, time.monotonic() - begun


def test_where_a_process_of_ray_s_is_gone_workers_end_before_ray_is_left(
    worker: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    assert closed(monkeypatch, "Ray's gcs_server (process 7) is gone", worker)[0] == [False]


def test_where_ray_lives_they_get_their_time(
    worker: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    lived, seconds = closed(monkeypatch, None, worker)
    assert lived == [True]
    assert seconds >= 0.5


@pytest.mark.parametrize(
    ("address", "then", "dead", "num_starts"),
    [
        pytest.param(None, ALONE, None, 1, id="kept for the next workers"),
        pytest.param(None, OTHER, None, 2, id="started anew for another placement"),
        pytest.param(None, ALONE, "Ray's raylet (process 7) is gone", 2, id="started anew where it lost a process"),
        pytest.param("10.0.0.1:6379", ALONE, None, 2, id="joined anew, as a host of it may have gone"),
    ],
)
def test_ray_stays_while_workers_come_and_go(
    address: str | None, then: RayPlacement, dead: str | None, num_starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[object] = []
    for start in ("_start_alone", "_join"):
        monkeypatch.setattr(ray_cluster, start, begun.append)
    monkeypatch.setattr(ray_cluster, "is_ray_up", lambda: bool(begun))
    cluster = Cluster(address)
    monkeypatch.setattr(cluster, "_reserve", lambda *_: None)
    monkeypatch.setattr(cluster, "_leave", lambda: None)
    monkeypatch.setattr(cluster, "dead_service", lambda: dead)
    cluster.reserve(ALONE, 1.0)
    cluster.keep_or_close(then)
    cluster.reserve(then, 1.0)
    assert len(begun) == num_starts


def test_what_the_run_starts_beside_ray_outlives_its_start(
    worker: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the process that writes the start weights meanwhile."""
    cluster = Cluster()
    cluster.foreign_pids -= {worker.pid}
    monkeypatch.setattr(ray_cluster, "_start_alone", lambda _: None)
    monkeypatch.setattr(cluster, "_reserve", lambda *_: None)
    cluster.reserve(ALONE, 1.0)
    assert worker.poll() is None
