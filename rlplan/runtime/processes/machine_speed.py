"""How slow this machine is now, and our own short waits made so many times longer.

In: seconds that suffice on a machine that has nothing else to do. Out: seconds that suffice here and now. Measured: the
wall time of a Python process that does a fixed piece of work, which a slow core, a busy machine and a quota of CPU
lengthen alike.
Left out: what a job says (timeouts of rewards, tests and environments, `limits`) is by the clock; a network's waits.
"""

import subprocess
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from rlplan.runtime.processes.safe_path import alone_command

_WORK = "x = 0\nfor i in range(200_000): x += i * i % 7"
REFERENCE_S = 0.05
"""Seconds of a process that does the work: the least of 25, on one core of an Intel Xeon at 2.5 GHz, Python 3.11."""
MOST = 20.0
"""However slow the machine is: a wait ends."""
FRESH_S = 10.0
"""How long a measurement holds: one each ten seconds is half a percent of a core."""

Result = TypeVar("Result")
_measuring = threading.Lock()
_last: tuple[float, float] | None = None


def slowdown(max_age_s: float = FRESH_S) -> float:
    """How many times longer than on the reference the work takes now: 1 to MOST, measured no longer ago than this."""
    global _last
    with _measuring:
        if _last is None or time.monotonic() - _last[0] > max_age_s:
            factor = factor_of(_measured_s())
            _last = time.monotonic(), factor
        return _last[1]


def scaled(seconds: float) -> float:
    """Seconds to wait here and now for what takes at most so many on the reference.

    Only for waits of our own, such as for a process to come up or to go: a limit that a job names is by the clock.
    """
    return seconds * slowdown()


def patiently(wait: Callable[[float], Result], seconds: float, late: type[Exception]) -> Result:
    """What a wait gives, after `scaled(seconds)` at most. late: what it raises when its seconds have passed.

    For waits that hardly ever last: nothing is measured unless the seconds have passed.
    """
    try:
        return wait(seconds)
    except late:
        if (more := scaled(seconds) - seconds) <= 0:
            raise
        return wait(more)


def factor_of(seconds: float) -> float:
    """The slowdown that a measurement means.

    >>> factor_of(REFERENCE_S / 2), factor_of(4 * REFERENCE_S), factor_of(1000.0) == MOST
    (1.0, 4.0, True)
    """
    return min(MOST, max(1.0, seconds / REFERENCE_S))


def _measured_s() -> float:
    """Seconds of the work; those of MOST where it takes longer, or where no process can be started at all."""
    limit_s, begun = MOST * REFERENCE_S, time.monotonic()
    try:
        # In a process group of its own: a Ctrl-C that ends it would pass for a slow machine. Not in a session of its
        # own: Linux shares out a core by sessions (sched_autogroup), and the waits are for processes of this one.
        subprocess.run(alone_command(_WORK), stdin=subprocess.DEVNULL, process_group=0, timeout=limit_s, check=True)
    except (OSError, subprocess.SubprocessError):
        return limit_s
    return time.monotonic() - begun
