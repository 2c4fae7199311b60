"""Parent death: a child process is killed when the thread that started it is gone (PR_SET_PDEATHSIG)."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent is gone, however that ends and whatever this one is busy with.

    Linux counts the parent's thread: it must be one that lives as long as this process is needed.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
