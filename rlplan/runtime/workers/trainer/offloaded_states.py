"""OffloadedStates: storages of tensors that leave memory for a file and come back, bit for bit, into the same tensors.

In: storages. Out: the same storages, empty, then full again. Left out: which tensors (trained_states.py).

The file has no name from the moment it is made, so nothing stays behind however the process ends. It lies where
temporary files lie (TMPDIR); on a file system in memory it would free nothing. On a CPU host this is what frees memory:
there is no other memory to go to. From a GPU storages go to pinned memory of the host, or through it to the file; that
has not run on a GPU yet. What was never written to is not offloaded: it would come back as memory that is held.
DeepSpeed's own `offload_states` is not used: it knows stages 1 to 3 alone, in ZeRO-3 only beside its own optimizers,
and what it moves has other addresses afterwards.
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
"""What is written or read in one call; the system takes less than 2 GiB at a time."""
MAPPED_BYTES = 1 << 20
"""Storages from here on come back as memory that is mapped anew and without pages until written to (emit/ray.py)."""


class OffloadedStates:
    """Offloads a set of storages at a time."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._copies: list[torch.Tensor] = []
        self._lengths: list[int] = []
        self._sizes: list[tuple[torch.UntypedStorage, int]] = []

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self._sizes)

    def offload(self, storages: Sequence[torch.UntypedStorage], *, in_memory: bool = False) -> None:
        """Write the storages to the file, or copy them to the host's memory, and empty them.

        Raises: RunError when the disk is full.
        """
        assert not self._sizes, "offloaded already"
        if in_memory:
            self._copies = [_copy_of(storage) for storage in storages]
        else:
            self._write_all(storages)
        self._sizes = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)
        give_memory_back()  # small storages lie in the heap, which keeps what is freed

    def _write_all(self, storages: Sequence[torch.UntypedStorage]) -> None:
        self._lengths = [_length_of(storage) for storage in storages]
        way_out = "name another folder with TMPDIR, or take placement.offload=none"
        try:
            with writing_file(Path(tempfile.gettempdir()), sum(self._lengths), way_out):
                self._file, path = tempfile.mkstemp(prefix="rlplan-offloaded-")
                Path(path).unlink()
                for storage, length in zip(storages, self._lengths, strict=True):
                    _write(self._file, _bytes_of(_on_host(storage))[:length])
        except BaseException:
            self._forget()
            raise

    def bring_back(self) -> None:
        """Fill the storages again; nothing where nothing is offloaded."""
        if self._file is not None:
            os.lseek(self._file, 0, os.SEEK_SET)
        for index, (storage, size) in enumerate(self._sizes):
            storage.resize_(size)
            if self._file is None:
                _whole(storage).copy_(self._copies[index])
            else:
                _read_into(storage, self._file, self._lengths[index])
        self._forget()

    def _forget(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file, self._sizes, self._copies, self._lengths = None, [], [], []


def _whole(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copy_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The same bytes in the host's memory; pinned where they come from a GPU, so that it can fetch them itself."""
    device, size = device_of(storage.device), storage.nbytes()
    copy = device.pinned(size) if device else torch.empty(size, dtype=torch.uint8)
    return copy.copy_(_whole(storage))


def _on_host(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return storage if storage.device.type == "cpu" else _copy_of(storage).untyped_storage()


def _length_of(storage: torch.UntypedStorage) -> int:
    """Bytes of a storage up to the last one that was ever written to."""
    num_bytes: int = storage.nbytes()
    if storage.device.type != "cpu" or num_bytes < MAPPED_BYTES:
        return num_bytes
    return touched_length(storage.data_ptr(), num_bytes)


def _read_into(storage: torch.UntypedStorage, descriptor: int, num_bytes: int) -> None:
    if storage.device.type == "cpu":
        _read(descriptor, _bytes_of(storage)[:num_bytes])
        return
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8)
    _read(descriptor, _bytes_of(copy.untyped_storage()))
    _whole(storage).copy_(copy)


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    """A storage's bytes in place. Not through numpy, which would forbid to resize the storage."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def _write(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data[:CHUNK_BYTES]) :]


def _read(descriptor: int, data: memoryview) -> None:
    while data:
        count = os.readv(descriptor, [data[:CHUNK_BYTES]])
        if not count:
            raise RunError(
                "offloaded states are shorter than when they were written",
                where="offloaded states",
                rule="the file must hold what was written",
                way_out="look at the disk that holds temporary files",
            )
        data = data[count:]
