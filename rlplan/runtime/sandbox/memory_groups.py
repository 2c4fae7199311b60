"""The memory of a whole tree of processes: by a control group where one may be made, else by looking on.

In: a limit in bytes. Out: a place that a process joins and that kills it beyond the limit; or a question to ask often.
"""

import contextlib
import os
import re
import time
from pathlib import Path

PREFIX = "rlplan-sandbox"
_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class MemoryGroup:
    """A control group for the sandboxes of one slot, one after the other. Raises: OSError where none can be made."""

    def __init__(self, slot: int, limit: int) -> None:
        is_v1 = (_V1 / "memory.limit_in_bytes").exists()
        parent = _V1 if is_v1 else _V2
        self.folder = parent / f"{PREFIX}-{os.getpid()}-{slot}"
        self._failures = "memory.failcnt" if is_v1 else "memory.events"
        self.folder.mkdir()
        try:
            (self.folder / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(limit))
            for swap in ("memory.memsw.limit_in_bytes",) if is_v1 else ("memory.swap.max",):
                with contextlib.suppress(OSError):
                    (self.folder / swap).write_text(str(limit if is_v1 else 0))
        except OSError:
            self.folder.rmdir()
            raise

    @property
    def joining(self) -> tuple[str, ...]:
        """A command's beginning: the shell joins the group and becomes the rest."""
        return ("/bin/sh", "-c", f'echo 0 > {self.folder}/cgroup.procs && exec "$@"', "sh")

    def num_kills(self) -> int:
        """How often the kernel has ended something here."""
        name = "memory.oom_control" if self._failures == "memory.failcnt" else self._failures
        found = re.search(r"^oom_kill (\d+)", (self.folder / name).read_text(), re.MULTILINE)
        return int(found.group(1)) if found else 0

    def close(self) -> None:
        """Remove the group; its last process may still be on its way out."""
        for _ in range(50):
            try:
                self.folder.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.02)


def sweep() -> int:
    """Remove groups of drivers that are gone (killed before they could). Gives their number."""
    count = 0
    for parent in (_V1, _V2):
        for folder in parent.glob(f"{PREFIX}-*-*"):
            pid = folder.name.split("-")[2]
            if pid.isdigit() and not Path(f"/proc/{pid}").exists():
                with contextlib.suppress(OSError):
                    folder.rmdir()
                    count += 1
    return count


class TreeWatch:
    """Without a control group: adds up what a process and all below it hold, each time it is asked."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __call__(self, pid: int) -> bool:
        """Whether the tree below a process holds more than the limit."""
        return sum(_held(each) for each in _tree(pid)) > self.limit


def _tree(pid: int) -> list[int]:
    found, waiting = [], [pid]
    while waiting:
        each = waiting.pop()
        found.append(each)
        with contextlib.suppress(OSError):  # it may end while it is looked at
            for thread in Path(f"/proc/{each}/task").iterdir():
                with contextlib.suppress(OSError):
                    waiting += [int(word) for word in (thread / "children").read_text().split()]
    return found


def _held(pid: int) -> int:
    """Bytes of memory of its own, and of files in memory."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return sum(1024 * int(size) for size in re.findall(r"^(?:RssAnon|RssShmem):\s+(\d+)", status, re.MULTILINE))
