"""Reading: the one way in which an untrusted file is opened.

In: a path, and how many bytes are read of it at most. Out: bytes, text or lines, or a SpecError. A pipe or a device is
refused before a byte of it is read: it may have no end, and opening one may wait for a writer for ever.
Left out: files of this process's own making, and those of the kernel below /proc and /sys.
"""

import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from rlplan.errors import SpecError

MAX_SPEC_BYTES = 1 << 20
"""A job or a profile is small; anything larger is a mistake or an attack."""
MAX_LINE_BYTES = 1 << 24
MAX_JSON_VALUES = 4_000_000
"""Of one text, by its commas and opening brackets: each takes up to 92 bytes as Python's objects, 370 MB together."""
MAX_RUN_BYTES = 1 << 32
"""Of a file of a run folder that grows step by step. It is read line by line."""
Record = TypeVar("Record")


@contextmanager
def opened(path: Path, what: str) -> Iterator[BinaryIO]:
    """A regular file, for as long as it is read. what: its name in messages. Raises: SpecError."""
    try:
        file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 - Path.open takes no opener
    except FileNotFoundError:
        way_out = "check the path; paths in a job are relative to the job file"
        raise _refused(path, f"{what} is missing", "the file must exist", way_out) from None
    except (OSError, ValueError) as error:  # ValueError: a path that no file system can hold
        raise unreadable(path, what, error) from None
    with file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise _refused(path, f"{what} is a pipe or a device", "a regular file", "write it into a file")
        try:
            yield file
        except OSError as error:
            raise unreadable(path, what, error) from None


def is_file(path: Path) -> bool:
    """Whether a regular file, or a link to one, is there; a name that no file system can hold is none."""
    try:
        return path.is_file()
    except OSError:
        return False


def read_bytes(path: Path, what: str, *, limit: int) -> bytes:
    """All of a file. Raises: SpecError where it is missing, no regular file, or larger than `limit` bytes."""
    with opened(path, what) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(size) if 0 < size <= limit else b""
        if size > limit or file.read(1):  # it grew, or is one of the kernel's, which have no size
            raise _too_large(path, what, min(limit, size))
    return data


def read_text(path: Path, what: str, *, limit: int = MAX_SPEC_BYTES) -> str:
    """All of a UTF-8 file. Raises: SpecError as `read_bytes`, and where it is not UTF-8."""
    try:
        return read_bytes(path, what, limit=limit).decode("utf-8")
    except UnicodeDecodeError:
        way_out = "save it as UTF-8, or give the right file"
        raise _refused(path, f"{what} is not UTF-8 text", "UTF-8 text", way_out) from None


def read_lines(path: Path, what: str, *, limit: int, max_line: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line without its end), one at a time. Raises: SpecError where a line or the file is too large."""
    with opened(path, what) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise _too_large(path, what, limit)
        number = 0
        while line := file.readline(max_line + 1):
            number, limit = number + 1, limit - len(line)
            if len(line) > max_line:
                raise _too_large(path, f"line {number} of {what}", max_line)
            if limit < 0:
                raise _too_large(path, what, file.tell() + limit)
            yield number, line.rstrip(b"\r\n")


def read_records(path: Path, what: str, take: Callable[[Any], Record], *, limit: int) -> Iterator[Record]:
    """What `take` makes of the JSON of each line. A torn last line, of a process that was killed, is left out.

    Raises: SpecError with the number of a line that is no JSON, or that `take` refuses by a ValueError, KeyError,
    TypeError or AttributeError.
    """
    damage: SpecError | None = None
    for number, line in read_lines(path, what, limit=limit):
        if damage is not None and line.strip():
            raise damage
        try:
            if line.strip():
                check_values(line)
            record = take(json.loads(line)) if line.strip() else None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            damage = SpecError(
                f"{what} is damaged: not a record ({type(error).__name__}: {str(error)[:120]})",
                where=f"{path}, line {number}",
                rule="one whole JSON record a line; only the last line may be torn",
                way_out="remove that line, or run the job again",
            )
            if line.endswith(b"}"):
                raise damage from None
        else:
            if record is not None:
                yield record


def check_values(text: str | bytes) -> None:
    """Before JSON is parsed: a text may hold far more bytes of objects than of its own. Raises: ValueError."""
    marks: tuple[Any, ...] = (",", "[", "{") if isinstance(text, str) else (b",", b"[", b"{")
    if sum(map(text.count, marks)) > MAX_JSON_VALUES:
        raise ValueError(f"more than {MAX_JSON_VALUES} values")


def unreadable(path: Path, what: str, error: Exception) -> SpecError:
    """The message for what the system says of a file. error: an OSError, or a ValueError for a path that is none."""
    why = getattr(error, "strerror", None) or error
    return _refused(path, f"{what} cannot be read: {why}", "a readable file", "check the path and its permissions")


def _without_waiting(name: str, flags: int) -> int:
    """A pipe without a writer opens at once, and no terminal becomes this process's own."""
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))


def _too_large(path: Path, what: str, limit: int) -> SpecError:
    return _refused(
        path, f"{what} has more than {limit} bytes", f"at most {limit} bytes are read", "give the right file"
    )


def _refused(path: Path, what: str, rule: str, way_out: str) -> SpecError:
    return SpecError(what, where=str(path), rule=rule, way_out=way_out)
