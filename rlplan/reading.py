"""Reading of untrusted files: the only place where they are opened.

In: a path, and a limit on the bytes read. Out: bytes, text or lines, or a SpecError. Left out: files written by this
process, and those of the kernel below /proc and /sys.

A pipe or a device is refused before it is read: it may have no end, and opening a pipe may wait for a writer forever.
"""

import difflib
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
"""Size limit of a job or profile: larger files are a mistake or an attack."""
MAX_CODE = 400_000
"""Characters of a program that is parsed. 300,000 of chained calls took 116 MB as a syntax tree."""
MAX_NAMES = 1000
"""Most names of a folder among which a missing file is looked up."""
MAX_LINE_BYTES = 1 << 24
MAX_JSON_VALUES = 4_000_000
"""Limit on JSON values in one text, estimated by its commas and opening brackets. Each takes up to 92 bytes as a Python
object, 370 MB in all."""
MAX_INTEGER = (1 << 63) - 1
"""Largest integer that float arithmetic and tables accept."""
MAX_STEP = 1 << 53
"""Largest step number: floats cannot represent every integer above it."""
MAX_RUN_BYTES = 1 << 32
"""Size limit of a run folder's file that grows step by step. It is read line by line."""
Record = TypeVar("Record")


@contextmanager
def open_regular(path: Path, what: str) -> Iterator[BinaryIO]:
    """A regular file, open while it is read. what: its name in messages. Raises: SpecError."""
    try:
        file = open(path, "rb", opener=_open_without_waiting)  # noqa: SIM115 - Path.open takes no opener
    except FileNotFoundError:
        way_out = _suggest_file(path, what)
        raise _error(path, f"{what} is missing", "the file must exist", way_out) from None
    except (OSError, ValueError) as error:  # ValueError: a path that no file system can hold
        raise describe_read_error(path, what, error) from None
    with file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise _error(path, f"{what} is a pipe or a device", "a regular file", "write it into a file")
        try:
            yield file
        except OSError as error:
            raise describe_read_error(path, what, error) from None


def _suggest_file(path: Path, what: str) -> str:
    """The way out for a missing file: the nearest name in its folder."""
    try:
        names = [entry.name for _, entry in zip(range(MAX_NAMES), path.parent.iterdir(), strict=False)]
    except (OSError, ValueError):
        return f"check the path: the folder {path.parent} is missing"
    alike = [name for name in sorted(names) if path.suffix in (".sh", ".py") and name.endswith(path.suffix)]
    names = [
        name for name in names if Path(name).suffix.replace(".yml", ".yaml") == path.suffix.replace(".yml", ".yaml")
    ]
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.7) or alike[:1]
    if near:
        return f"did you mean {path.parent / near[0]}? Paths in a job are relative to the job file"
    writes = f"; `rlplan init {path}` writes a job" if what == "the job file" else ""
    return f"check the path; paths in a job are relative to the job file{writes}"


