"""The waits of tests themselves, and whose processes they look at."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlplan.runtime.processes import machine_speed
from rlplan.runtime.processes.machine_speed import MAX_FACTOR
from tests.waiting import Patience, limit_time, orphans_come_here, own_processes, wait_until

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def four_times_slower(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretend that this slowdown was measured just now."""
    monkeypatch.setattr(machine_speed, "_last", (time.monotonic(), 4.0))
    yield
    machine_speed._last = None


def test_waits_follow_the_slowdown_and_end(four_times_slower: None) -> None:
    assert 3.0 < Patience(1.0).left_s() <= 4.0
    begun = time.monotonic()
    with pytest.raises(AssertionError, match=r"did not happen within 0\.05 s"):
        wait_until(lambda: False, 0.05, pause_s=0.01)
    assert 0.2 <= time.monotonic() - begun < MAX_FACTOR


def test_what_takes_too_long_is_said_with_both_numbers(four_times_slower: None) -> None:
    with pytest.raises(AssertionError, match=r"it took 2\.\d s, and 0\.001 s are allowed"), limit_time(0.001):
        time.sleep(2.0)
    with limit_time(0.001, beyond_s=60.0):
        time.sleep(0.1)


TAKES_TWO_SECONDS = """
import time
from rlplan.runtime.processes import machine_speed

machine_speed._last = (time.monotonic(), 4.0)

def test_it():
    time.sleep(2.0)
"""


def test_the_limit_of_a_whole_test_follows_the_slowdown(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TAKES_TWO_SECONDS)
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={tmp_path}", "--timeout=1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for plugin, code in (((), 1), (("-p", "tests.conftest"), 0)):
        done = subprocess.run([*command, *plugin, str(tmp_path)], env=environment, capture_output=True, text=True)
        assert done.returncode == code, done.stdout


LEAVES = "import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=-3, stderr=-3).pid)"


def test_what_lost_its_parent_is_found_and_what_others_started_is_not() -> None:
    before = own_processes().keys()
    with orphans_come_here():
        done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, check=True)
        orphan = psutil.Process(int(done.stdout))
        assert own_processes().keys() - before == {orphan.pid}
        orphan.kill()
        wait_until(lambda: own_processes().keys() == before, 20)
    assert not psutil.pid_exists(orphan.pid)
    foreign = psutil.Process(1)
    assert foreign.pid not in own_processes()
