"""The bubblewrap sandbox: a program runs in its own namespaces with one small tmpfs, no /proc and no network.

Several layers protect the host. As root, setpriv gives each slot its own uid. Control groups limit memory and CPU of
the process tree. bwrap applies a seccomp deny list, and the runner sets rlimits before it loads the program.

In: programs. Out: reports. Left out: protection from kernel bugs; use a virtual machine for hostile tenants.
"""

import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import IO

from rlplan.errors import HostError
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.processes.safe_path import BASE_EXECUTABLE
from rlplan.runtime.sandbox.process import NOT_BEGUN, START_S, Runner, compile_runner, run_command
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
"""Prints the standard library's folder and the shared libraries in use; the imports load those that programs need."""


class Bubblewrap(Sandbox):
    """See the module docstring. Raises: HostError when a tool or an interpreter is missing."""

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
            self.cannot_hold += f", {BETWEEN_LOOKS} (control groups cannot be created here)"
        super().__init__(num_slots, limits)

    def run_in_slot(self, slot: int, program: Program, *, stops_early: bool) -> Report:
        group = self._groups[slot] if self._groups else None
        if group is not None:
            group.begin()
        # Opened anew for each run: bwrap reads the filter from the descriptor's offset, which a dup would share.
        descriptor = os.open(f"/proc/self/fd/{self._filter.fileno()}", os.O_RDONLY)
        try:
            command = (*(group.join_command if group else ()), *self._make_command(slot, descriptor))
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

    def _make_command(self, slot: int, descriptor: int) -> tuple[str, ...]:
        uid = str(self._uids.numbers[slot])
        drop = (self._setpriv, "--reuid", uid, "--regid", uid, "--clear-groups", "--") if self._is_root else ()
        return (
            *drop,  # setpriv comes first: only root may change the uid, and bwrap then runs unprivileged
            self._bwrap,
            *("--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL", "--new-session"),
            # The runner is process 1 of its namespace: no program inside can kill or stop it, and bwrap waits for it.
            *("--as-pid-1", "--die-with-parent", "--clearenv", "--setenv", "LANG", "C.UTF-8", "--setenv", "HOME"),
            *("/tmp", "--setenv", "TMPDIR", "/tmp"),
            *("--uid", "65534", "--gid", "65534", "--hostname", "sandbox"),  # 65534 is nobody
            *self._view,
            *("--size", str(self.limits.disk_bytes), "--tmpfs", "/tmp", "--dir", "/dev"),
            *(part for name in ("null", "zero", "urandom") for part in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")),
            # The root is bwrap's own tmpfs, which the size limit above does not cover, so it becomes read-only.
            *("--remount-ro", "/", "--chdir", "/tmp", "--seccomp", str(descriptor), "--"),
            INTERPRETER,
            *self._runner.flags,
        )


def attribute_failure(report: Report, was_ended: bool, was_full: bool) -> Report:
    """Report a failure as `broken` when the program cannot have caused it. was_ended, was_full: see read_outcome.

    The runner is process 1 inside the sandbox. Programs cannot signal it, seccomp keeps them from changing its limits,
    and its input is bounded. A missing verdict therefore comes from outside, unless the group's memory limit was met.
    Programs are not blamed when the host runs out of memory, because the plan has counted their limit.
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
    """A watch for the limits that a run's control groups do not enforce; None when they enforce all."""
    if group is not None and group.has_quota:
        return None
    limits = program.limits
    return TreeWatch(None if group else limits.memory_bytes, limits.cpu_s(len(program.cases)))


INTERPRETER = os.path.realpath("/usr/bin/python3" if Path("/usr/bin/python3").exists() else BASE_EXECUTABLE)


def find_tool(name: str, package: str, sandbox: str) -> str:
    """Path of a command that a sandbox needs. Raises: HostError when it is not installed."""
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
            f"no seccomp list for {platform.machine()}",
            where="rlplan/runtime/sandbox/seccomp.py",
            rule="x86_64 or aarch64",
            way_out="run code_executor on one of these",
        ) from None
    file = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the sandbox
    file.write(code)
    file.flush()
    return file


def compile_system_runner(before: str = "") -> Runner:
    """The runner for the system's interpreter. before: code that runs before the runner. Raises: HostError."""
    try:
        return compile_runner(INTERPRETER, before)
    except (OSError, subprocess.SubprocessError) as error:
        raise _make_interpreter_error(error) from None


def find_interpreter_places() -> list[str]:
    """Folders of the interpreter's standard library and shared libraries. Raises: HostError."""
    try:
        lines = subprocess.run(
            [INTERPRETER, "-I", "-S", "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=scale_seconds(START_S),
            check=True,
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        raise _make_interpreter_error(error) from None
    stdlib = lines[0]
    folders = {os.path.realpath(Path(path).parent) for path in lines[1:]}
    places = [place for place in sorted({stdlib, *folders}) if not place.startswith(stdlib + "/")]
    loaders = Path("/lib64").resolve()
    return [*places, *([str(loaders)] if loaders.is_dir() and str(loaders) not in places else [])]


def _make_interpreter_view() -> tuple[str, ...]:
    """Options that mount the interpreter and its folders read-only; nothing else of the host is visible."""
    view = ["--ro-bind", INTERPRETER, INTERPRETER]
    for place in find_interpreter_places():
        view += ["--ro-bind", place, place]
    for link in ("/lib", "/lib64"):
        if Path(link).is_symlink():
            view += ["--symlink", str(Path(link).readlink()), link]
    return tuple(view)


def _make_interpreter_error(error: Exception) -> HostError:
    return HostError(
        f"the sandbox interpreter does not start: {error}",
        where=INTERPRETER,
        rule="a Python interpreter that every user may read",
        way_out="install the system's python3",
    )


def make_tree_groups(num_slots: int, memory_bytes: int) -> list[TreeGroup]:
    """One control group per slot; an empty list when they cannot all be created. Stale groups are removed first."""
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
