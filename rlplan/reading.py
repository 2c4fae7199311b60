"""Reading: the one way in which an untrusted file is opened.

In: a path, and how many bytes are read of it at most. Out: bytes, text or lines, or a SpecError. A pipe or a device is
refused before a byte of it is read: it may have no end, and opening one may wait for a writer for ever.
Left out: files of this process's own making, and those of the kernel below /proc and /sys.
"""

import errno
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
MAX_INTEGER = (1 << 63) - 1
"""Beyond it no arithmetic with fractions, and no table, takes a whole number."""
MAX_STEP = 1 << 53
"""Steps beyond which a fraction no longer tells two of them apart."""
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


@contextmanager
def explaining_paths() -> Iterator[None]:
    """Turn what the system says of a path that somebody named into a message. Raises: SpecError.

    Whoever asks whether a path is there (`Path.exists`, `Path.is_dir`, `Path.resolve`) gets an OSError for a name that
    is too long, for a loop of links and for a folder without permissions, and a ValueError for one with a null byte.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        if (refusal := path_refusal(error)) is None:
            raise
        raise refusal from error


def path_refusal(error: BaseException) -> SpecError | None:
    """The message for an error that lies in a path itself; None for any other error."""
    if isinstance(error, ValueError) and "null byte" in str(error):
        return _refused(Path("a path"), "a path holds a null byte", PATH_RULE, PATH_WAY_OUT)
    if not isinstance(error, OSError) or error.errno not in PATH_ERRORS or error.filename is None:
        return None
    name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(error.filename)
    shown = name if len(name) <= MAX_SHOWN_PATH else f"{name[:MAX_SHOWN_PATH]}… ({len(name)} characters)"
    return _refused(Path(shown), f"a path cannot be used: {error.strerror}", PATH_RULE, PATH_WAY_OUT)


PATH_ERRORS = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EILSEQ)
MAX_SHOWN_PATH = 120
PATH_RULE = "a path that the file system can hold and that may be looked at: mostly at most 255 bytes a name"
PATH_WAY_OUT = "check the path and its permissions, or name another place"


def is_file(path: Path) -> bool:
    """Whether a regular file, or a link to one, is there; a name that no file system can hold is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def exists(path: Path) -> bool:
    """Whether anything is there; a name that no file system can hold is nothing."""
    try:
        return path.exists()
    except (OSError, ValueError):
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
    TypeError, AttributeError or OverflowError.
    """
    damage: SpecError | None = None
    for number, line in read_lines(path, what, limit=limit):
        if damage is not None and line.strip():
            raise damage
        try:
            if line.strip():
                check_values(line)
            record = take(json.loads(line)) if line.strip() else None
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
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


def check_numbers(row: dict[str, Any]) -> dict[str, Any]:
    """A row of numbers by name, of which `step` counts from 0, or is -1 at the end of a run.

    A number that overflowed when it was measured stays.

    Raises: ValueError, KeyError for a row without a step.

    >>> check_numbers({"step": 3, "loss": 0.5, "kl": None})
    {'step': 3, 'loss': 0.5, 'kl': None}
    """
    for name, value in row.items():
        if value is not None and not isinstance(value, int | float):
            raise ValueError(f"{name[:MAX_SHOWN_PATH]} is a {type(value).__name__}, not a number")
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise ValueError(f"{name[:MAX_SHOWN_PATH]} is a whole number of {value.bit_length()} bits")
    step = row["step"]
    if isinstance(step, float) and step.is_integer():
        step = int(step)
    if type(step) is not int or not -1 <= step <= MAX_STEP:
        raise ValueError(f"step is {step!r}, not a whole number from -1 to {MAX_STEP}")
    return {**row, "step": step}


def read_number(value: object) -> float:
    """A number that somebody else's JSON gives; 0 where it gives none, or one beyond 63 bits.

    >>> read_number(2.5), read_number("soon"), read_number(float("inf"))
    (2.5, 0.0, 0.0)
    """
    return float(value) if isinstance(value, int | float) and abs(value) <= MAX_INTEGER else 0.0


def check_values(text: str | bytes) -> None:
    """Before JSON is parsed: a text may hold far more bytes of objects than of its own. Raises: ValueError."""
    marks: tuple[Any, ...] = (",", "[", "{") if isinstance(text, str) else (b",", b"[", b"{")
    if sum(map(text.count, marks)) > MAX_JSON_VALUES:
        raise ValueError(f"more than {MAX_JSON_VALUES} values")


def unreadable(path: Path, what: str, error: Exception) -> SpecError:
    """The message for what the system says of a file. error: an OSError, or a ValueError for a path that is none."""
    why = getattr(error, "strerror", None) or error
    name = str(path)
    if len(name) > MAX_SHOWN_PATH:
        path = Path(f"{name[:MAX_SHOWN_PATH]}… ({len(name)} characters)")
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
