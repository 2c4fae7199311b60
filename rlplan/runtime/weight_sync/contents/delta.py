"""Delta content: sends only the elements that have changed since the last update.

In: a packet's weights and a copy of the previously sent ones. Out: bytes; on the other side the same copy, updated bit
for bit. Copies lie on the host, where deltas are encoded, also for channels through GPU memory. Elements are compared
as integers of 16 or 32 bits, so that NaN and -0.0 need no special treatment.

A payload is a table with one 8-byte word per chunk (at most 2^20 elements of one tensor), then the chunks' bodies.
A chunk uses the shortest of three encodings. GAPS: the new elements, then one byte each with the distance to the
previous one; distances over 255 are bridged by unchanged elements. BITS: a bit mask and the new elements. ALL: every
element. If the payload would be longer than the packet, the full packet is sent.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from rlplan.memory.weight_sync.packets import Bucket, BucketEntry, Packet, name_layer
from rlplan.runtime.weight_sync.channel import Encoding
from rlplan.runtime.weight_sync.contents.full import fill, match_entries, view
from rlplan.units import round_up

CHUNK = 1 << 20
_WORDS = {2: torch.int16, 4: torch.int32}
_WORD = 8
_LONGEST_GAP = 255


class _Coding(IntEnum):
    """Encoding of a chunk."""

    UNCHANGED = 0
    GAPS = 1
    BITS = 2
    ALL = 3


@dataclass(frozen=True, slots=True)
class _Body:
    """An encoded chunk. count: elements that are sent."""

    coding: _Coding
    count: int
    parts: tuple[Any, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(round_up(part.nbytes, _WORD) for part in self.parts)


class SentWeights:
    """The weights as last sent, in packet layout. serial: the serial of that update; 0 while the state is unknown."""

    def __init__(self, packets: Sequence[Packet], dtype: torch.dtype) -> None:
        self.packets, self.dtype, self.serial = packets, dtype, 0
        self.copies = [torch.zeros(packet.bucket.num_bytes, dtype=torch.uint8) for packet in packets]
        self.num_bytes = sum(copy.numel() for copy in self.copies)

    def put(self, index: int, buffer: torch.Tensor, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Store a packet's weights, and copy all of them into the buffer."""
        fill(self.copies[index], self.packets[index].bucket, tensors, self.dtype)
        buffer.copy_(self.copies[index])

    def encode(
        self, index: int, buffer: torch.Tensor, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> tuple[Encoding, int]:
        """Write the differences to the copy into the buffer, and update the copy.

        Returns: the packet's encoding, and its size, a multiple of 64 bytes.
        """
        bucket, copy = self.packets[index].bucket, self.copies[index]
        coded = buffer if buffer.is_cpu else torch.empty(buffer.numel(), dtype=torch.uint8)  # numpy writes on the host
        table, end = [], _table_bytes(bucket)
        for (entry, part), new in zip(_chunks(bucket), _new_words(bucket, tensors, self.dtype), strict=True):
            old = _old_words(copy, entry, self.dtype, part)
            body = _encode_chunk(new, old)
            table.append(body.count << 2 | body.coding)
            if end + body.num_bytes <= buffer.numel():
                _write(coded, end, body.parts)
            end += body.num_bytes
            if body.count:  # the copy must equal what the readers hold, also if the full packet is sent below
                old[:] = new
        if round_up(end, 64) > buffer.numel():
            buffer.copy_(copy)
            return Encoding.FULL, buffer.numel()
        size = round_up(end, 64)
        _write(coded, 0, (np.array(table, dtype=np.int64),))
        coded[end:size] = 0
        if coded is not buffer:
            buffer[:size].copy_(coded[:size])
        return Encoding.DELTA, size

    def take(self, index: int, payload: torch.Tensor) -> None:
        """Store a full packet."""
        self.copies[index].copy_(payload)

    def apply(self, index: int, payload: torch.Tensor) -> list[BucketEntry]:
        """Apply a delta to the copy. Returns: all tensors of every layer that has changes."""
        bucket, data = self.packets[index].bucket, payload.cpu().numpy()
        chunks = list(_chunks(bucket))
        table = data[: _WORD * len(chunks)].view(np.int64)
        end, touched = _table_bytes(bucket), set()
        for (entry, part), word in zip(chunks, table.tolist(), strict=True):
            if word:
                touched.add(name_layer(entry.name))
                end = _decode(
                    data, end, _Coding(word & 3), word >> 2, _old_words(self.copies[index], entry, self.dtype, part)
                )
        return [entry for entry in bucket.entries if name_layer(entry.name) in touched]


def _table_bytes(bucket: Bucket) -> int:
    return round_up(_WORD * sum(1 for _ in _chunks(bucket)), 64)


def _chunks(bucket: Bucket) -> Iterator[tuple[BucketEntry, slice]]:
    for entry in bucket.entries:
        numel = torch.Size(entry.shape).numel()
        for first in range(0, numel, CHUNK):
            yield entry, slice(first, min(numel, first + CHUNK))


def _new_words(bucket: Bucket, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Iterator[Any]:
    for _, tensor in match_entries(bucket, tensors):
        flat = tensor.reshape(-1)
        for first in range(0, flat.numel(), CHUNK):
            part = flat[first : first + CHUNK].to(device="cpu", dtype=dtype)
            yield part.contiguous().view(_WORDS[dtype.itemsize]).numpy()


def _old_words(copy: torch.Tensor, entry: BucketEntry, dtype: torch.dtype, part: slice) -> Any:
    return view(copy, entry, dtype).reshape(-1)[part].view(_WORDS[dtype.itemsize]).numpy()


def _encode_chunk(new: Any, old: Any) -> _Body:
    mask = new != old
    count = int(np.count_nonzero(mask))
    if not count:
        return _Body(_Coding.UNCHANGED, 0)
    if count * 2 >= new.size:  # each gap adds at least one byte per sent element, the bit mask an eighth per element
        return _Body(_Coding.ALL, new.size, (new,))
    places = np.flatnonzero(mask)
    gaps = _short_gaps(places)
    by_gaps = _Body(_Coding.GAPS, gaps.size, (new[np.cumsum(gaps, dtype=np.int64) - 1], gaps))
    if by_gaps.num_bytes <= round_up(count * new.itemsize, _WORD) + new.size // 8:
        return by_gaps
    return min(
        (_Body(_Coding.BITS, count, (new[places], np.packbits(mask))), _Body(_Coding.ALL, new.size, (new,))),
        key=lambda body: body.num_bytes,
    )


def _short_gaps(places: Any) -> Any:
    """Distance of each place to the previous one (the first: to -1), with steps of 255 for longer distances."""
    gaps = np.diff(places, prepend=-1)
    extra = (gaps - 1) // _LONGEST_GAP
    steps = np.full(places.size + int(extra.sum()), _LONGEST_GAP, dtype=np.uint8)
    steps[np.cumsum(extra + 1) - 1] = gaps - _LONGEST_GAP * extra
    return steps


def _write(coded: torch.Tensor, start: int, parts: Iterable[Any]) -> None:
    data = coded.numpy()
    for part in parts:
        size = part.nbytes
        data[start : start + size] = part.view(np.uint8)
        data[start + size : start + round_up(size, _WORD)] = 0
        start += round_up(size, _WORD)


def _decode(data: Any, start: int, coding: _Coding, count: int, old: Any) -> int:
    """Apply a chunk's body to the old elements. Returns: the start of the next body."""
    size = count * old.itemsize
    values = data[start : start + size].view(old.dtype)
    start += round_up(size, _WORD)
    if coding is _Coding.ALL:
        old[:] = values
    elif coding is _Coding.GAPS:
        old[np.cumsum(data[start : start + count], dtype=np.int64) - 1] = values
        start += round_up(count, _WORD)
    else:
        size = -(-old.size // 8)
        old[np.unpackbits(data[start : start + size], count=old.size).view(bool)] = values
        start += round_up(size, _WORD)
    return start
