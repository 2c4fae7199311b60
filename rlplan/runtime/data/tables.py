"""Tables: rows of a file or a local Hugging Face data set, one dictionary each.

In: JSONL, JSON, parquet, or a folder (`save_to_disk`, or parquet files as the Hub has them). Out: rows with numbers.
Run as a process of its own where pyarrow is needed, so that the driver does not hold it: it prints rows as JSON lines.
Left out: the network; a data set is downloaded before.
"""

import codecs
import json
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlplan.errors import HostError, SpecError
from rlplan.runtime.data.layouts import NoText, printable
from rlplan.runtime.processes.safe_path import module_command
from rlplan.spec.base import read_json, shorten

MAX_DATA_BYTES = 1 << 30
TIMEOUT_S = 600.0
NOT_UTF8 = "the row is not UTF-8"
MAX_LIST_BYTES = 1 << 26
"""Of a data set's list of its own files."""
SPLITS = ("train", "test", "validation")


def read_table(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """(number from 1, the row or what is wrong with it). Raises: SpecError, HostError when nothing can be read."""
    if _is_folder(path) or path.suffix in (".parquet", ".arrow"):
        yield from _from_child(path)
    elif path.suffix == ".json":
        try:
            rows = _value(_bytes(path), "the file")
        except UnreadableTextError as error:
            raise _unreadable(path, str(error)) from None
        if not isinstance(rows, list):
            raise _unreadable(path, "the file is no list of rows")
        for number, row in enumerate(rows, 1):
            yield number, _row(row, "the item")
    else:
        for number, line in enumerate(_bytes(path).splitlines(), 1):
            if line.strip():
                yield number, _parsed(line)


def _is_folder(path: Path) -> bool:
    """Raises: SpecError for what is neither a folder nor a file: a pipe or a device may have no end."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise _unreadable(path, str(error.strerror)) from None
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise _unreadable(path, "it is neither a file nor a folder")
    return stat.S_ISDIR(mode)


def _bytes(path: Path) -> bytes:
    """What a file holds, without the mark that some editors begin UTF-8 with."""
    try:
        if path.stat().st_size > MAX_DATA_BYTES:
            raise _unreadable(path, f"the file has more than {MAX_DATA_BYTES} bytes")
        return path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise _unreadable(path, str(error.strerror)) from None


class UnreadableTextError(ValueError):
    """A text holds no JSON; says why."""


class _Doubled(dict[str, Any]):
    """An object in which a key stands twice; of the two nobody knows which is meant."""

    key = ""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    doubled = _Doubled(made)
    doubled.key = Counter(key for key, _ in pairs).most_common(1)[0][0]
    return doubled


def _row(value: Any, what: str) -> dict[str, Any] | str:
    """The value as a row, or why it is none."""
    if not isinstance(value, dict):
        return f"{what} is no JSON object"
    left: list[Any] = [value]
    while left:
        each = left.pop()
        if isinstance(each, _Doubled):
            return f"the key {shorten(each.key)} stands twice in one object"
        left.extend(each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
    return value


def _value(text: bytes, what: str) -> Any:
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError:
        raise UnreadableTextError(f"{what} is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise UnreadableTextError(f"{what} is not JSON ({str(error)[:80]})") from None


def _parsed(line: bytes) -> dict[str, Any] | str:
    try:
        return _row(_value(line, "the line"), "the line")
    except UnreadableTextError as error:
        return str(error)


def _from_child(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    command = module_command("rlplan.runtime.data.tables", str(path))
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise _unreadable(path, f"reading it took more than {TIMEOUT_S:.0f} s") from None
    if done.returncode:
        last = (done.stderr.decode("utf-8", "replace").strip().splitlines() or ["it ended without output"])[-1]
        if "No module named 'pyarrow'" in last:
            raise HostError(
                "parquet and arrow files need pyarrow",
                where=str(path),
                rule="pyarrow is installed",
                way_out="pip install pyarrow, or write the rows as JSONL",
            )
        raise _unreadable(path, printable(last))
    for number, line in enumerate(done.stdout.splitlines(), 1):
        yield number, _from_line(line)


def _from_line(line: bytes) -> dict[str, Any] | str:
    """What `_line` wrote."""
    cells, whys = json.loads(line)
    if cells is None:
        return str(whys)
    return {name: NoText(value, whys[name]) if name in whys else value for name, value in cells.items()}


def _unreadable(path: Path, why: str) -> SpecError:
    return SpecError(
        f"the data cannot be read: {why}",
        where=str(path),
        rule="JSONL, JSON, parquet, or the folder of a Hugging Face data set",
        way_out="check the path; paths in a job are relative to the job file",
    )


def _files(path: Path) -> list[Path]:
    """The parquet or arrow files of a folder; of a data set with splits the training one."""
    if path.is_file():
        return [path]
    if (path / "dataset_dict.json").is_file():
        splits = _names(path / "dataset_dict.json", "splits")
        path = path / next((split for split in SPLITS if split in splits), splits[0])
    if (path / "state.json").is_file():
        return [path / name for name in _names(path / "state.json", "_data_files")]
    files = sorted(path.rglob("*.parquet"))
    chosen = [file for file in files if file.name.startswith("train")] or files
    if not chosen:
        raise SystemExit("the folder has neither state.json nor parquet files")
    return chosen


def _names(file: Path, key: str) -> list[str]:
    """Names in a data set's own file of things that lie beside it: nothing there leads out of the folder."""
    try:
        found = read_json(file, file.name, limit=MAX_LIST_BYTES)
    except SpecError as error:
        raise SystemExit(error.what) from None
    parts = found.get(key) if isinstance(found, dict) else None
    if not isinstance(parts, list) or not parts:
        raise SystemExit(f"{file.name} names no {key}")
    names: list[str] = []
    for part in parts:
        name = part.get("filename") if isinstance(part, dict) else part
        if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set("/\\\0"):
            raise SystemExit(f"{file.name}: {key} names {shorten(name)}, which is no name of something beside it")
        names.append(name)
    return names


def _lines(table: Any) -> Iterator[str]:
    """A table's rows as JSON; one that holds bytes which are no text says so."""
    try:
        yield from (_line(row) for row in table.to_pylist())
    except UnicodeDecodeError:
        for index in range(table.num_rows):
            try:
                yield _line(table.slice(index, 1).to_pylist()[0])
            except UnicodeDecodeError:
                yield json.dumps([None, NOT_UTF8])


def _line(row: dict[str, Any]) -> str:
    """[the cells, by column what of them JSON does not know]."""
    whys: dict[str, str] = {}
    cells = (f"{json.dumps(name)}: {_cell(name, value, whys)}" for name, value in row.items())
    return f"[{{{', '.join(cells)}}}, {json.dumps(whys)}]"


def _cell(name: str, value: Any, whys: dict[str, str]) -> str:
    def known(part: Any) -> str | None:
        if isinstance(part, bytes):
            try:
                return part.decode("utf-8")
            except UnicodeDecodeError:
                whys[name] = "bytes that are no UTF-8 text"
                return None
        whys[name] = f"a {type(part).__name__}"
        return str(part)

    return json.dumps(value, default=known)


def main() -> None:
    """Print the rows of a table that pyarrow reads, as JSON lines."""
    import pyarrow as pa
    import pyarrow.parquet

    for file in _files(Path(sys.argv[1])):
        if not file.is_file():
            raise SystemExit(f"{file.name} is no file")
        try:
            if file.suffix == ".parquet":
                tables = (batch for batch in pa.parquet.ParquetFile(file).iter_batches(1024))
            else:
                tables = iter(pa.ipc.open_stream(pa.memory_map(str(file))))
            for table in tables:
                for line in _lines(table):
                    print(line)
        except (pa.ArrowException, OSError) as error:
            raise SystemExit(f"{file.name}: {str(error)[:200]}") from None


if __name__ == "__main__":
    main()
