"""The `sandlock` sandbox: Landlock and seccomp without namespaces or root, for hosts where bubblewrap may not run.

Programs can write only to a folder of the run, where they start; its name is not /tmp. (sandlock can map /tmp to it,
but mknod and bind then reach the host's /tmp.) It is slower than bubblewrap: an interpreter sets up each sandbox.
sandlock counts memory and CPU per process, so a watch adds them up over the process tree, and the folder's files too.
The seccomp list of bubblewrap is applied before the program is loaded, because sandlock answers some calls itself.

In: programs. Out: reports. Left out: a process namespace. A program can kill its runner, so a missing verdict scores 0
here whatever the cause. Processes that a test leaves behind end with the program, not with the test.
"""

import errno
import importlib.util
import json
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from rlplan.errors import HostError
from rlplan.runtime.processes.safe_path import BASE_EXECUTABLE
from rlplan.runtime.sandbox.bubblewrap import INTERPRETER, compile_system_runner, find_interpreter_places
from rlplan.runtime.sandbox.process import run_command
from rlplan.runtime.sandbox.programs import DEFAULT_LIMITS, Limits, Program, Report, Sandbox
from rlplan.runtime.sandbox.seccomp import compose_filter_code, read_denied_calls
from rlplan.runtime.sandbox.tree_limits import BETWEEN_LOOKS, NAME_BYTES, TreeWatch
from rlplan.runtime.sandbox.uids import ClaimedUids

_LAUNCHER = """
import ctypes, json, os, sys
os.environ["HOME"] = "/tmp"  # sandlock asks for one
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # orphaned processes become children of this process
sys.path.insert(0, sys.argv[1])
from sandlock import Sandbox
process = Sandbox(**json.loads(sys.argv[2])).popen(sys.argv[3:])
process.wait()
while True:
    for thread in os.listdir("/proc/self/task"):
        try:
            for child in open("/proc/self/task/" + thread + "/children").read().split():
                os.kill(int(child), 9)
        except OSError:
            pass
    try:
        os.waitpid(-1, 0)
    except ChildProcessError:
        break
"""


class Landlocked(Sandbox):
    """See the module docstring. Raises: HostError when sandlock is not installed."""

    name = "sandlock"
    cannot_hold = f"bugs of the kernel, a program that ends its own runner, {BETWEEN_LOOKS}"

    def __init__(self, num_slots: int, limits: Limits = DEFAULT_LIMITS) -> None:
        package = importlib.util.find_spec("sandlock")
        if package is None or package.origin is None:
            raise HostError(
                "sandlock is not installed",
                where="this Python environment",
                rule="the sandlock sandbox needs the package of that name",
                way_out="pip install sandlock",
            )
        super().__init__(num_slots, limits)
        self._packages = str(Path(package.origin).parent.parent)
        self._runner = compile_system_runner(compose_filter_code(os.uname().machine))
        self._places = find_interpreter_places()
        self._setpriv = shutil.which("setpriv") if os.geteuid() == 0 else None
        self._uids = ClaimedUids(num_slots)
        self._folder = Path(tempfile.mkdtemp(prefix="rlplan-sandlock-"))
        self._folder.chmod(0o711)  # programs have other users

    def run_in_slot(self, slot: int, program: Program, *, stops_early: bool) -> Report:
        uid, folder, limits = self._uids.numbers[slot], self._folder / str(slot), program.limits
        folder.mkdir()
        if self._setpriv:
            os.chown(folder, uid, uid)
        tree = TreeWatch(limits.memory_bytes, limits.cpu_s(len(program.cases)))

        def watch(pid: int) -> str | None:
            return tree(pid) or ("memory" if measure_files(folder, limits.disk_bytes) > limits.disk_bytes else None)

        try:
            command = self._make_command(uid, folder)
            return run_command(
                command, self._runner.code, program, stops_early=stops_early, watch=watch, stop=self.stop
            )
        finally:
            remove_folder(folder)

    def clean(self) -> None:
        self._folder.rmdir()
        self._uids.close()

    def _make_command(self, uid: int, folder: Path) -> tuple[str, ...]:
        policy = {
            "fs_readable": [INTERPRETER, *self._places, "/dev/null", "/dev/urandom", str(folder)],
            "fs_writable": ["/dev/null", str(folder)],
            "fs_denied": ["/proc"],  # sandlock would emulate parts of it
            "cwd": str(folder),
            "env": {"LANG": "C.UTF-8", **dict.fromkeys(("HOME", "PWD", "TMPDIR"), str(folder))},
            "max_memory": self.limits.memory_bytes,
            "max_processes": self.limits.num_processes,
            "clean_env": True,
            "no_coredump": True,
            "extra_deny_syscalls": list(read_denied_calls(os.uname().machine)),
        }
        ids = ("--reuid", str(uid), "--regid", str(uid), "--clear-groups")
        drop = (self._setpriv, *ids, "--inh-caps=-all", "--bounding-set=-all", "--") if self._setpriv else ()
        launch = (BASE_EXECUTABLE, "-I", "-S", "-c", _LAUNCHER, self._packages, json.dumps(policy))
        return (*drop, *launch, INTERPRETER, *self._runner.flags)


def measure_files(folder: Path, enough: int) -> int:
    """Bytes of a folder's files and names, counted up to `enough`; more where its paths are too long to be read."""
    total, waiting = 0, [str(folder)]
    while waiting and total <= enough:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    total += 512 * status.st_blocks + NAME_BYTES
                    if stat.S_ISDIR(status.st_mode):
                        waiting.append(entry.path)
        except OSError as error:
            total += enough + 1 if error.errno == errno.ENAMETOOLONG else 0
    return total


def remove_folder(folder: Path) -> None:
    """Remove a run's folder, even if its program nested folders deeply or changed their modes."""
    try:
        folder.rmdir()
    except OSError:
        # rm reaches paths of any length, where shutil.rmtree may exceed Python's recursion limit
        removes = 'chmod -R u+rwx "$1"; rm -rf "$1"'
        subprocess.run(["/bin/sh", "-c", removes, "sh", str(folder)], stderr=subprocess.DEVNULL, check=False)
