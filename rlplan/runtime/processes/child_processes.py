"""Child processes of a driver: they are listed and signalled safely while processes come and go.

In: process ids. Out: psutil's processes. Left out: processes of other hosts, which only Ray reaches.
"""

import contextlib
import ctypes
import signal
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil


_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, however the parent ends.

    Linux means the parent's thread: the thread that starts this process must live as long as the process is needed.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def list_child_processes() -> "list[psutil.Process]":
    import psutil

    return psutil.Process().children(recursive=True)


def is_copy(process: "psutil.Process") -> bool:
    """Whether a child is still a fork of this process that has not called exec yet.

    Its resident memory would be counted twice. Raises: psutil.Error when the child is gone.
    """
    import psutil

    return process.cmdline() == psutil.Process().cmdline()


def find_process(pid: int) -> "psutil.Process | None":
    """The process with that id; None if it is gone."""
    import psutil

    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def send_signal(process: "psutil.Process", number: signal.Signals) -> None:
    """Send a signal to a process that may already be gone."""
    import psutil

    with contextlib.suppress(psutil.Error):
        process.send_signal(number)


def add_descendants(pids: Iterable[int]) -> set[int]:
    """Processes and all their descendants, such as a logger's own server."""
    import psutil

    all_pids = set(pids)
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            all_pids |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
    return all_pids
