"""Disk errors: what a disk that is full, beyond a quota or broken does to a write is one RunError.

In: whatever was raised while a file was written. Out: a RunError that names the file, what was to be written, what is
free there and what to do; nothing where something else went wrong. `writing_file` is for a writer that knows its file,
for the system names none when it refuses bytes; `reporting_disk_errors` stands around all that a run does.
Left out: how the run goes on afterwards (resuming.py says it).
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlplan.errors import RlplanError, RunError
from rlplan.units import format_bytes

FULL = (errno.ENOSPC, errno.EDQUOT)
_TEXTS = {
    errno.ENOSPC: ("the disk is full", "make room there"),
    errno.EDQUOT: ("the quota is used up", "make room there or raise the quota"),
    errno.EFBIG: ("it may not become larger", "raise the limit of file sizes (ulimit -f)"),
    errno.EROFS: ("the disk is read-only", "look at the disk (dmesg)"),
    errno.EIO: ("the disk does not work", "look at the disk (dmesg)"),
}
"""What each number says, and the way out."""

_IN_A_TEXT = re.compile(r"\[Errno (\d+)\]|\(os error (\d+)\)")
"""How Python and Rust (safetensors) write the system's number into the text of an error that has lost it."""


def disk_number(error: BaseException) -> int | None:
    """The system's number of what a disk did; None where the error is about something else.

    >>> disk_number(OSError(28, "No space left on device")), disk_number(ValueError("I/O error: … (os error 5)"))
    (28, 5)
    >>> disk_number(FileNotFoundError(2, "No such file or directory")) is None
    True
    """
    number = error.errno if isinstance(error, OSError) else None
    if number is None and not isinstance(error, RlplanError) and (found := _IN_A_TEXT.search(str(error))):
        number = int(found[1] or found[2])
    return number if number in _TEXTS else None


def disk_error(error: BaseException, place: Path | None, num_bytes: int = 0, way_out: str = "") -> RunError | None:
    """The message about a write that failed; None where the error is about something else.

    place: where no file is named, None for the standard output. num_bytes: that were to be written, where it is known.
    way_out: beside making room.
    """
    number = disk_number(error)
    named = getattr(error, "filename", None)
    if number is None or (number not in FULL and named is None):
        return None  # a terminal that is gone says EIO, too
    path = place if named is None else Path(os.fsdecode(named))
    what, advice = _TEXTS[number]
    wanted = f"{format_bytes(num_bytes)} were to be written, " if num_bytes else ""
    left = "" if path is None else _left(path)
    return RunError(
        f"{path.name if path else 'the output'} cannot be written: {what}" + (f" ({wanted}{left})" if left else ""),
        where=str(path or "standard output"),
        rule="the disk takes everything that is written",
        way_out=advice + (f", or {way_out}" if way_out else ""),
    )


@contextmanager
def writing_file(path: Path, num_bytes: int = 0, way_out: str = "") -> Iterator[None]:
    """For a block that writes one file. Raises: RunError where its disk does not take it. Parameters: `disk_error`."""
    try:
        yield
    except Exception as error:
        number, named = disk_number(error), getattr(error, "filename", None)
        if number is None:
            raise
        failure = disk_error(OSError(number, os.strerror(number), named or str(path)), path, num_bytes, way_out)
        assert failure is not None, "it has a number and a name"
        raise failure from error


@contextmanager
def reporting_disk_errors(folder: Path) -> Iterator[None]:
    """For a block whose writers are many. folder: where most of them write. Raises: RunError."""
    try:
        yield
    except Exception as error:
        failure = disk_error(error, folder)
        if failure is None:
            raise
        raise failure from error


def _left(path: Path) -> str:
    """What is free where a file was to be; nothing where that cannot be asked."""
    folder = next((parent for parent in (path, *path.absolute().parents) if parent.exists()), Path("/"))
    try:
        found = os.statvfs(folder)
    except OSError:
        return ""
    if found.f_files and not found.f_favail:
        return "no more files can be made there"
    return f"{format_bytes(found.f_bavail * found.f_frsize)} free"
