"""The sandbox of bubblewrap, hardened: own user and namespaces, writable is one small tmpfs, no /proc, no network.

In: programs. Out: reports. Between: setpriv (an own uid, when we are root), control groups for memory and CPU of the
whole tree, bwrap with a seccomp deny list, and rlimits that the runner sets before the program is there.
Left out: protection from a kernel bug. For hostile tenants on shared machines use a virtual machine.
"""

import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import IO

from rlplan.errors import HostError
from rlplan.runtime.processes.machine_speed import scaled
from rlplan.runtime.processes.safe_path import BASE_EXECUTABLE
from rlplan.runtime.sandbox.process import NOT_BEGUN, START_S, Runner, run_command, compile_runner
from rlplan.runtime.sandbox.programs import DEFAULT_LIMITS, CaseResult, Limits, Program, Report, Sandbox
from rlplan.runtime.sandbox.seccomp import build_deny_list
from rlplan.runtime.sandbox.tree_limits import BETWEEN_LOOKS, TreeGroup, TreeWatch, remove_stale_groups
from rlplan.runtime.sandbox.uids import ClaimedUids

_PROBE = """
import sys, sysconfig, ctypes, zlib, hashlib
files = {line.split()[-1] for line in open("/proc/self/maps")}
for each in (sysconfig.get_path("stdlib"), *sorted(file for file in files if ".so" in file)):
    print(each)
"""


