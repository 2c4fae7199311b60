"""Memory and CPU of a whole tree of processes: by control groups where some may be made, else by looking on.

In: a limit in bytes. Out: a place that a process joins, where the kernel holds the limit and one core's worth of CPU;
or a question to ask often. Left out: the CPU of what begins and ends between two looks and is not waited for.
"""

import contextlib
import itertools
import os
import re
import time
from pathlib import Path

PREFIX = "rlplan-sandbox"
_V2 = Path("/sys/fs/cgroup")
_V1, _V1_CPU = _V2 / "memory", _V2 / "cpu"
_PERIOD_US = 100_000
_SLACK = 1 << 20
"""Bytes below a limit at which it is met: the kernel charges up to 64 pages at once, and may find too few left."""
BETWEEN_LOOKS = "memory and CPU of what lives between two looks (20 ms)"
"""What no limit holds where no control group may be made."""
_TMP = Path("/tmp")
"""Of a sandbox."""
_NAME_BYTES = 1_024
"""Of an inode and a directory's entry of a file system in memory: 960 by a control group's count, Linux 6.18."""
_NUMBERS = itertools.count()
"""Of the groups that this process has made: it may have several sandboxes."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class TreeGroup:
    """Control groups for the sandboxes of one slot, one after the other. Raises: OSError without one for memory.

    The tree has one core's worth of CPU where the controller may be had (has_quota), so what all of it takes in a test
    is never more than the test's seconds.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._is_v1, self.memory_bytes = (_V1 / "memory.limit_in_bytes").exists(), memory_bytes
        name = f"{PREFIX}-{os.getpid()}-{next(_NUMBERS)}"
        self.folder = (_V1 if self._is_v1 else _V2) / name
        self.folder.mkdir()
        try:
            self._limit_memory(memory_bytes)
        except OSError:
            self.folder.rmdir()
            raise
        self._before = (0, 0)
        cpu = _V1_CPU / name if self._is_v1 else self.folder
        self.has_quota = self._limit_cpu(cpu)
        self.folders = tuple(dict.fromkeys((self.folder, cpu))) if self.has_quota else (self.folder,)

    def _limit_memory(self, memory_bytes: int) -> None:
        name, swap = ("limit_in_bytes", "memsw.limit_in_bytes") if self._is_v1 else ("max", "swap.max")
        (self.folder / f"memory.{name}").write_text(str(memory_bytes))
        with contextlib.suppress(OSError):
            (self.folder / f"memory.{swap}").write_text(str(memory_bytes if self._is_v1 else 0))

    def _limit_cpu(self, folder: Path) -> bool:
        try:
            folder.mkdir(exist_ok=True)
            if self._is_v1:
                (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
                (folder / "cpu.cfs_quota_us").write_text(str(_PERIOD_US))
            else:
                (folder / "cpu.max").write_text(f"{_PERIOD_US} {_PERIOD_US}")
        except OSError:
            if folder != self.folder:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            return False
        return True

    @property
    def joining(self) -> tuple[str, ...]:
        """A command's beginning: the shell joins the groups and becomes the rest."""
        joins = " && ".join(f"echo 0 > {folder}/cgroup.procs" for folder in self.folders)
        return ("/bin/sh", "-c", f'{joins} && exec "$@"', "sh")

    def begin(self) -> None:
        """A run begins: what `ended` says is of this one."""
        if self._is_v1:
            with contextlib.suppress(OSError):
                (self.folder / "memory.max_usage_in_bytes").write_text("0")  # the most from now on
        self._before = self._read_counts()

    def read_outcome(self) -> tuple[bool, bool]:
        """Whether a want of memory has ended something in this run, and whether the group's own limit was met."""
        killed, full = (now > before for now, before in zip(self._read_counts(), self._before, strict=True))
        if self._is_v1:  # newer kernels leave memory.failcnt at 0 where the limit with swap is the same
            full = full or self._read_number("memory.max_usage_in_bytes", "") >= self.memory_bytes - _SLACK
        return killed, full

    def _read_counts(self) -> tuple[int, int]:
        """Since the group was made: processes ended, and how often its limit was met."""
        if self._is_v1:
            return self._read_number("memory.oom_control", "oom_kill "), self._read_number("memory.failcnt", "")
        return self._read_number("memory.events", "oom_kill "), self._read_number("memory.events", "oom ")

    def _read_number(self, file: str, before: str) -> int:
        match = re.search(rf"^{before}(\d+)", (self.folder / file).read_text(), re.MULTILINE)
        return int(match.group(1)) if match else 0

    def close(self) -> None:
        """Remove the groups; their last process may still be on its way out."""
        for folder in self.folders:
            for _ in range(50):
                try:
                    folder.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.02)


