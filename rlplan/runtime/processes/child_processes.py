"""Child processes of a driver: they are listed and signalled safely while processes come and go.

In: process ids. Out: psutil's processes. Left out: processes of other hosts, which only Ray reaches.
"""

import contextlib
import ctypes
import os
import resource
import signal
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil


_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, however the parent ends.

    Linux means the parent's thread: the thread that starts this process must live as long as the process is needed.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def raise_open_files() -> None:
    """Raise the soft limit of open files to the hard one: shells set 1,024, and each connection is an open file."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def list_child_processes(known: Container[int] = ()) -> "list[psutil.Process]":
    """All descendants of this process whose ids are not known yet."""
    pids = sorted(pid for pid in add_descendants([os.getpid()]) if pid != os.getpid() and pid not in known)
    return [process for process in map(find_process, pids) if process]


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
    """Processes and all their descendants, such as a logger's own server.

    One pass over /proc serves all of them; psutil makes one for each process.
    """
    import psutil

    left, all_pids = [*pids], set[int]()
    children: dict[int, list[int]] = {}
    for pid in psutil.pids() if left else ():
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123  # a Path takes half as long again
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, IndexError):  # the process has just ended
            continue
        children.setdefault(parent, []).append(pid)
    while left:
        all_pids.add(pid := left.pop())
        left += children.get(pid, ())
    return all_pids
