"""Checksums: that what an engine was fed is what the trainer holds, tensor by tensor, whatever carried it there.

In: weights in any type, from any place. Out: 64 bits for each, of its elements in the engine's type. The trainer takes
them from its own weights, not from what it has copied, and the engine's side from what it feeds in, before vLLM packs
it: whatever is lost or changed in between shows.

Assumes: what goes wrong is a truncated, stale, torn or misplaced part. Words that change places within one MiB of a
tensor go unnoticed: a sum reads 28 GB/s on one core here, where zlib's CRC reads 3.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from rlplan.units import round_up

BYTES_AT_ONCE = 1 << 20
"""Summed up at a time; a tensor of another type, or off a word's boundary, passes through a buffer of that size."""

_WORD = 8

NamedTensors = Iterable[tuple[str, torch.Tensor]]


class Checksums:
    """Takes checksums of tensors in an element type; another type is converted, a piece at a time."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self._per_word = dtype, _WORD // dtype.itemsize
        self._piece = torch.empty(0, dtype=dtype)

    def compute(self, tensor: torch.Tensor) -> int:
        """64 bits over a tensor's elements, in order."""
        flat = tensor.detach().reshape(-1)
        return _digest([int(self._words(part).sum()) for part in self._pieces(flat)], flat.numel())

    def watch(self, tensors: NamedTensors, found: dict[str, int]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same tensors; each one's checksum is in `found` when it comes out."""
        for name, tensor in tensors:
            found[name] = self.compute(tensor)
            yield name, tensor

    def _pieces(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        size = BYTES_AT_ONCE // self.dtype.itemsize
        return (flat,) if flat.numel() <= size else flat.split(size)

    def _words(self, part: torch.Tensor) -> torch.Tensor:
        """A piece as words of 8 bytes, the last one filled up with zeros."""
        is_whole = part.numel() % self._per_word == 0 and part.storage_offset() % self._per_word == 0
        if part.dtype is self.dtype and is_whole:
            return part.view(torch.int64)
        if self._piece.device != part.device or not self._piece.numel():
            self._piece = torch.empty(BYTES_AT_ONCE // self.dtype.itemsize, dtype=self.dtype, device=part.device)
        words = self._piece[: round_up(part.numel(), self._per_word)]
        words[part.numel() :] = 0
        words[: part.numel()].copy_(part)
        return words.view(torch.int64)


def checksum_packet(sums: Mapping[str, int]) -> int:
    return _digest(list(sums.values()), len(sums))


def checksum_payload(payload: torch.Tensor) -> int:
    """Of a coded payload, in whole words."""
    return Checksums(torch.uint8).compute(payload)


def checksum_files(folder: str) -> dict[str, int]:
    """Of every tensor in a folder's safetensors files, by name, in its own type; a piece in memory at a time."""
    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            entries = json.loads(file.read(size))
            entries.pop("__metadata__", None)
            for name, entry in entries.items():
                begin, end = entry["data_offsets"]
                file.seek(8 + size + begin)
                parts = (file.read(min(BYTES_AT_ONCE, end - at)) for at in range(begin, end, BYTES_AT_ONCE))
                sums = [int(_whole_words(part).sum()) for part in parts]
                found[name] = _digest(sums or [0], torch.Size(entry["shape"]).numel())
    return found


def of_named(tensors: NamedTensors) -> dict[str, int]:
    """Of tensors by name, each in its own type: what `of_files` says of the same once they are written."""
    return {name: Checksums(tensor.dtype).compute(tensor) for name, tensor in tensors}


def _whole_words(part: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(part.ljust(round_up(len(part), _WORD), b"\0")), dtype=torch.int64)


def _digest(sums: Sequence[int], count: int) -> int:
    digest = hashlib.blake2b(struct.pack(f"<{len(sums)}q", *sums), digest_size=8, key=str(count).encode())
    return int.from_bytes(digest.digest(), "little", signed=True)
