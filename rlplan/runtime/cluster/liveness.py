"""Liveness of silent processes, asked from the operating system of this host.

Ray reports a death within about a second, unless the part of Ray that reports it is dead too; then only the system
knows. In: process ids, Ray's record of its own processes. Out: which one is gone or stopped.
Left out: processes of other hosts, and progress of busy processes that answer pings (worker_group.py).
"""

import socket
import time
from collections.abc import Mapping
from typing import Any

from rlplan.runtime.processes.machine_speed import scale_seconds

GONE_S = 5.0
"""Seconds that Ray gets to report a death itself; scaled."""

CONNECT_S = 1.0
"""Timeout of a connection on one host, which normally succeeds or is refused at once."""

SERVICES = ("gcs_server", "raylet")
"""Processes of a local Ray without which calls soon get no answer."""


class Liveness:
    """Tracks the processes that one wait depends on. stall_s: seconds that a process may be stopped."""

    def __init__(self, stall_s: float) -> None:
        self._limits = {"gone": scale_seconds(GONE_S), "stopped": stall_s}
        self._since: dict[tuple[str, str], float] = {}

    def check(self, pids: Mapping[str, int]) -> tuple[str, str] | None:
        """Return (process, state) of the first one that has been gone or stopped for too long; None when all is well.

        pids: processes of this host. Time counts from the first observation, because the driver may have been stopped
        too.
        """
        now = time.monotonic()
        failing = {(name, state) for name, pid in pids.items() if (state := describe_state(pid))}
        self._since = {key: self._since.get(key, now) for key in sorted(failing)}
        return next((key for key, since in self._since.items() if now - since >= self._limits[key[1]]), None)


def describe_state(pid: int) -> str:
    """Return `gone`, `stopped`, or an empty string for a process without a known problem."""
    import psutil

    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    return {psutil.STATUS_ZOMBIE: "gone", psutil.STATUS_STOPPED: "stopped"}.get(status, "")


def dead_service(node: Any) -> str | None:
    """Describe a process of a local Ray that has ended; None when none has. node: Ray's record of its processes.

    Without such a process Ray answers nothing, and may take minutes to report it. A GCS that gets SIGTERM closes its
    port but never exits, so its port is tested too. Source: Ray 2.60.0, measured.
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
    except OSError:  # a timeout: the GCS is busy, not dead
        pass
    return None


def service_pids(node: Any) -> dict[str, int]:
    """Process ids of SERVICES by their names in messages. node: see dead_service."""
    services = [(name, info.process.pid) for name in SERVICES for info in node.all_processes.get(name, ())]
    return {f"Ray's {name} (process {pid})": pid for name, pid in services}