def remove_stale_groups() -> int:
    """Remove groups of drivers that are gone (killed before they could). Gives their number."""
    count = 0
    for parent in (_V1, _V1_CPU, _V2):
        for folder in parent.glob(f"{PREFIX}-*-*"):
            pid = folder.name.split("-")[2]
            if pid.isdigit() and not Path(f"/proc/{pid}").exists():
                with contextlib.suppress(OSError):
                    folder.rmdir()
                    count += 1
    return count


class TreeWatch:
    """Without control groups: adds up what a process and all below it hold and took, each time it is asked.

    For one run, whose CPU counts from the first look. memory_bytes, cpu_s: limits; None where a control group has it.
    """

    def __init__(self, memory_bytes: int | None, cpu_s: float | None) -> None:
        self.memory_bytes, self.cpu_s = memory_bytes, cpu_s
        self._took: dict[int, float] = {}
        self._before: float | None = None

    def __call__(self, pid: int) -> str | None:
        """What the tree below a process has had too much of: `memory`, `timeout` (CPU), or None."""
        tree = _list_tree(pid)
        if self.memory_bytes is not None and sum(map(_measure_memory, tree)) + _measure_name_bytes(tree) > self.memory_bytes:
            return "memory"
        if self.cpu_s is None:
            return None
        took = {each: _measure_cpu_s(each) for each in tree}
        self._took |= {each: own for each, (own, _) in took.items()}
        took_s = max(sum(map(sum, took.values())), sum(self._took.values()))
        if self._before is None:
            self._before = took_s
        return "timeout" if took_s - self._before > self.cpu_s else None


def _list_tree(pid: int) -> list[int]:
    found, waiting = [], [pid]
    while waiting:
        each = waiting.pop()
        found.append(each)
        with contextlib.suppress(OSError):  # it may end while it is looked at
            for thread in Path(f"/proc/{each}/task").iterdir():
                with contextlib.suppress(OSError):
                    waiting += [int(word) for word in (thread / "children").read_text().split()]
    return found


def _measure_memory(pid: int) -> int:
    """Bytes of memory of its own, and of files in memory."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return sum(1024 * int(size) for size in re.findall(r"^(?:RssAnon|RssShmem):\s+(\d+)", status, re.MULTILINE))


def _measure_name_bytes(tree: list[int]) -> int:
    """Bytes that the kernel keeps for the names in a sandbox's own /tmp: links and empty files have no pages."""
    outside = _TMP.stat().st_dev
    for pid in reversed(tree):
        with contextlib.suppress(OSError):  # it has ended, or may not be looked at
            inside = Path(f"/proc/{pid}/root{_TMP}")
            if inside.stat().st_dev != outside:
                names = os.statvfs(inside)
                return (names.f_files - names.f_ffree) * _NAME_BYTES
    return 0


def _measure_cpu_s(pid: int) -> tuple[float, float]:
    """Seconds of CPU: its own, and those of children that it has waited for."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0, 0.0
    own, waited_for = (sum(map(int, words[at : at + 2])) / _TICKS_PER_S for at in (11, 13))
    return own, waited_for
