"""The sandbox of bubblewrap, hardened: own user and namespaces, writable is one small tmpfs, no /proc, no network.

In: programs. Out: reports. Between: setpriv (an own uid, when we are root), a control group for the memory of the whole
tree, bwrap with a seccomp deny list, and rlimits that the runner sets before the program is there.
Left out: protection from a kernel bug. For hostile tenants on shared machines use a virtual machine.
"""

import contextlib
import os
import platform
import queue
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rlplan.errors import HostError
from rlplan.runtime.sandbox.memory_groups import MemoryGroup, TreeWatch, sweep
from rlplan.runtime.sandbox.process import Runner, run_in, runner_for
from rlplan.runtime.sandbox.programs import DEFAULT_LIMITS, Limits, Program, Report, unknown
from rlplan.runtime.sandbox.seccomp import deny_list

FIRST_UID = 61_200
"""Uids from here on belong to nobody on the usual systems; each slot has one."""
CLOSE_S = 5.0
"""For programs at work to be ended."""
_PROBE = """
import sys, sysconfig, ctypes, zlib, hashlib
files = {line.split()[-1] for line in open("/proc/self/maps")}
for each in (sysconfig.get_path("stdlib"), *sorted(file for file in files if ".so" in file)):
    print(each)
"""


class Bubblewrap:
    """See the module docstring. num_slots: sandboxes at the same time. Raises: HostError where it cannot be had."""

    name = "bubblewrap"

    def __init__(self, num_slots: int, limits: Limits = DEFAULT_LIMITS) -> None:
        self.limits = limits
        self._bwrap = _find("bwrap", "bubblewrap")
        self._is_root = os.geteuid() == 0
        self._setpriv = _find("setpriv", "util-linux") if self._is_root else ""
        self._runner, self._view = system_runner(), _interpreter_view()
        self._filter = _filter_file()
        sweep()
        self._groups = _memory_groups(num_slots, limits.memory_bytes)
        self._watch = None if self._groups else TreeWatch(limits.memory_bytes)
        self._stop, self._keep = os.pipe()
        self._is_closed = False
        self._num_slots, self._slots = num_slots, queue.SimpleQueue[int]()
        for slot in range(num_slots):
            self._slots.put(slot)

    @property
    def counts_memory(self) -> str:
        """How the memory of the whole tree is limited."""
        return "control group" if self._groups else "looking on"

    def run(self, program: Program, *, stops_early: bool = False) -> Report:
        """Run a program in a fresh sandbox."""
        slot = self._slots.get()
        if self._is_closed:
            self._slots.put(slot)
            return unknown(program, "broken", "it was closed")
        group = self._groups[slot] if self._groups else None
        before = group.num_kills() if group else 0
        # a description of its own: bwrap reads the filter from where the descriptor stands
        descriptor = os.open(f"/proc/self/fd/{self._filter.fileno()}", os.O_RDONLY)
        try:
            command = (*(group.joining if group else ()), *self._command(slot, descriptor))
            report = run_in(
                command,
                self._runner.code,
                program,
                pass_fds=(descriptor,),
                stops_early=stops_early,
                watch=self._watch,
                stop=self._stop,
            )
            if report.status == "killed" and group is not None and group.num_kills() > before:
                return Report("memory", report.cases, report.detail, report.seconds)
            return report
        finally:
            os.close(descriptor)
            self._slots.put(slot)

    def close(self) -> None:
        """End what runs, then remove the control groups."""
        if self._is_closed:
            return
        self._is_closed = True
        os.close(self._keep)
        with contextlib.suppress(queue.Empty):
            for _ in range(self._num_slots):
                self._slots.get(timeout=CLOSE_S)
        self._slots.put(0)  # whoever comes now is told
        os.close(self._stop)
        for group in self._groups:
            group.close()
        self._filter.close()

    def _command(self, slot: int, descriptor: int) -> tuple[str, ...]:
        uid = str(FIRST_UID + slot)
        drop = (self._setpriv, "--reuid", uid, "--regid", uid, "--clear-groups", "--") if self._is_root else ()
        return (
            *drop,
            self._bwrap,
            *("--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL", "--new-session"),
            # first process inside is the runner: nobody in there can end or stop it, and bwrap itself waits for it
            *("--as-pid-1", "--die-with-parent", "--clearenv", "--setenv", "LANG", "C.UTF-8", "--setenv", "HOME"),
            *("/tmp", "--uid", "65534", "--gid", "65534", "--hostname", "sandbox"),
            *self._view,
            *("--size", str(self.limits.disk_bytes), "--tmpfs", "/tmp", "--dir", "/dev"),
            *(part for name in ("null", "zero", "urandom") for part in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")),
            *("--remount-ro", "/", "--chdir", "/tmp", "--seccomp", str(descriptor), "--"),
            INTERPRETER,
            *self._runner.flags,
        )


INTERPRETER = os.path.realpath("/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys._base_executable)


def _find(name: str, package: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise HostError(
            f"{name} is not installed",
            where="PATH",
            rule=f"the bubblewrap sandbox needs {name}",
            way_out=f"install {package} (`make system-packages` in a checkout)",
        )
    return found


def _filter_file() -> "tempfile._TemporaryFileWrapper[bytes]":
    try:
        code = deny_list(platform.machine())
    except KeyError:
        raise HostError(
            f"no list of system calls for {platform.machine()}",
            where="rlplan/runtime/sandbox/seccomp.py",
            rule="x86_64 or aarch64",
            way_out="run code_executor on one of these",
        ) from None
    file = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the sandbox lives
    file.write(code)
    file.flush()
    return file


def system_runner() -> Runner:
    """The runner for the system's interpreter. Raises: HostError."""
    try:
        return runner_for(INTERPRETER)
    except (OSError, subprocess.SubprocessError) as error:
        raise _no_interpreter(error) from None


def _interpreter_view() -> tuple[str, ...]:
    """What bwrap shows, read-only: the interpreter, its standard library, the folders of the shared libraries; nothing
    else of the host.
    """
    try:
        said = subprocess.run(
            [INTERPRETER, "-I", "-S", "-c", _PROBE], capture_output=True, text=True, timeout=20, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        raise _no_interpreter(error) from None
    stdlib = said[0]
    folders = {os.path.realpath(Path(path).parent) for path in said[1:]}
    places = [place for place in sorted({stdlib, *folders}) if not place.startswith(stdlib + "/")]
    view = ["--ro-bind", INTERPRETER, INTERPRETER]
    for place in places:
        view += ["--ro-bind", place, place]
    for link in ("/lib", "/lib64"):
        if Path(link).is_symlink():
            view += ["--symlink", str(Path(link).readlink()), link]
    loaders = Path("/lib64").resolve()
    if loaders.is_dir() and str(loaders) not in places:
        view += ["--ro-bind", str(loaders), str(loaders)]
    return tuple(view)


def _no_interpreter(error: Exception) -> HostError:
    return HostError(
        f"the interpreter for sandboxes does not answer: {error}",
        where=INTERPRETER,
        rule="a Python interpreter that every user may read",
        way_out="install the system's python3",
    )


def _memory_groups(num_slots: int, limit: int) -> list[MemoryGroup]:
    groups: list[MemoryGroup] = []
    try:
        for slot in range(num_slots):
            groups.append(MemoryGroup(slot, limit))
    except OSError:
        for group in groups:
            group.close()
        return []
    return groups
