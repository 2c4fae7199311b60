"""Machine speed: internal timeouts grow with the measured slowdown of this machine.

The measurement is the wall-clock time of a Python process with a fixed amount of work. A slow core, other load and a
CPU quota all lengthen it.

In: seconds that suffice on an idle reference machine. Out: seconds that suffice here and now.
Left out: timeouts set by a job (rewards, tests, environments, `limits`), which are wall-clock; network waits.
"""

import subprocess
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from rlplan.runtime.processes.safe_path import make_isolated_command

_WORK = "x = 0\nfor i in range(200_000): x += i * i % 7"
REFERENCE_S = 0.05
"""Seconds of the reference process: minimum of 25 runs on one core of an Intel Xeon at 2.5 GHz, Python 3.11."""
MAX_FACTOR = 20.0
"""Largest factor, so that every wait ends."""
FRESH_S = 10.0
"""Seconds for which a measurement is reused; one every ten seconds costs half a percent of a core."""

Result = TypeVar("Result")
_measuring = threading.Lock()
_last: tuple[float, float] | None = None


def measure_slowdown(max_age_s: float = FRESH_S) -> float:
    """Current slowdown relative to the reference, 1 to MAX_FACTOR. max_age_s: largest age of a reused measurement."""
    global _last
    with _measuring:
        if _last is None or time.monotonic() - _last[0] > max_age_s:
            factor = compute_factor(_measure_s())
            _last = time.monotonic(), factor
        return _last[1]


def scale_seconds(seconds: float) -> float:
    """A timeout of the reference machine, scaled to this machine.

    It is for internal waits, such as for a process to start or exit. Limits from a job are wall-clock.
    """
    return seconds * measure_slowdown()


def wait_patiently(wait: Callable[[float], Result], seconds: float, late: type[Exception]) -> Result:
    """Wait for at most `scale_seconds(seconds)`. late: the exception that `wait` raises after its seconds.

    It suits waits that are almost always short: the machine is measured only after `seconds` have passed.
    """
    try:
        return wait(seconds)
    except late:
        if (more := scale_seconds(seconds) - seconds) <= 0:
            raise
        return wait(more)


def compute_factor(seconds: float) -> float:
    """The slowdown for a measured time.

    >>> compute_factor(REFERENCE_S / 2), compute_factor(4 * REFERENCE_S), compute_factor(1000.0) == MAX_FACTOR
    (1.0, 4.0, True)
    """
    return min(MAX_FACTOR, max(1.0, seconds / REFERENCE_S))


def _measure_s() -> float:
    """Measured seconds of the work; the limit if it takes longer, or if no process can be started."""
    limit_s, begun = MAX_FACTOR * REFERENCE_S, time.monotonic()
    try:
        # Its own process group, because a Ctrl-C that ends it would look like a slow machine. Not its own session:
        # Linux shares cores by session (sched_autogroup), and the waits are for processes of this session.
        subprocess.run(
            make_isolated_command(_WORK), stdin=subprocess.DEVNULL, process_group=0, timeout=limit_s, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return limit_s
    return time.monotonic() - begun
