"""Child processes of a driver: found, and ended, whatever becomes of them meanwhile.

In: process ids. Out: psutil's processes. Left out: processes of other hosts, which only Ray reaches.
"""

import contextlib
import signal
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil


def child_processes() -> "list[psutil.Process]":
    """All processes below this one."""
    import psutil

    return psutil.Process().children(recursive=True)


def find_process(pid: int) -> "psutil.Process | None":
    """The process of that id; None where it is gone."""
    import psutil

    return psutil.Process(pid) if psutil.pid_exists(pid) else None


def send_signal(process: "psutil.Process", number: signal.Signals) -> None:
    """Send a signal to a process that may be gone already."""
    import psutil

    with contextlib.suppress(psutil.Error):
        process.send_signal(number)


def with_their_children(pids: Iterable[int]) -> set[int]:
    """Processes and everything that they have started, such as a logger's own server."""
    import psutil

    found = set(pids)
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            found |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
    return found
