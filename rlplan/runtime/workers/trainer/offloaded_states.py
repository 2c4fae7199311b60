"""OffloadedStates: tensor storages that are offloaded to a file or to host memory and reloaded bit for bit in place.

In: storages. Out: the same storages, empty, then full again. Left out: which tensors (trained_states.py).

The file is unlinked right after its creation, so nothing remains however the process ends. It is created in TMPDIR,
which must be on a disk: in a tmpfs, offloading would free no memory. A CPU host can only offload to disk. Storages on a
GPU move to pinned host memory, or through it to the file; this has not run on a GPU yet. Pages that were never written
are not offloaded, because reloading would allocate them.
DeepSpeed's own `offload_states` is not used. It supports only stages 1 to 3, and stage 3 only with DeepSpeed's own
optimizers; it also changes the addresses of tensors.
"""

import ctypes
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from rlplan.errors import RunError
from rlplan.runtime.device.layer import device_of
from rlplan.runtime.measure.memory_meter import give_memory_back, touched_length
from rlplan.runtime.run_folder.disk_errors import writing_file

CHUNK_BYTES = 1 << 28
"""Bytes per read or write call; Linux transfers less than 2 GiB per call."""
MAPPED_BYTES = 1 << 20
"""Storages of at least this size are freshly mapped by malloc, so they have no pages until written (emit/ray.py)."""


class OffloadedStates:
    """Offloads one set of storages at a time."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._copies: list[torch.Tensor] = []
        self._lengths: list[int] = []
        self._sizes: list[tuple[torch.UntypedStorage, int]] = []

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self._sizes)

    def offload(self, storages: Sequence[torch.UntypedStorage], *, in_memory: bool = False) -> None:
        """Write the storages to a file, or copy them to host memory, and empty them.

        Raises: RunError when the disk is full.
        """
        assert not self._sizes, "states are already offloaded"
        if in_memory:
            self._copies = [_copy_to_host(storage) for storage in storages]
        else:
            self._write_all(storages)
        self._sizes = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)
        give_memory_back()  # small storages lie in the heap, which keeps freed memory

    def _write_all(self, storages: Sequence[torch.UntypedStorage]) -> None:
        self._lengths = [_count_used_bytes(storage) for storage in storages]
        way_out = "set TMPDIR to another folder, or use placement.offload=none"
        try:
            with writing_file(Path(tempfile.gettempdir()), sum(self._lengths), way_out):
                self._file, path = tempfile.mkstemp(prefix="rlplan-offloaded-")
                Path(path).unlink()  # the system frees the file when its descriptor is closed
                for storage, length in zip(storages, self._lengths, strict=True):
                    _write(self._file, _view_memory(_ensure_on_host(storage))[:length])
        except BaseException:
            self._forget()
            raise

    def reload(self) -> None:
        """Fill the storages again; no effect if nothing is offloaded."""
        if self._file is not None:
            os.lseek(self._file, 0, os.SEEK_SET)
        for index, (storage, size) in enumerate(self._sizes):
            storage.resize_(size)
            if self._file is None:
                _view_storage(storage).copy_(self._copies[index])
            else:
                _read_into(storage, self._file, self._lengths[index])
        self._forget()

    def _forget(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file, self._sizes, self._copies, self._lengths = None, [], [], []


def _view_storage(storage: torch.UntypedStorage) -> torch.Tensor:
    """View of a storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copy_to_host(storage: torch.UntypedStorage) -> torch.Tensor:
    """Copy of a storage in host memory; pinned for storages on a GPU, so that the GPU can read it directly."""
    device, size = device_of(storage.device), storage.nbytes()
    copy = device.pinned(size) if device else torch.empty(size, dtype=torch.uint8)
    return copy.copy_(_view_storage(storage))


def _ensure_on_host(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return storage if storage.device.type == "cpu" else _copy_to_host(storage).untyped_storage()


def _count_used_bytes(storage: torch.UntypedStorage) -> int:
    """Bytes of a storage up to the last page that was ever written."""
    num_bytes: int = storage.nbytes()
    if storage.device.type != "cpu" or num_bytes < MAPPED_BYTES:
        return num_bytes
    return touched_length(storage.data_ptr(), num_bytes)


def _read_into(storage: torch.UntypedStorage, descriptor: int, num_bytes: int) -> None:
    if storage.device.type == "cpu":
        _read(descriptor, _view_memory(storage)[:num_bytes])
        return
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8)
    _read(descriptor, _view_memory(copy.untyped_storage()))
    _view_storage(storage).copy_(copy)


def _view_memory(storage: torch.UntypedStorage) -> memoryview:
    """View of a storage's memory. A numpy view would forbid resizing the storage."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def _write(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data[:CHUNK_BYTES]) :]


def _read(descriptor: int, data: memoryview) -> None:
    while data:
        count = os.readv(descriptor, [data[:CHUNK_BYTES]])
        if not count:
            raise RunError(
                f"the file of offloaded states ends {len(data)} bytes too early",
                where="offloaded states",
                rule="the file holds everything that was written to it",
                way_out="check the disk that holds temporary files (TMPDIR)",
            )
        data = data[count:]
