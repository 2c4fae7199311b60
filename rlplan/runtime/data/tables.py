"""Tables: rows of a file or a local Hugging Face data set, one dictionary each.

In: JSONL, JSON, parquet, or a folder (`save_to_disk`, or parquet files as the Hub has them). Out: rows with numbers.
Run as a process of its own where pyarrow is needed, so that the driver does not hold it: it prints rows as JSON lines.
Left out: the network; a data set is downloaded before.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlplan.errors import HostError, SpecError

MAX_DATA_BYTES = 1 << 30
TIMEOUT_S = 600.0
NOT_UTF8 = "the row is not UTF-8"
SPLITS = ("train", "test", "validation")


def read_table(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """(number from 1, the row or what is wrong with it). Raises: SpecError, HostError when nothing can be read."""
    if path.is_dir() or path.suffix in (".parquet", ".arrow"):
        yield from _from_child(path)
    elif path.suffix == ".json":
        try:
            rows = _value(_bytes(path), "the file")
        except UnreadableTextError as error:
            raise _unreadable(path, str(error)) from None
        if not isinstance(rows, list):
            raise _unreadable(path, "the file is no list of rows")
        for number, row in enumerate(rows, 1):
            yield number, row if isinstance(row, dict) else "the item is no JSON object"
    else:
        for number, line in enumerate(_bytes(path).splitlines(), 1):
            if line.strip():
                yield number, _parsed(line)


def _bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_DATA_BYTES:
            raise _unreadable(path, f"the file has more than {MAX_DATA_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, str(error.strerror)) from None


class UnreadableTextError(ValueError):
    """A text holds no JSON; says why."""


def _value(text: bytes, what: str) -> Any:
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError:
        raise UnreadableTextError(f"{what} is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise UnreadableTextError(f"{what} is not JSON ({str(error)[:80]})") from None


def _parsed(line: bytes) -> dict[str, Any] | str:
    try:
        row = _value(line, "the line")
    except UnreadableTextError as error:
        return str(error)
    if row == NOT_UTF8:
        return NOT_UTF8
    return row if isinstance(row, dict) else "the line is no JSON object"


def _from_child(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    command = [sys.executable, "-m", "rlplan.runtime.data.tables", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise _unreadable(path, f"reading it took more than {TIMEOUT_S:.0f} s") from None
    if done.returncode:
        last = (done.stderr.decode("utf-8", "replace").strip().splitlines() or ["it ended without a word"])[-1]
        if "No module named 'pyarrow'" in last:
            raise HostError(
                "parquet and arrow files need pyarrow",
                where=str(path),
                rule="pyarrow is installed",
                way_out="pip install pyarrow, or write the rows as JSONL",
            )
        raise _unreadable(path, last[:300])
    for number, line in enumerate(done.stdout.splitlines(), 1):
        yield number, _parsed(line)


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
        splits = json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        path = path / next((split for split in SPLITS if split in splits), splits[0])
    if (path / "state.json").is_file():
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        return [path / part["filename"] for part in state["_data_files"]]
    files = sorted(path.rglob("*.parquet"))
    chosen = [file for file in files if file.name.startswith("train")] or files
    if not chosen:
        raise SystemExit("the folder has neither state.json nor parquet files")
    return chosen


def _lines(table: Any) -> Iterator[str]:
    """A table's rows as JSON; one that holds bytes which are no text is a JSON text that says so."""
    try:
        yield from (json.dumps(row, default=str) for row in table.to_pylist())
    except UnicodeDecodeError:
        for index in range(table.num_rows):
            try:
                yield json.dumps(table.slice(index, 1).to_pylist()[0], default=str)
            except UnicodeDecodeError:
                yield json.dumps(NOT_UTF8)


def main() -> None:
    """Print the rows of a table that pyarrow reads, as JSON lines."""
    import pyarrow as pa
    import pyarrow.parquet

    for file in _files(Path(sys.argv[1])):
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
