"""Full content: all weights of a packet, each at its offset.

In: a trainer's weights. Out: a packet's bytes; on the other side named views of them. Tensors start on cache lines.
Deltas are computed between packets of this layout.
"""

from collections.abc import Iterable, Iterator

import torch

from rlplan.memory.weight_sync.packets import Bucket, BucketEntry


def fill(buffer: torch.Tensor, bucket: Bucket, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> None:
    """Copy a bucket's tensors to their offsets. Raises: KeyError where names or order differ from the bucket's."""
    for entry, tensor in match_entries(bucket, tensors):
        view(buffer, entry, dtype).copy_(tensor)


def match_entries(
    bucket: Bucket, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[BucketEntry, torch.Tensor]]:
    """Yield (entry, tensor) of a bucket. Raises: KeyError where names, shapes or order differ from the bucket's."""
    for entry, (name, tensor) in zip(bucket.entries, tensors, strict=True):
        if name != entry.name or tuple(tensor.shape) != entry.shape:
            raise KeyError(f"got {name} {tuple(tensor.shape)}, expected {entry.name} {entry.shape}")
        yield entry, tensor


def view_entries(
    buffer: torch.Tensor, entries: Iterable[BucketEntry], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, view) of each entry."""
    for entry in entries:
        yield entry.name, view(buffer, entry, dtype)


def view(buffer: torch.Tensor, entry: BucketEntry, dtype: torch.dtype) -> torch.Tensor:
    num_bytes = torch.Size(entry.shape).numel() * dtype.itemsize
    return buffer[entry.offset : entry.offset + num_bytes].view(dtype).view(entry.shape)