@contextmanager
def explain_path_errors() -> Iterator[None]:
    """Turn errors about a path that a user named into a message. Raises: SpecError.

    `Path.exists`, `Path.is_dir` and `Path.resolve` raise OSError for a name that is too long, a loop of links, or a
    folder without permissions, and ValueError for a null byte.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        if (refusal := describe_path_error(error)) is None:
            raise
        raise refusal from error


def describe_path_error(error: BaseException) -> SpecError | None:
    """The message for an error caused by a path itself; None for any other error."""
    if isinstance(error, ValueError) and "null byte" in str(error):
        return _error(Path("a path"), "a path holds a null byte", PATH_RULE, PATH_WAY_OUT)
    if not isinstance(error, OSError) or error.errno not in PATH_ERRORS or error.filename is None:
        return None
    name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(error.filename)
    shown = name if len(name) <= MAX_SHOWN_PATH else f"{name[:MAX_SHOWN_PATH]}… ({len(name)} characters)"
    return _error(Path(shown), f"a path cannot be used: {error.strerror}", PATH_RULE, PATH_WAY_OUT)


PATH_ERRORS = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EILSEQ)
MAX_SHOWN_PATH = 120
PATH_RULE = "a path that the file system supports and permissions allow: usually at most 255 bytes per name"
PATH_WAY_OUT = "check the path and its permissions, or name another place"


def is_file(path: Path) -> bool:
    """Whether a regular file, or a link to one, exists; false for a name that no file system can hold."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def exists(path: Path) -> bool:
    """Whether anything exists at a path; false for a name that no file system can hold."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def read_bytes(path: Path, what: str, *, limit: int) -> bytes:
    """The contents of a file. Raises: SpecError where it is missing, not a regular file, or larger than `limit`
    bytes.
    """
    with open_regular(path, what) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(size) if 0 < size <= limit else b""
        if size > limit or file.read(1):  # it grew, or is a kernel file, whose size is 0
            raise _too_large(path, what, min(limit, size))
    return data


def read_text(path: Path, what: str, *, limit: int = MAX_SPEC_BYTES) -> str:
    """The contents of a UTF-8 file. Raises: SpecError as `read_bytes`, and where it is not UTF-8."""
    try:
        return read_bytes(path, what, limit=limit).decode("utf-8")
    except UnicodeDecodeError:
        way_out = "save it as UTF-8, or give the right file"
        raise _error(path, f"{what} is not UTF-8 text", "UTF-8 text", way_out) from None


def read_lines(path: Path, what: str, *, limit: int, max_line: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line without its end), one at a time. Raises: SpecError where a line or the file is too large."""
    with open_regular(path, what) as file:
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
    """Results of `take` for the parsed JSON of each line. A torn last line, left by a killed process, is skipped.

    Raises: SpecError with the number of a line that is not JSON, or for which `take` raises ValueError, KeyError,
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
                rule="one complete JSON record per line; only the last line may be incomplete",
                way_out="remove that line, or run the job again",
            )
            if line.endswith(b"}"):  # a complete line, so it is not a torn one
                raise damage from None
        else:
            if record is not None:
                yield record


def check_numbers(row: dict[str, Any]) -> dict[str, Any]:
    """A row of numbers by name. Its `step` counts from 0, or is -1 at the end of a run.

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
    """A number from foreign JSON; 0 if it is not a number or exceeds 63 bits.

    >>> read_number(2.5), read_number("soon"), read_number(float("inf"))
    (2.5, 0.0, 0.0)
    """
    return float(value) if isinstance(value, int | float) and abs(value) <= MAX_INTEGER else 0.0


def check_values(text: str | bytes) -> None:
    """Refuse, before parsing, a JSON text whose values would take far more memory than the text.

    Raises: ValueError.
    """
    marks: tuple[Any, ...] = (",", "[", "{") if isinstance(text, str) else (b",", b"[", b"{")
    if sum(map(text.count, marks)) > MAX_JSON_VALUES:
        raise ValueError(f"more than {MAX_JSON_VALUES} values")


def check_code(path: Path, text: str) -> None:
    """Refuse, before parsing, a program whose syntax tree would take hundreds of megabytes. Raises: SpecError."""
    if len(text) > MAX_CODE:
        way_out = "write the part that starts the training into a file of its own"
        raise _error(path, f"the script has {len(text):,} characters", f"at most {MAX_CODE:,} are parsed", way_out)


def describe_read_error(path: Path, what: str, error: Exception) -> SpecError:
    """The message for an error while a file is opened or read. error: an OSError, or a ValueError for an invalid
    path.
    """
    why = getattr(error, "strerror", None) or error
    name = str(path)
    if len(name) > MAX_SHOWN_PATH:
        path = Path(f"{name[:MAX_SHOWN_PATH]}… ({len(name)} characters)")
    return _error(path, f"{what} cannot be read: {why}", "a readable file", "check the path and its permissions")


def _open_without_waiting(name: str, flags: int) -> int:
    """Open a file so that a pipe without a writer does not block and no terminal becomes the controlling one."""
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))


def _too_large(path: Path, what: str, limit: int) -> SpecError:
    return _error(path, f"{what} has more than {limit} bytes", f"at most {limit} bytes are read", "give the right file")


def _error(path: Path, what: str, rule: str, way_out: str) -> SpecError:
    return SpecError(what, where=str(path), rule=rule, way_out=way_out)
