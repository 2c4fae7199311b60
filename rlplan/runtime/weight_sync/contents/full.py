"""Full content: every weight of a packet, each in its place.

In: a trainer's weights. Out: a packet's bytes; and on the other side views of them, named. This form, in which each
tensor starts on a cache line, is also what deltas are taken between.
"""

from collections.abc import Iterable, Iterator

import torch

from rlplan.memory.weight_sync.buckets import Bucket, BucketEntry


def fill(buffer: torch.Tensor, bucket: Bucket, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> None:
    """Copy a bucket's tensors to their places. Raises: KeyError where the two differ in names or order."""
    for entry, tensor in match_entries(bucket, tensors):
        view(buffer, entry, dtype).copy_(tensor)


def match_entries(
    bucket: Bucket, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[BucketEntry, torch.Tensor]]:
    """(entry, tensor) of a bucket. Raises: KeyError where the two differ in names, shapes or order."""
    for entry, (name, tensor) in zip(bucket.entries, tensors, strict=True):
        if name != entry.name or tuple(tensor.shape) != entry.shape:
            raise KeyError(f"{name} {tuple(tensor.shape)} came where {entry.name} {entry.shape} was due")
        yield entry, tensor


def view_entries(
    buffer: torch.Tensor, entries: Iterable[BucketEntry], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, view) of each entry."""
    for entry in entries:
        yield entry.name, view(buffer, entry, dtype)


def view(buffer: torch.Tensor, entry: BucketEntry, dtype: torch.dtype) -> torch.Tensor:
    num_bytes = torch.Size(entry.shape).numel() * dtype.itemsize
    return buffer[entry.offset : entry.offset + num_bytes].view(dtype).view(entry.shape)
