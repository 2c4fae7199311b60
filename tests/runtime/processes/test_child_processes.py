"""Who belongs to whom among a run's processes."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from rlplan.runtime.cluster.liveness import describe_state
from rlplan.runtime.processes.child_processes import add_descendants, find_process, is_copy
from tests.waiting import wait_until

STARTS = "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"


def test_what_a_logger_starts_later_belongs_to_it() -> None:
    logger = subprocess.Popen([sys.executable, "-c", STARTS])
    try:
        wait_until(lambda: psutil.Process(logger.pid).children(), 20, pause_s=0.02)
        (server,) = psutil.Process(logger.pid).children()
        assert add_descendants([logger.pid]) == {logger.pid, server.pid}
        server.kill()
    finally:
        logger.kill()
        logger.wait()
    assert add_descendants([logger.pid]) == {logger.pid}


def test_a_fork_is_a_copy_until_it_begins_its_own_program() -> None:
    """Ray's processes differ from the driver's forks, each of which seems to hold the driver's memory."""
    forked = os.fork()
    if forked == 0:
        signal.pause()
        os._exit(0)
    other = subprocess.Popen(["sleep", "60"])
    try:
        assert is_copy(psutil.Process(forked))
        assert not is_copy(psutil.Process(other.pid))
    finally:
        for pid in (forked, other.pid):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(forked, 0)
        other.wait()


def test_a_process_that_ends_while_it_is_looked_for_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    monkeypatch.setattr(psutil, "pid_exists", lambda pid: True)  # as it was a moment before
    assert find_process(ended.pid) is None
    assert describe_state(ended.pid) == "gone"