class Bubblewrap(Sandbox):
    """See the module docstring. Raises: HostError where it cannot be had."""

    name = "bubblewrap"

    def __init__(self, num_slots: int, limits: Limits = DEFAULT_LIMITS) -> None:
        self._bwrap = find_tool("bwrap", "bubblewrap", self.name)
        self._is_root = os.geteuid() == 0
        self._setpriv = find_tool("setpriv", "util-linux", self.name) if self._is_root else ""
        self._runner, self._view = compile_system_runner(), _make_interpreter_view()
        self._filter = _write_filter()
        self._groups = make_tree_groups(num_slots, limits.memory_bytes)
        self._uids = ClaimedUids(num_slots)
        self.cannot_hold = "bugs of the kernel"
        if not self._groups:
            self.cannot_hold += f", {BETWEEN_LOOKS} (no control group may be made here)"
        super().__init__(num_slots, limits)

    def run_in_slot(self, slot: int, program: Program, *, stops_early: bool) -> Report:
        group = self._groups[slot] if self._groups else None
        if group is not None:
            group.begin()
        # a description of its own: bwrap reads the filter from where the descriptor stands
        descriptor = os.open(f"/proc/self/fd/{self._filter.fileno()}", os.O_RDONLY)
        try:
            command = (*(group.joining if group else ()), *self._command(slot, descriptor))
            report = run_command(
                command,
                self._runner.code,
                program,
                pass_fds=(descriptor,),
                stops_early=stops_early,
                watch=make_watch(program, group),
                stop=self.stop,
            )
            return attribute_failure(report, *(group.read_outcome() if group else (False, False)))
        finally:
            os.close(descriptor)

    def clean(self) -> None:
        for group in self._groups:
            group.close()
        self._filter.close()
        self._uids.close()

    def _command(self, slot: int, descriptor: int) -> tuple[str, ...]:
        uid = str(self._uids.numbers[slot])
        drop = (self._setpriv, "--reuid", uid, "--regid", uid, "--clear-groups", "--") if self._is_root else ()
        return (
            *drop,
            self._bwrap,
            *("--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL", "--new-session"),
            # first process inside is the runner: no program inside can end or stop it, and bwrap itself waits for it
            *("--as-pid-1", "--die-with-parent", "--clearenv", "--setenv", "LANG", "C.UTF-8", "--setenv", "HOME"),
            *("/tmp", "--uid", "65534", "--gid", "65534", "--hostname", "sandbox"),
            *self._view,
            *("--size", str(self.limits.disk_bytes), "--tmpfs", "/tmp", "--dir", "/dev"),
            *(part for name in ("null", "zero", "urandom") for part in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")),
            *("--remount-ro", "/", "--chdir", "/tmp", "--seccomp", str(descriptor), "--"),
            INTERPRETER,
            *self._runner.flags,
        )


def attribute_failure(report: Report, was_ended: bool, was_full: bool) -> Report:
    """A report with a failure that no program brings about as `broken`. was_ended, was_full: TreeGroup.ended.

    Inside, the runner is the first process: no signal reaches it from there, no other process may set its limits
    (seccomp.py), and what it reads is bounded. So what ends it without a verdict comes from outside, but for the
    group's own limit of memory. That the host runs out of memory is no program's doing: the plan has counted its limit.
    """
    if was_ended and was_full:
        status = "memory" if report.status in ("killed", "broken") else report.status
        return Report(status, report.cases, report.detail, report.seconds)
    if report.detail == NOT_BEGUN:
        return _mark_broken(report, NOT_BEGUN)
    has_lost = report.status == "killed" or any(case.status == "killed" for case in report.cases)
    if was_ended and has_lost:
        return _mark_broken(report, "the host ran out of memory")
    return _mark_broken(report, "its runner ended without a verdict") if report.status == "killed" else report


def _mark_broken(report: Report, detail: str) -> Report:
    return Report("broken", tuple(CaseResult("missing") for _ in report.cases), detail, report.seconds)


def make_watch(program: Program, group: TreeGroup | None) -> TreeWatch | None:
    """What a run's groups leave to be looked at."""
    if group is not None and group.has_quota:
        return None
    limits = program.limits
    return TreeWatch(None if group else limits.memory_bytes, limits.cpu_s(len(program.cases)))


INTERPRETER = os.path.realpath("/usr/bin/python3" if Path("/usr/bin/python3").exists() else BASE_EXECUTABLE)


def find_tool(name: str, package: str, sandbox: str) -> str:
    """The path of what a sandbox needs. Raises: HostError where it is not installed."""
    path = shutil.which(name)
    if path is None:
        raise HostError(
            f"{name} is not installed",
            where="PATH",
            rule=f"the {sandbox} sandbox needs {name}",
            way_out=f"install {package} (`make system-packages` in a checkout)",
        )
    return path


def _write_filter() -> IO[bytes]:
    try:
        code = build_deny_list(platform.machine())
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


def compile_system_runner(before: str = "") -> Runner:
    """The runner for the system's interpreter. before: code that runs first. Raises: HostError."""
    try:
        return compile_runner(INTERPRETER, before)
    except (OSError, subprocess.SubprocessError) as error:
        raise _make_interpreter_error(error) from None


def find_interpreter_places() -> list[str]:
    """The interpreter's standard library and the folders of the shared libraries. Raises: HostError."""
    try:
        lines = subprocess.run(
            [INTERPRETER, "-I", "-S", "-c", _PROBE], capture_output=True, text=True, timeout=scaled(START_S), check=True
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        raise _make_interpreter_error(error) from None
    stdlib = lines[0]
    folders = {os.path.realpath(Path(path).parent) for path in lines[1:]}
    places = [place for place in sorted({stdlib, *folders}) if not place.startswith(stdlib + "/")]
    loaders = Path("/lib64").resolve()
    return [*places, *([str(loaders)] if loaders.is_dir() and str(loaders) not in places else [])]


def _make_interpreter_view() -> tuple[str, ...]:
    """What bwrap shows, read-only: the interpreter and its places; nothing else of the host."""
    view = ["--ro-bind", INTERPRETER, INTERPRETER]
    for place in find_interpreter_places():
        view += ["--ro-bind", place, place]
    for link in ("/lib", "/lib64"):
        if Path(link).is_symlink():
            view += ["--symlink", str(Path(link).readlink()), link]
    return tuple(view)


def _make_interpreter_error(error: Exception) -> HostError:
    return HostError(
        f"the interpreter for sandboxes does not answer: {error}",
        where=INTERPRETER,
        rule="a Python interpreter that every user may read",
        way_out="install the system's python3",
    )


def make_tree_groups(num_slots: int, memory_bytes: int) -> list[TreeGroup]:
    """A group for each slot, those of drivers that were killed removed; none where not all may be made."""
    remove_stale_groups()
    groups: list[TreeGroup] = []
    try:
        for _ in range(num_slots):
            groups.append(TreeGroup(memory_bytes))
    except OSError:
        for group in groups:
            group.close()
        return []
    return groups
