"""ParkedStates: storages of tensors that leave memory for a file and come back, bit for bit, into the same tensors.

In: storages. Out: the same storages, empty, then full again. Left out: which tensors (trained_states.py).

The file has no name from the moment it is made, so nothing stays behind however the process ends. It lies where
temporary files lie (TMPDIR); on a file system in memory it would free nothing. On a CPU host this is what frees memory:
there is no other memory to go to. On CUDA DeepSpeed's own `offload_states` moves states to pinned memory; that path is
written against its API and has not run on a GPU yet.
"""

import ctypes
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from rlplan.errors import HostError, RunError

CHUNK_BYTES = 1 << 28
"""What is written or read in one call; the system takes less than 2 GiB at a time."""


class ParkedStates:
    """Parks a set of storages at a time."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._sizes: list[tuple[torch.UntypedStorage, int]] = []

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return sum(size for _, size in self._sizes)

    def park(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Write the storages to the file and empty them. Raises: HostError when the disk is full."""
        assert self._file is None, "parked already"
        self._file, path = tempfile.mkstemp(prefix="rlplan-parked-")
        Path(path).unlink()
        try:
            for storage in storages:
                _write(self._file, _bytes_of(storage))
        except OSError as error:
            self._forget()
            raise HostError(
                f"states cannot be parked: {error.strerror}",
                where=tempfile.gettempdir(),
                rule="placement.parks=disk writes a rank's states to a temporary file",
                way_out="make room there, name another folder with TMPDIR, or take placement.parks=none",
            ) from None
        self._sizes = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)
        ctypes.CDLL(None).malloc_trim(0)  # small storages lie in the heap, which keeps what is freed

    def bring_back(self) -> None:
        """Fill the storages again; nothing where nothing is parked."""
        if self._file is None:
            return
        os.lseek(self._file, 0, os.SEEK_SET)
        for storage, size in self._sizes:
            storage.resize_(size)
            _read(self._file, _bytes_of(storage))
        self._forget()

    def _forget(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file, self._sizes = None, []


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
                "a parked state is shorter than it was",
                where="parked states",
                rule="what is read is what was written",
                way_out="look at the disk that holds temporary files",
            )
        data = data[count:]
