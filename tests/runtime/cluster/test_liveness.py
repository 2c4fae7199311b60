"""Who waits for a process learns from this host that it is gone or stands still, whatever Ray knows."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from rlplan.runtime.cluster import liveness
from rlplan.runtime.cluster.liveness import Liveness, dead_service
from rlplan.runtime.cluster.ray_cluster import Cluster
from tests.waiting import wait_until


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_a_process_that_sleeps_or_works_is_as_it_should_be(sleeper: "subprocess.Popen[bytes]") -> None:
    watch = Liveness(0.0)
    assert [watch.check({"scorer/reference/0": sleeper.pid}) for _ in range(3)] == [None] * 3


def test_a_process_that_stands_still_is_told_after_the_stall_time_and_not_before(
    sleeper: "subprocess.Popen[bytes]",
) -> None:
    watch, pids = Liveness(0.3), {"scorer/reference/0": sleeper.pid}
    sleeper.send_signal(signal.SIGSTOP)
    assert watch.check(pids) is None
    wait_until(lambda: watch.check(pids) == ("scorer/reference/0", "stopped"), 5, pause_s=0.05)


def test_a_process_that_goes_on_begins_anew(sleeper: "subprocess.Popen[bytes]") -> None:
    watch, pids = Liveness(600.0), {"scorer/reference/0": sleeper.pid}
    sleeper.send_signal(signal.SIGSTOP)
    wait_until(lambda: watch.check(pids) is None and watch._since, 5, pause_s=0.01)
    sleeper.send_signal(signal.SIGCONT)
    wait_until(lambda: watch.check(pids) is None and not watch._since, 5, pause_s=0.01)


def test_a_process_that_was_killed_is_told_before_its_parent_has_asked(
    sleeper: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "GONE_S", 0.1)
    watch = Liveness(600.0)
    sleeper.kill()
    wait_until(lambda: watch.check({"policy_trainer/0": sleeper.pid}) == ("policy_trainer/0", "gone"), 5, pause_s=0.02)


def node_of(raylet: "subprocess.Popen[bytes]", gcs: socket.socket) -> SimpleNamespace:
    """Ray's record of its processes, of which the GCS listens in a socket."""
    return SimpleNamespace(
        dead_processes=lambda: [("raylet", raylet)] if raylet.poll() is not None else [],
        all_processes={"raylet": [SimpleNamespace(process=raylet)]},
        gcs_address=":".join(map(str, gcs.getsockname())),
    )


def test_a_service_of_ray_s_own_that_has_ended_is_named(sleeper: "subprocess.Popen[bytes]") -> None:
    with socket.create_server(("127.0.0.1", 0)) as gcs:
        node = node_of(sleeper, gcs)
        assert dead_service(node) is None
        sleeper.kill()
        sleeper.wait()
        assert dead_service(node) == f"Ray's raylet (process {sleeper.pid}) is gone"
    assert dead_service(None) is None


def test_a_gcs_that_lives_and_does_not_listen_any_more_is_named(sleeper: "subprocess.Popen[bytes]") -> None:
    with socket.create_server(("127.0.0.1", 0)) as gcs:
        node = node_of(sleeper, gcs)
    assert dead_service(node) == f"Ray's gcs_server no longer listens ({node.gcs_address})"


def test_a_service_of_ray_s_own_that_is_stopped_is_named_after_the_stall_time(
    sleeper: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(stall_s=0.3)
    with socket.create_server(("127.0.0.1", 0)) as gcs:
        worker = SimpleNamespace(_global_node=node_of(sleeper, gcs))
        ray = SimpleNamespace(is_initialized=lambda: True, _private=SimpleNamespace(worker=worker))
        monkeypatch.setitem(sys.modules, "ray", ray)
        sleeper.send_signal(signal.SIGSTOP)
        assert cluster.dead_service() is None
        message = f"Ray's raylet (process {sleeper.pid}) is stopped"
        wait_until(lambda: cluster.dead_service() == message, 5, pause_s=0.05)
