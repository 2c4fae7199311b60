"""Liveness: what this host says of processes that do not answer, beside what Ray says of them and what they say.

In: process ids, Ray's record of its own processes. Out: that one is gone, or stands still. Ray tells of a death within
a second or so, unless what would tell it is dead too. Left out: processes of other hosts, and progress of what can be
asked while it works (calls.py).
"""

import socket
import time
from collections.abc import Mapping
from typing import Any

from rlplan.runtime.processes.machine_speed import scaled

GONE_S = 5.0
"""How long Ray may take to say itself that a process is gone; scaled."""

CONNECT_S = 1.0
"""On one host a connection is made or refused at once, unless the other side is very busy."""

SERVICES = ("gcs_server", "raylet")
"""Processes of a Ray of our own without which no call is answered for long."""


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


def dead_service(node: Any) -> str | None:
    """Which of the processes of a Ray of our own has ended, in words. node: Ray's record of them; None without one.

    Nothing that is asked of Ray is answered then, and it may wait for minutes before it says so. A GCS that is asked to
    end (SIGTERM) closes its port and then never ends. Source: Ray 2.60.0, measured.
    """
    if node is None:
        return None
    for name, process in node.dead_processes():
        return f"Ray's {name} (process {process.pid}) is gone"
    host, _, port = node.gcs_address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except ConnectionRefusedError:
        return f"Ray's gcs_server no longer listens ({node.gcs_address})"
    except OSError:  # no answer yet: it is busy
        pass
    return None


def service_pids(node: Any) -> dict[str, int]:
    """SERVICES by what they are called in messages. node: see dead_service."""
    services = [(name, info.process.pid) for name in SERVICES for info in node.all_processes.get(name, ())]
    return {f"Ray's {name} (process {pid})": pid for name, pid in services}
