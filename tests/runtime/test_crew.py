"""Who belongs to whom among a run's processes."""

import subprocess
import sys
import time

import psutil

from rlplan.runtime.crew import with_their_children

STARTS = "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"


def test_what_a_logger_starts_later_belongs_to_it() -> None:
    logger = subprocess.Popen([sys.executable, "-c", STARTS])
    try:
        deadline = time.monotonic() + 20
        while not psutil.Process(logger.pid).children():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (server,) = psutil.Process(logger.pid).children()
        assert with_their_children([logger.pid]) == {logger.pid, server.pid}
        server.kill()
    finally:
        logger.kill()
        logger.wait()
    assert with_their_children([logger.pid]) == {logger.pid}
