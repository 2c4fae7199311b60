"""The sandbox of `sandlock`: Landlock and seccomp, no namespaces and no root; for hosts where bubblewrap may not run.

In: programs. Out: reports. Nothing may be written anywhere, so that no file stays behind. Slower than bubblewrap: each
sandbox is set up by an interpreter of its own. The whole tree's memory is looked at, for sandlock counts by process.
"""

import importlib.util
import json
import os
import queue
import shutil
import sys
from pathlib import Path

from rlplan.errors import HostError
from rlplan.runtime.sandbox.bubblewrap import FIRST_UID, INTERPRETER, system_runner
from rlplan.runtime.sandbox.memory_groups import TreeWatch
from rlplan.runtime.sandbox.process import run_in
from rlplan.runtime.sandbox.programs import DEFAULT_LIMITS, Limits, Program, Report
from rlplan.runtime.sandbox.seccomp import denied_calls

_LAUNCHER = """
import json, os, sys
os.environ["HOME"] = "/tmp"
sys.path.insert(0, sys.argv[1])
from sandlock import Sandbox
process = Sandbox(**json.loads(sys.argv[2])).popen(sys.argv[3:])
process.wait()
"""


class Landlocked:
    """See the module docstring. Raises: HostError where sandlock is not installed."""

    name = "sandlock"

    def __init__(self, num_slots: int, limits: Limits = DEFAULT_LIMITS) -> None:
        found = importlib.util.find_spec("sandlock")
        if found is None or found.origin is None:
            raise HostError(
                "sandlock is not installed",
                where="this Python environment",
                rule="the sandlock sandbox needs the package of that name",
                way_out="pip install sandlock",
            )
        self.limits, self._packages = limits, str(Path(found.origin).parent.parent)
        self._runner = system_runner()
        self._watch = TreeWatch(limits.memory_bytes)
        self._setpriv = shutil.which("setpriv") if os.geteuid() == 0 else None
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(num_slots):
            self._slots.put(slot)

    def run(self, program: Program, *, stops_early: bool = False) -> Report:
        """Run a program in a fresh sandbox."""
        slot = self._slots.get()
        try:
            return run_in(self._command(slot), self._runner.code, program, stops_early=stops_early, watch=self._watch)
        finally:
            self._slots.put(slot)

    def close(self) -> None:
        """Nothing is kept between runs."""

    def _command(self, slot: int) -> tuple[str, ...]:
        policy = {
            "fs_readable": [
                place for place in ("/usr", "/lib", "/lib64", "/dev/null", "/dev/urandom") if Path(place).exists()
            ],
            "fs_writable": ["/dev/null"],
            "max_memory": self.limits.memory_bytes,
            "max_processes": self.limits.num_processes,
            "clean_env": True,
            "no_coredump": True,
            "extra_deny_syscalls": list(denied_calls(os.uname().machine)),
        }
        uid = str(FIRST_UID + slot)
        drop = (self._setpriv, "--reuid", uid, "--regid", uid, "--clear-groups", "--") if self._setpriv else ()
        launch = (sys._base_executable, "-I", "-S", "-c", _LAUNCHER, self._packages, json.dumps(policy))
        return (*drop, *launch, INTERPRETER, *self._runner.flags)
