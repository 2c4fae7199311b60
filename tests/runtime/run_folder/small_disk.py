"""A small disk: a tmpfs that only a mount namespace of its own sees, so that it can be filled without harm.

In: an empty folder and a size. Out: programs that see the disk in that folder, and its files from outside. Needs root.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.factories import ROOT

_HOLD = 'mount -t tmpfs -o size="$1" tmpfs "$2" && echo mounted && exec sleep 1000'
_HERE = 'cd "$0" && exec "$@"'
"""A process that joins a mount namespace begins in its root."""


@dataclass(frozen=True)
class SmallDisk:
    """folder: where programs see it. holder: the process that keeps it."""

    folder: Path
    holder: int

    def command(self, *words: str) -> list[str]:
        """A command that sees the disk, in the repository's root."""
        return ["nsenter", f"--mount=/proc/{self.holder}/ns/mnt", "sh", "-c", _HERE, str(ROOT), *words]

    def path(self, name: str) -> Path:
        """A file on the disk, from outside."""
        return Path(f"/proc/{self.holder}/root{self.folder}") / name

    def fill(self, *, leaving: int = 0) -> None:
        """Leave so many bytes free."""
        with self.path("filler").open("ab") as file:
            disk = os.statvfs(self.path("."))
            more = disk.f_bavail * disk.f_frsize - leaving
            if more > 0:
                with suppress(OSError):  # somebody else was faster
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, more)

    def python(self, program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """A program, to its end."""
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}"} | variables
        command = self.command(sys.executable, "-c", program, str(self.folder), *arguments)
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[SmallDisk]:
    """A disk of so many bytes (`256k`) for the block."""
    folder.mkdir()
    holder = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", _HOLD, "sh", size, str(folder)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "mounted\n", "needs root"
        yield SmallDisk(folder, holder.pid)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate(timeout=10)
