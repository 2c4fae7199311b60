"""The sandbox of gVisor (`runsc`): programs speak to a kernel of their own in user space, and never to the host's.

In: programs. Out: reports. Each program has a container of its own with the interpreter's places read-only, one small
tmpfs, an empty `/proc`, and no network. Bubblewrap's list of denied calls is put on inside, so that what a program may
ask of gVisor is no more than what it may ask of Linux there. Control groups hold memory and CPU of the whole, gVisor's
own part among it. As root only, and some 0.3 s a program.
Left out: RLIMIT_NPROC, which gVisor does not count: processes are held by the group's memory. A program may be able to
bring its kernel down, so no verdict means 0 here.
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
    find_tool,
    find_interpreter_places,
    make_tree_groups,
    compile_system_runner,
    make_watch,
)
from rlplan.runtime.sandbox.process import run_command
from rlplan.runtime.sandbox.programs import DEFAULT_LIMITS, Limits, Program, Report, Sandbox
from rlplan.runtime.sandbox.seccomp import compose_filter_code
from rlplan.units import MIB

OWN_BYTES = 192 * MIB
"""Of gVisor's own processes, beside the program's memory: 70 MiB for one process, more for many."""
_FLAGS = ("--platform=ptrace", "--network=none", "--ignore-cgroups", "--overlay=false")


class Gvisor(Sandbox):
    """See the module docstring. Raises: HostError where it cannot be had."""

    name = "gvisor"
    cannot_hold = "bugs of gVisor, a program that ends its own kernel, the number of processes but by their memory"

    def __init__(self, num_slots: int, limits: Limits = DEFAULT_LIMITS) -> None:
        self._runsc = find_tool("runsc", "runsc", self.name)
        self._groups = make_tree_groups(num_slots, limits.memory_bytes + OWN_BYTES) if os.geteuid() == 0 else []
        if not self._groups:
            raise HostError(
                "gVisor would have no limit of memory",
                where="runsc",
                rule="root, and a control group for memory that may be made",
                way_out="take another sandbox, which looks at memory itself",
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
            command = (*group.joining, self._runsc, f"--root={states}", *_FLAGS)
            command = (*command, "run", f"--bundle={self._folder}", name)
            watch, stop = make_watch(program, group), self.stop
            report = run_command(command, self._runner.code, program, stops_early=stops_early, watch=watch, stop=stop)
            _, was_full = group.read_outcome()
            lost = was_full and report.status in ("killed", "broken")
            return Report("memory", report.cases, report.detail, report.seconds) if lost else report
        finally:
            shutil.rmtree(states, ignore_errors=True)

    def clean(self) -> None:
        """Remove the container's description and the control groups."""
        shutil.rmtree(self._folder, ignore_errors=True)
        for group in self._groups:
            group.close()

    def _write_bundle(self) -> None:
        """The container in the form of the Open Container Initiative: its root and `config.json`."""
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
            "mounts": self._mounts(),
            "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
            "process": {
                "terminal": False,
                "user": nobody,
                "args": [INTERPRETER, *self._runner.flags],
                "env": ["LANG=C.UTF-8", "HOME=/tmp"],
                "cwd": "/tmp",
                "noNewPrivileges": True,
                "capabilities": {kind: [] for kind in ("bounding", "effective", "inheritable", "permitted")},
            },
        }
        (self._folder / "config.json").write_text(json.dumps(config))

    def _mounts(self) -> list[dict[str, object]]:
        """What is shown, and empty file systems over what gVisor would show by itself."""
        shown: list[dict[str, object]] = [
            {"destination": place, "type": "bind", "source": place, "options": ["ro", "bind"]}
            for place in (INTERPRETER, *find_interpreter_places())
        ]
        empty = {"/proc": ["ro"], "/sys": ["ro"], "/tmp": [f"size={self.limits.disk_bytes}", "mode=1777"]}
        return shown + [
            {"destination": place, "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", *options]}
            for place, options in empty.items()
        ]
