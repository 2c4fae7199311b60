"""How tests wait, and which processes are theirs.

Every wait has a deadline that follows how slow this machine is: seconds are those of a machine that has nothing else to
do. Before a deadline passes the machine is measured once more, for the load may have come since.
Processes are a test's own where they are below it: others may run the same tests beside it.
"""

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil

from rlplan.runtime.processes.machine_speed import measure_slowdown

_PR_SET_CHILD_SUBREAPER = 36


class Patience:
    """So many seconds from now on the reference machine, and as many more as this one is slower.

    beyond_s: seconds by the clock that come first.
    """

    def __init__(self, seconds: float, beyond_s: float = 0.0) -> None:
        self.seconds, self._begun, self._slowdown = seconds, time.monotonic() + beyond_s, measure_slowdown()

    def left_s(self) -> float:
        """Seconds that are left; 0 once they have passed."""
        if (left := self._left_s()) == 0.0:
            self._slowdown = max(self._slowdown, measure_slowdown(max_age_s=0.0))
            left = self._left_s()
        return left

    def _left_s(self) -> float:
        return max(0.0, self._begun + self.seconds * self._slowdown - time.monotonic())


def wait_until(what: Callable[[], object], seconds: float, pause_s: float = 0.1) -> None:
    """Wait until something holds, at most so long."""
    patience = Patience(seconds)
    while not what():
        assert patience.left_s() > 0, f"it did not happen within {seconds:g} s, or as long as that is here"
        time.sleep(pause_s)


@contextmanager
def limit_time(seconds: float, beyond_s: float = 0.0) -> Iterator[None]:
    """Assert that the block takes no longer than this. The block is not ended: that needs its own deadline.

    beyond_s: seconds by the clock that come first, such as the timeout that is tried.
    """
    patience = Patience(seconds, beyond_s)
    begun = time.monotonic()
    yield
    took, words = time.monotonic() - begun, f"{beyond_s:g} s and {seconds:g} s" if beyond_s else f"{seconds:g} s"
    assert patience.left_s() > 0, f"it took {took:.1f} s, and {words} are allowed, or as long as that is here"


def own_processes() -> dict[int, psutil.Process]:
    """Everything that is below this process and no zombie, by process id."""
    processes = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                processes[process.pid] = process
    return processes


@contextmanager
def orphans_come_here() -> Iterator[None]:
    """Inside, whoever below loses its parent becomes a child of this process, and is found by `own_processes`."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    before = {child.pid for child in psutil.Process().children()}
    try:
        yield
    finally:
        assert prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if child.pid not in before and child.status() == psutil.STATUS_ZOMBIE:
                    child.wait()
