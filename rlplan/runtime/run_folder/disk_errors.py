"""Disk errors: turns failures of a full, quota-limited or broken disk into one RunError.

In: any exception raised while a file was written. Out: a RunError with the file, the bytes to write, the free space and
advice; nothing for other errors. `writing_file` is for code that knows its file, because the system names none when a
write fails. `reporting_disk_errors` wraps the entire run.
Left out: resuming the run (resuming.py).
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
"""Meaning of each error number, and advice."""

_IN_A_TEXT = re.compile(r"\[Errno (\d+)\]|\(os error (\d+)\)")
"""Error numbers in the text of exceptions without `errno`, as written by Python and by Rust (safetensors)."""


def disk_number(error: BaseException) -> int | None:
    """The system's error number of a disk error; None for other errors.

    >>> disk_number(OSError(28, "No space left on device")), disk_number(ValueError("I/O error: … (os error 5)"))
    (28, 5)
    >>> disk_number(FileNotFoundError(2, "No such file or directory")) is None
    True
    """
    number = error.errno if isinstance(error, OSError) else None
    if number is None and not isinstance(error, RlplanError) and (match := _IN_A_TEXT.search(str(error))):
        number = int(match[1] or match[2])
    return number if number in _TEXTS else None


def disk_error(error: BaseException, place: Path | None, num_bytes: int = 0, way_out: str = "") -> RunError | None:
    """The RunError for a failed write; None for other errors.

    place: the file if the error names none; None for standard output. num_bytes: bytes to write, 0 if unknown.
    way_out: advice in addition to freeing space.
    """
    number = disk_number(error)
    named = getattr(error, "filename", None)
    if number is None or (number not in FULL and named is None):
        return None  # a closed terminal raises EIO too
    path = place if named is None else Path(os.fsdecode(named))
    what, advice = _TEXTS[number]
    needed = f"{format_bytes(num_bytes)} to write, " if num_bytes else ""
    free = "" if path is None else _describe_free_space(path)
    return RunError(
        f"{path.name if path else 'the output'} cannot be written: {what}" + (f" ({needed}{free})" if free else ""),
        where=str(path or "standard output"),
        rule="the disk must accept all writes of a run",
        way_out=advice + (f", or {way_out}" if way_out else ""),
    )


@contextmanager
def writing_file(path: Path, num_bytes: int = 0, way_out: str = "") -> Iterator[None]:
    """Context for code that writes one file. Raises: RunError for a disk error. Parameters: see `disk_error`."""
    try:
        yield
    except Exception as error:
        number, named = disk_number(error), getattr(error, "filename", None)
        if number is None:
            raise
        failure = disk_error(OSError(number, os.strerror(number), named or str(path)), path, num_bytes, way_out)
        assert failure is not None, "the error has a number and a file name"
        raise failure from error


@contextmanager
def reporting_disk_errors(folder: Path) -> Iterator[None]:
    """Context for code that writes many files. folder: where most of them are. Raises: RunError for a disk error."""
    try:
        yield
    except Exception as error:
        failure = disk_error(error, folder)
        if failure is None:
            raise
        raise failure from error


def _describe_free_space(path: Path) -> str:
    """Free space of the disk of a file, in words; empty if it cannot be determined."""
    folder = next((parent for parent in (path, *path.absolute().parents) if parent.exists()), Path("/"))
    try:
        disk = os.statvfs(folder)
    except OSError:
        return ""
    if disk.f_files and not disk.f_favail:
        return "no inodes left for new files"
    return f"{format_bytes(disk.f_bavail * disk.f_frsize)} free"
