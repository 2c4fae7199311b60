"""Liveness: what this host says of processes that do not answer, beside what Ray says of them and what they say.

In: process ids. Out: that one is gone, or stands still. Ray tells of a death within a second or so, unless what would
tell it is dead too. Left out: processes of other hosts, and progress of what can be asked while it works (calls.py).
"""

import time
from collections.abc import Mapping

from rlplan.runtime.processes.machine_speed import scaled

GONE_S = 5.0
"""How long Ray may take to say itself that a process is gone; scaled."""


class Liveness:
    """Of the processes that one wait is for, asked every few seconds. stall_s: how long one may stand still."""

    def __init__(self, stall_s: float) -> None:
        self._limits = {"gone": scaled(GONE_S), "stopped": stall_s}
        self._since: dict[tuple[str, str], float] = {}

    def check(self, pids: Mapping[str, int]) -> tuple[str, str] | None:
        """The first process for which it is too long now, and what it is; None where all are as they should be.

        pids: of this host. What is stopped is so since it was first seen so: also the driver may have been stopped.
        """
        now = time.monotonic()
        found = {(name, state) for name, pid in pids.items() if (state := state_of(pid))}
        self._since = {key: self._since.get(key, now) for key in sorted(found)}
        return next((key for key, since in self._since.items() if now - since >= self._limits[key[1]]), None)


def state_of(pid: int) -> str:
    """What is wrong with a process; empty: nothing that the system knows of."""
    import psutil

    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    return {psutil.STATUS_ZOMBIE: "gone", psutil.STATUS_STOPPED: "stopped"}.get(status, "")
