"""Tensor files: safetensors, written from memory without a copy and read range by range. Nothing is unpickled.

In: names, element types and bytes of flat tensors. Out: a synced file with its size and SHA-256; or any range of a
tensor, read straight into the caller's memory. Left out: torch.
Source of the layout: safetensors 0.8, README "Format".
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlplan.errors import SpecError
from rlplan.reading import open_regular
from rlplan.runtime.checkpoints.manifest import StoredFile
from rlplan.runtime.run_folder.disk_errors import writing_file

CHUNK_BYTES = 1 << 24
"""Bytes that are hashed and written at a time."""

MAX_HEADER_BYTES = 1 << 28
ELEMENT_BYTES = {"F64": 8, "F32": 4, "I64": 8, "I32": 4, "U8": 1}


@dataclass(frozen=True, slots=True)
class Piece:
    """One flat tensor to write."""

    name: str
    dtype: str
    data: memoryview

    @property
    def numel(self) -> int:
        return self.data.nbytes // ELEMENT_BYTES[self.dtype]


def write(path: Path, pieces: Sequence[Piece]) -> StoredFile:
    """Write a new file and sync it; delete it if that fails. Raises: RunError."""
    digest, size = hashlib.sha256(), 0
    # O_EXCL: a name that exists belongs to another checkpoint
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with writing_file(path, sum(piece.data.nbytes for piece in pieces)):
            for data in _parts(pieces):
                for start in range(0, len(data), CHUNK_BYTES):
                    chunk = data[start : start + CHUNK_BYTES]
                    digest.update(chunk)
                    _write_all(descriptor, chunk)
                    size += len(chunk)
            os.fsync(descriptor)
    except BaseException:
        path.unlink()  # on a full disk, the run needs this space to go on
        raise
    finally:
        os.close(descriptor)
    return StoredFile(num_bytes=size, sha256=digest.hexdigest())


def compute_digest(path: Path) -> StoredFile:
    """Compute a file's size and SHA-256. Raises: OSError."""
    with path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, "sha256")
        return StoredFile(num_bytes=file.tell(), sha256=digest.hexdigest())


def _parts(pieces: Sequence[Piece]) -> Iterable[memoryview]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for piece in pieces:
        size = piece.data.nbytes
        header[piece.name] = {"dtype": piece.dtype, "shape": [piece.numel], "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # safetensors aligns the data to 8 bytes
    yield memoryview(len(text).to_bytes(8, "little") + text)
    yield from (piece.data.cast("B") for piece in pieces)


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Type, size and byte offset of a flat tensor in a file."""

    dtype: str
    numel: int
    offset: int


class TensorFile:
    """An open safetensors file, usable as a context manager. Raises: SpecError when it is not one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_regular(path, path.name) as file:
            self._descriptor = os.dup(file.fileno())  # `open_regular` closes its file after the block
        try:
            self.tensors = self._read_header(os.fstat(self._descriptor).st_size)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def read_into(self, name: str, start: int, target: memoryview) -> None:
        """Fill `target` with elements of a tensor from `start` on. Raises: SpecError when the tensor is too short."""
        stored = self.tensors[name]
        size = ELEMENT_BYTES[stored.dtype]
        if start * size + target.nbytes > stored.numel * size:
            raise self._wrong(f"tensor {name} has {stored.numel} elements")
        position, left = stored.offset + start * size, target.cast("B")
        while left:
            count = os.preadv(self._descriptor, [left[:CHUNK_BYTES]], position)
            if not count:
                raise self._wrong(f"the file ends inside tensor {name}")
            position, left = position + count, left[count:]

    def read(self, name: str) -> bytearray:
        stored = self.tensors[name]
        data = bytearray(stored.numel * ELEMENT_BYTES[stored.dtype])
        self.read_into(name, 0, memoryview(data))
        return data

    def _read_header(self, file_size: int) -> dict[str, StoredTensor]:
        length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        # 2 is the length of `{}`; the first 8 bytes hold the length itself
        if not 2 <= length <= min(file_size - 8, MAX_HEADER_BYTES):
            raise self._wrong("its header is longer than the file")
        try:
            header = json.loads(os.pread(self._descriptor, length, 8), object_pairs_hook=_refuse_duplicates)
            return dict(self._parse_entries(header, 8 + length, file_size))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._wrong(f"its header is not a safetensors header ({error})") from None

    def _parse_entries(
        self, header: Mapping[str, Any], begin: int, file_size: int
    ) -> Iterable[tuple[str, StoredTensor]]:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            first, last = (int(offset) for offset in entry["data_offsets"])
            (numel,) = (int(size) for size in entry["shape"])
            if last - first != numel * ELEMENT_BYTES[entry["dtype"]] or not 0 <= first <= last <= file_size - begin:
                raise ValueError(f"tensor {name} is not within the file")
            yield name, StoredTensor(entry["dtype"], numel, begin + first)

    def _wrong(self, what: str) -> SpecError:
        return SpecError(
            f"{self.path.name} cannot be read: {what}",
            where=str(self.path),
            rule="a complete safetensors file of flat tensors",
            way_out="resume from another checkpoint",
        )


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object whose keys all differ: two tensors with one name would be ambiguous."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a name occurs twice")
    return entries
