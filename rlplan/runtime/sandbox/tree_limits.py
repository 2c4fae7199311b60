"""Memory and CPU limits of a process tree: control groups where they can be created, else periodic measurement.

In: a limit in bytes. Out: a control group that a process joins, in which the kernel enforces the memory limit and one
core of CPU; or a watch that is called often. Left out: CPU of processes that live between two looks and are not reaped.
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
"""A peak this many bytes below the limit counts as the limit: the kernel charges up to 64 pages at once."""
BETWEEN_LOOKS = "memory and CPU of processes that live less than 20 ms (between two looks)"
"""Usage that no limit covers where control groups cannot be created."""
_TMP = Path("/tmp")
"""Writable folder of a sandbox."""
NAME_BYTES = 1_024
"""Memory of one inode and directory entry in a tmpfs: 960 bytes by a control group's count on Linux 6.18."""
_NUMBERS = itertools.count()
"""Numbers in the names of groups: one process may open several sandboxes."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class TreeGroup:
    """Control groups for the sandboxes of one slot. Raises: OSError when no memory group can be created.

    Where the CPU controller is available (has_quota), the tree gets one core, so its CPU seconds in a test never exceed
    the test's wall-clock seconds.
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
        with contextlib.suppress(OSError):  # kernels without swap accounting lack the file; v1 counts memory and swap
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
    def join_command(self) -> tuple[str, ...]:
        """Command prefix: a shell that joins the groups and then executes the rest of the command."""
        joins = " && ".join(f"echo 0 > {folder}/cgroup.procs" for folder in self.folders)
        return ("/bin/sh", "-c", f'{joins} && exec "$@"', "sh")

    def begin(self) -> None:
        """Note the counters at the start of a run, so that `read_outcome` reports on this run only."""
        if self._is_v1:
            with contextlib.suppress(OSError):
                (self.folder / "memory.max_usage_in_bytes").write_text("0")  # resets the peak
        self._before = self._read_counts()

    def read_outcome(self) -> tuple[bool, bool]:
        """(whether the OOM killer ended a process in this run, whether the group's own limit was met)."""
        killed, full = (now > before for now, before in zip(self._read_counts(), self._before, strict=True))
        if self._is_v1:  # newer kernels leave memory.failcnt at 0 when the limit with swap is the same
            full = full or self._read_number("memory.max_usage_in_bytes", "") >= self.memory_bytes - _SLACK
        return killed, full

    def _read_counts(self) -> tuple[int, int]:
        """(processes killed for lack of memory, times the limit was met) since the group was created."""
        if self._is_v1:
            return self._read_number("memory.oom_control", "oom_kill "), self._read_number("memory.failcnt", "")
        return self._read_number("memory.events", "oom_kill "), self._read_number("memory.events", "oom ")

    def _read_number(self, file: str, before: str) -> int:
        match = re.search(rf"^{before}(\d+)", (self.folder / file).read_text(), re.MULTILINE)
        return int(match.group(1)) if match else 0

    def close(self) -> None:
        """Remove the groups. Retries for a second, because the last process may still be exiting."""
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
    """Remove groups of drivers that were killed before they could clean up. Returns: the number of removed folders."""
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
    """Limits without control groups: each call sums the memory and CPU of a process and its descendants.

    A watch serves one run, whose CPU counts from the first call. memory_bytes, cpu_s: limits, or None when a control
    group enforces them.
    """

    def __init__(self, memory_bytes: int | None, cpu_s: float | None) -> None:
        self.memory_bytes, self.cpu_s = memory_bytes, cpu_s
        self._used_s: dict[int, float] = {}
        self._before_s: float | None = None

    def __call__(self, pid: int) -> str | None:
        """The limit that the tree exceeds: `memory`, `timeout` (CPU) or None."""
        tree = _list_tree(pid)
        if self.memory_bytes is not None:
            total = sum(map(_measure_memory, tree)) + _measure_name_bytes(tree)
            if total > self.memory_bytes:
                return "memory"
        if self.cpu_s is None:
            return None
        used = {process: _measure_cpu_s(process) for process in tree}
        self._used_s |= {process: own_s for process, (own_s, _) in used.items()}
        # A process that ended counts in its parent's reaped time, or, if nobody reaped it, as it was last seen.
        total_s = max(sum(map(sum, used.values())), sum(self._used_s.values()))
        if self._before_s is None:
            self._before_s = total_s
        return "timeout" if total_s - self._before_s > self.cpu_s else None


def _list_tree(pid: int) -> list[int]:
    pids, waiting = [], [pid]
    while waiting:
        current = waiting.pop()
        pids.append(current)
        with contextlib.suppress(OSError):  # the process may end meanwhile
            for thread in Path(f"/proc/{current}/task").iterdir():  # any thread can be a parent
                with contextlib.suppress(OSError):
                    waiting += [int(word) for word in (thread / "children").read_text().split()]
    return pids


def _measure_memory(pid: int) -> int:
    """Bytes of a process's anonymous memory and of its shared memory and tmpfs pages."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return sum(1024 * int(size) for size in re.findall(r"^(?:RssAnon|RssShmem):\s+(\d+)", status, re.MULTILINE))


def _measure_name_bytes(tree: list[int]) -> int:
    """Kernel memory for the names in a sandbox's own /tmp, in bytes: links and empty files have no pages."""
    outside = _TMP.stat().st_dev
    for pid in reversed(tree):  # the innermost processes see the sandbox's file systems, bwrap itself the host's
        with contextlib.suppress(OSError):  # the process has ended, or may not be inspected
            inside = Path(f"/proc/{pid}/root{_TMP}")
            if inside.stat().st_dev != outside:
                names = os.statvfs(inside)
                return (names.f_files - names.f_ffree) * NAME_BYTES
    return 0


def _measure_cpu_s(pid: int) -> tuple[float, float]:
    """CPU seconds: (the process's own, those of children that it has reaped)."""
    try:
        # The command's name may hold spaces and brackets, so the fields start after the last bracket.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0, 0.0
    own, reaped = (sum(map(int, fields[index : index + 2])) / _TICKS_PER_S for index in (11, 13))  # utime + stime
    return own, reaped
