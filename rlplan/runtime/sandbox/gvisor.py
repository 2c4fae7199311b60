"""The gVisor sandbox (`runsc`): system calls go to a kernel in user space instead of the host's kernel.

Each program gets a container with the interpreter's folders read-only, one small tmpfs, an empty `/proc` and no
network. The seccomp list of bubblewrap is applied inside, so a program can ask no more of gVisor than of Linux there.
Control groups limit memory and CPU, gVisor's own processes included. It needs root and about 0.3 s per program.

In: programs. Out: reports. Left out: RLIMIT_NPROC, which gVisor does not count; the group's memory bounds the number
of processes. A program may be able to crash its kernel, so a missing verdict scores 0 here.
"""

import itertools
import json
import os
import shutil
import tempfile
from pathlib import Path

from rlplan.errors import HostError
from rlplan.runtime.sandbox.bubblewrap import (
    INTERPRETER,
    compile_system_runner,
    find_interpreter_places,
    find_tool,
    make_tree_groups,
    make_watch,
)
from rlplan.runtime.sandbox.process import run_command
from rlplan.runtime.sandbox.programs import DEFAULT_LIMITS, Limits, Program, Report, Sandbox
from rlplan.runtime.sandbox.seccomp import compose_filter_code
from rlplan.units import MIB

OWN_BYTES = 192 * MIB
"""Memory of gVisor's own processes, in addition to the program's: measured 70 MiB for one process, more for many."""
_FLAGS = ("--platform=ptrace", "--network=none", "--ignore-cgroups", "--overlay=false")


class Gvisor(Sandbox):
    """See the module docstring. Raises: HostError without `runsc`, root or a control group."""

    name = "gvisor"
    cannot_hold = "bugs of gVisor, a program that ends its own kernel, the number of processes but by their memory"

    def __init__(self, num_slots: int, limits: Limits = DEFAULT_LIMITS) -> None:
        self._runsc = find_tool("runsc", "runsc", self.name)
        self._groups = make_tree_groups(num_slots, limits.memory_bytes + OWN_BYTES) if os.geteuid() == 0 else []
        if not self._groups:
            raise HostError(
                "gVisor cannot limit memory on this host",
                where="runsc",
                rule="it needs root and a memory control group",
                way_out="use another sandbox, which watches memory itself",
            )
        super().__init__(num_slots, limits)
        self._runner = compile_system_runner(compose_filter_code(os.uname().machine))
        self._folder = Path(tempfile.mkdtemp(prefix="rlplan-gvisor-"))
        self._write_bundle()
        self._numbers = itertools.count()

    def run_in_slot(self, slot: int, program: Program, *, stops_early: bool) -> Report:
        group, states = self._groups[slot], self._folder / f"states-{slot}"
        group.begin()
        try:
            name = f"rlplan-{os.getpid()}-{next(self._numbers)}"
            command = (*group.join_command, self._runsc, f"--root={states}", *_FLAGS)
            command = (*command, "run", f"--bundle={self._folder}", name)
            watch, stop = make_watch(program, group), self.stop
            report = run_command(command, self._runner.code, program, stops_early=stops_early, watch=watch, stop=stop)
            _, was_full = group.read_outcome()
            lost = was_full and report.status in ("killed", "broken")
            return Report("memory", report.cases, report.detail, report.seconds) if lost else report
        finally:
            shutil.rmtree(states, ignore_errors=True)

    def clean(self) -> None:
        """Remove the container bundle and the control groups."""
        shutil.rmtree(self._folder, ignore_errors=True)
        for group in self._groups:
            group.close()

    def _write_bundle(self) -> None:
        """Write the container as an OCI bundle: its root folder and `config.json`."""
        root = self._folder / "root"
        root.mkdir()
        for link in ("lib", "lib64"):
            if Path("/", link).is_symlink():
                (root / link).symlink_to(Path("/", link).readlink())
        nobody = {"uid": 65534, "gid": 65534}
        config = {
            "ociVersion": "1.0.0",
            "hostname": "sandbox",
            "root": {"path": "root", "readonly": True},
            "mounts": self._make_mounts(),
            "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
            "process": {
                "terminal": False,
                "user": nobody,
                "args": [INTERPRETER, *self._runner.flags],
                "env": ["LANG=C.UTF-8", "HOME=/tmp", "PWD=/tmp", "TMPDIR=/tmp"],
                "cwd": "/tmp",
                "noNewPrivileges": True,
                "capabilities": {kind: [] for kind in ("bounding", "effective", "inheritable", "permitted")},
            },
        }
        (self._folder / "config.json").write_text(json.dumps(config))

    def _make_mounts(self) -> list[dict[str, object]]:
        """Mounts of the interpreter, and empty file systems that hide what gVisor shows by default."""
        shown: list[dict[str, object]] = [
            {"destination": place, "type": "bind", "source": place, "options": ["ro", "bind"]}
            for place in (INTERPRETER, *find_interpreter_places())
        ]
        empty = {"/proc": ["ro"], "/sys": ["ro"], "/tmp": [f"size={self.limits.disk_bytes}", "mode=1777"]}
        return shown + [
            {"destination": place, "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", *options]}
            for place, options in empty.items()
        ]
