"""Tables: rows of a file or a local Hugging Face data set, as one dictionary per row.

Parquet and arrow files are read in a child process with a memory limit, because anybody may have written them. Run as a
module, this file is that process, which prints rows as JSON lines.

In: JSONL, JSON, CSV, TSV, parquet, or a folder (`save_to_disk`, or the Hub's parquet files). Out: numbered rows.
Left out: downloads.
"""

import base64
import codecs
import csv
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlplan.containment import Budget, enter_containment
from rlplan.errors import HostError, SpecError
from rlplan.reading import check_values, open_regular, read_bytes, read_lines
from rlplan.runtime.data.layouts import NoText, make_printable
from rlplan.runtime.processes.line_process import describe_exit
from rlplan.runtime.processes.safe_path import make_module_command
from rlplan.spec.base import read_json, shorten_value

MAX_DATA_BYTES = 1 << 30
"""Most bytes of a line-based file, and of the unpacked rows of a table."""
MAX_LINE_BYTES = 1 << 26
MAX_JSON_BYTES = 1 << 28
"""Most bytes of a list of rows in one JSON value, which is read as a whole."""
MAX_RATIO, MIN_UNPACKED_BYTES = 100, 1 << 28
"""Unpacked rows may have at most MAX_RATIO times the bytes of their files; MIN_UNPACKED_BYTES are always allowed.

The bound stops compression bombs: 100 KB of parquet can unpack to gigabytes."""
BATCH_ROWS = 64
MORE_BYTES = 1 << 30
"""Memory limit of the child process on top of the libraries and the file."""
TIMEOUT_S = 600.0
NOT_UTF8 = "the row is not UTF-8"
DELIMITERS = {".csv": ",", ".tsv": "\t"}
MAX_LIST_BYTES = 1 << 26
"""Most bytes of a data set's list of files."""
SPLITS = ("train", "test", "validation")


