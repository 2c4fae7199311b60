"""The shared-memory transport: a file in /dev/shm that the trainer writes and the engine reads, bucket by bucket.

In: buckets and tensors. Out: tensors that are views of the shared pages: no copy on the reading side.
Left out: anything between hosts.
"""

import mmap
import os
from collections.abc import Iterator, Mapping

import torch

from rlplan.memory.transitions import Bucket


class _Arena:
    """A mapped shared file. The driver makes and removes the file; both sides only map it."""

    def __init__(self, path: str, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        descriptor = os.open(path, os.O_RDWR)
        try:
            self._map = mmap.mmap(descriptor, num_bytes)
        finally:
            os.close(descriptor)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of that shape that lies `offset` bytes into the arena."""
        numel = 1
        for size in shape:
            numel *= size
        return self.tensor[offset : offset + numel * dtype.itemsize].view(dtype).view(shape)

    def close(self) -> None:
        """Unmap, once. The views handed out must be gone."""
        if not self._map.closed:
            del self.tensor
            self._map.close()


class BucketWriter(_Arena):
    """The trainer's side."""

    def write(self, bucket: Bucket, parameters: Mapping[str, torch.Tensor]) -> None:
        """Copy the bucket's parameters to their offsets."""
        for entry in bucket.entries:
            source = parameters[entry.name]
            self.view(entry.offset, entry.shape, source.dtype).copy_(source)


class BucketReader(_Arena):
    """The engine's side."""

    def read(self, bucket: Bucket, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of every parameter in the bucket, as views that are valid until the next bucket is written."""
        for entry in bucket.entries:
            yield entry.name, self.view(entry.offset, entry.shape, dtype)