def read_table(
    path: Path, image_column: str | None = None, left_out: str = ""
) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """(row number from 1, the row or its fault as text). image_column: column whose bytes are kept as base64.

    left_out: regular expression of columns of a parquet file that are not read.

    Raises: SpecError, HostError when the table cannot be read at all.
    """
    try:
        if not path.is_dir():
            with open_regular(path, "the data"):
                pass  # raises an error for the user if there is no such file
        if path.is_dir() or path.suffix in (".parquet", ".arrow"):
            yield from _read_in_child(path, image_column, left_out)
        elif path.suffix == ".json":
            rows = _parse_value(
                read_bytes(path, "the data", limit=MAX_JSON_BYTES).removeprefix(codecs.BOM_UTF8), "the file"
            )
            if not isinstance(rows, list):
                raise UnreadableTextError("the file is not a list of rows")
            for number, row in enumerate(rows, 1):
                yield number, _check_row(row, "the item")
        elif path.suffix in DELIMITERS:
            yield from _read_csv(path)
        else:
            for number, line in read_lines(path, "the data", limit=MAX_DATA_BYTES, max_line=MAX_LINE_BYTES):
                if text := (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip():
                    yield number, _parse_line(text)
    except UnreadableTextError as error:
        raise _make_error(path, str(error)) from None


def _read_csv(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Rows with the column names of the first line; every cell is a text, and the header is not counted."""
    lines = read_lines(path, "the data", limit=MAX_DATA_BYTES, max_line=MAX_LINE_BYTES)
    text = (raw.decode("utf-8-sig" if number == 1 else "utf-8") + "\n" for number, raw in lines)
    try:
        rows = csv.reader(text, delimiter=DELIMITERS[path.suffix], strict=True)
        names = next(rows, [])
        if doubled := [name for name, count in Counter(names).items() if count > 1]:
            raise UnreadableTextError(f"the column {shorten_value(doubled[0])} occurs twice in the first line")
        for number, cells in enumerate((row for row in rows if row), 1):
            if len(cells) == len(names):
                yield number, dict(zip(names, cells, strict=True))
            else:
                yield number, f"the row has {len(cells)} cells, the first line names {len(names)} columns"
    except UnicodeDecodeError:
        raise UnreadableTextError("the file is not UTF-8") from None
    except csv.Error as error:
        raise UnreadableTextError(f"the file is not {path.suffix[1:].upper()} ({error})") from None


class UnreadableTextError(ValueError):
    """A text is not valid; the message gives the reason."""


class _Doubled(dict[str, Any]):
    """A JSON object with a duplicate key, whose value is ambiguous."""

    key = ""
    """The duplicate key."""


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    merged = dict(pairs)
    if len(merged) == len(pairs):
        return merged
    doubled = _Doubled(merged)
    doubled.key = Counter(key for key, _ in pairs).most_common(1)[0][0]
    return doubled


def _check_row(value: Any, what: str) -> dict[str, Any] | str:
    """A JSON value as a row, or its fault as text."""
    if not isinstance(value, dict):
        return f"{what} is not a JSON object"
    left: list[Any] = [value]
    while left:
        each = left.pop()
        if isinstance(each, _Doubled):
            return f"the key {shorten_value(each.key)} occurs twice in one object"
        left.extend(each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
    return value


def _parse_value(raw: bytes, what: str) -> Any:
    try:
        text = raw.decode("utf-8")
        check_values(text)
        return json.loads(text, object_pairs_hook=_build_object)
    except UnicodeDecodeError:
        raise UnreadableTextError(f"{what} is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise UnreadableTextError(f"{what} is not JSON ({str(error)[:80]})") from None


def _parse_line(line: bytes) -> dict[str, Any] | str:
    try:
        return _check_row(_parse_value(line, "the line"), "the line")
    except UnreadableTextError as error:
        return str(error)


def _read_in_child(path: Path, image_column: str | None, left_out: str) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Rows from the child process, as a stream: neither process holds more than a batch of them."""
    with tempfile.TemporaryFile() as errors:
        command = make_module_command("rlplan.runtime.data.tables", str(path), image_column or "", left_out)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as process:
            deadline = threading.Timer(TIMEOUT_S, process.kill)  # reading its output would block forever otherwise
            deadline.start()
            try:
                assert process.stdout is not None, "a pipe"
                for number, line in enumerate(process.stdout, 1):
                    yield number, _parse_child_line(line)
            finally:  # also when the caller stops before the last row
                deadline.cancel()
                process.kill()
        errors.seek(0)
        error_lines = errors.read(1 << 16).decode("utf-8", "replace").strip().splitlines()
    if process.returncode:
        last = error_lines[-1] if error_lines else describe_exit(process.returncode)
        if "No module named 'pyarrow'" in last:
            raise HostError(
                "parquet and arrow files need pyarrow",
                where=str(path),
                rule="pyarrow is installed",
                way_out="pip install pyarrow, or write the rows as JSONL",
            )
        raise _make_error(path, make_printable(last))


def _parse_child_line(line: bytes) -> dict[str, Any] | str:
    """Parse a line that `_format_row` wrote."""
    cells, whys = json.loads(line)
    if cells is None:
        return str(whys)
    return {name: NoText(value, whys[name]) if name in whys else value for name, value in cells.items()}


def _make_error(path: Path, why: str) -> SpecError:
    return SpecError(
        f"the data cannot be read: {why}",
        where=str(path),
        rule="JSONL, JSON, CSV, TSV, parquet, or the folder of a Hugging Face data set",
        way_out="check the path; paths in a job are relative to the job file",
    )


def _find_files(path: Path) -> list[Path]:
    """The parquet or arrow files of a folder; a data set with splits gives its training split."""
    if path.is_file():
        return [path]
    if (path / "dataset_dict.json").is_file():
        splits = _read_names(path / "dataset_dict.json", "splits")
        path = path / next((split for split in SPLITS if split in splits), splits[0])
    if (path / "state.json").is_file():
        return [path / name for name in _read_names(path / "state.json", "_data_files")]
    files = sorted(path.rglob("*.parquet"))
    chosen = [file for file in files if file.name.startswith("train")] or files
    if not chosen:
        raise SystemExit("the folder has neither state.json nor parquet files")
    return chosen


def _read_names(file: Path, key: str) -> list[str]:
    """File names listed in a data set's metadata file. A name with a path is refused: it could leave the folder."""
    try:
        content = read_json(file, file.name, limit=MAX_LIST_BYTES)
    except SpecError as error:
        raise SystemExit(error.what) from None
    parts = content.get(key) if isinstance(content, dict) else None
    if not isinstance(parts, list) or not parts:
        raise SystemExit(f"{file.name} names no {key}")
    names: list[str] = []
    for part in parts:
        name = part.get("filename") if isinstance(part, dict) else part
        if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set("/\\\0"):
            raise SystemExit(f"{file.name}: {key} names {shorten_value(name)}, which is not a plain file name")
        names.append(name)
    return names


def _check_offsets(table: Any) -> None:
    """Check a table's offsets, which pyarrow otherwise follows unchecked. Raises: pyarrow.ArrowInvalid."""
    import pyarrow as pa

    for column in table.columns:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            if "UTF8" not in str(error):  # UTF-8 is checked last, and `_format_rows` reports it per row
                raise


def _format_rows(table: Any, image_column: str | None) -> Iterator[str]:
    """A table's rows as JSON lines; a row with invalid UTF-8 becomes a fault."""
    for index in range(table.num_rows):
        try:
            yield _format_row(table.slice(index, 1).to_pylist()[0], image_column)
        except UnicodeDecodeError:
            yield json.dumps([None, NOT_UTF8])


def _format_row(row: dict[str, Any], image_column: str | None) -> str:
    """One row as JSON: [cells, types that JSON cannot represent by column]."""
    whys: dict[str, str] = {}
    cells = (
        f"{json.dumps(name)}: {_format_cell(name, value, whys, is_image=name == image_column)}"
        for name, value in row.items()
    )
    return f"[{{{', '.join(cells)}}}, {json.dumps(whys)}]"


def _format_cell(name: str, value: Any, whys: dict[str, str], *, is_image: bool) -> str:
    def convert(part: Any) -> str | None:
        if isinstance(part, bytes) and is_image:
            return base64.b64encode(part).decode()
        if isinstance(part, bytes):
            try:
                return part.decode("utf-8")
            except UnicodeDecodeError:
                whys[name] = "bytes that are not UTF-8 text"
                return None
        whys[name] = f"a {type(part).__name__}"
        return str(part)

    return json.dumps(value, default=convert)


def print_rows(path: Path, image_column: str | None = None, left_out: str = "") -> None:
    """Print the rows of a parquet or arrow table as JSON lines. Raises: SystemExit with the table's fault.

    left_out: see `read_table`.
    """
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # other pools map a gigabyte ahead, over the memory limit
    import pyarrow as pa
    import pyarrow.parquet

    files = _find_files(path)
    if missing := [file.name for file in files if not file.is_file()]:
        raise SystemExit(f"{missing[0]} is not a file")
    stored = sum(file.stat().st_size for file in files)
    left = min(MAX_DATA_BYTES, max(MIN_UNPACKED_BYTES, MAX_RATIO * stored))
    pa.set_cpu_count(1)  # each thread maps its own memory, which counts against the limit
    # arrow files are mapped whole, so the largest one counts on top
    enter_containment(Budget(memory_bytes=MORE_BYTES + max(file.stat().st_size for file in files)))
    for file in files:
        try:
            if file.suffix == ".parquet":
                # The footer's strings are bounded, because a forged length would allocate gigabytes.
                source = pa.parquet.ParquetFile(file, thrift_string_size_limit=1 << 24)
                names = [name for name in source.schema_arrow.names if not (left_out and re.fullmatch(left_out, name))]
                tables = iter(source.iter_batches(BATCH_ROWS, columns=names, use_threads=False))
            else:
                tables = iter(pa.ipc.open_stream(pa.memory_map(str(file))))
            for table in tables:
                _check_offsets(table)
                for line in _format_rows(table, image_column):
                    left -= len(line)
                    if left < 0:
                        raise SystemExit(f"{file.name}: its rows take more than {MAX_RATIO} times the file's bytes")
                    print(line)
        except UnicodeDecodeError:
            raise SystemExit(f"{file.name}: a column's name is not UTF-8") from None
        except (pa.ArrowException, OSError, MemoryError) as error:
            raise SystemExit(f"{file.name}: {str(error)[:200] or 'its rows take too much memory'}") from None


if __name__ == "__main__":
    print_rows(Path(sys.argv[1]), sys.argv[2] or None, sys.argv[3])
