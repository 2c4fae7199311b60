"""Segments: what torch's caching allocator reserves from the driver while tensors come and go in a known order.

In: sizes, taken and given back one after the other. Out: bytes reserved, and allocated, at most.
Left out: `expandable_segments`, streams, what happens when the device is full.

The rules. Sizes are rounded up to 512 bytes. Up to 1 MiB they lie in segments of their own, of 2 MiB. Each takes the
smallest free block that holds it and leaves the rest free (of a large one if that is more than 1 MiB); where no block
is large enough a segment is reserved: of 20 MiB for less than 10, else of the size rounded up to 2 MiB. A block that is
given back joins free neighbours of its segment, never of another. So one small tensor that stays in a large block makes
the next large one reserve a segment anew.
Source: torch 2.13 c10/cuda/CUDACachingAllocator.cpp (`get_free_block`, `alloc_block`, `should_split`, `free_block`).
"""

from bisect import bisect_left, insort

from rlplan.units import MIB, round_up

SMALLEST_BYTES = 512
SMALL_BYTES = MIB
"""The largest size that lies in the small segments (`kSmallSize`), and the largest rest that is not split off."""
SMALL_SEGMENT = 2 * MIB
MIDDLE_SEGMENT = 20 * MIB
MIDDLE_BYTES = 10 * MIB
"""From here on a segment is of the size that asked for it (`kMinLargeAlloc`)."""
SEGMENT_STEP = 2 * MIB


class Tensor:
    """The block of a segment that a tensor lies in, or a free one."""

    __slots__ = ("address", "after", "before", "is_free", "is_small", "size")

    def __init__(self, address: int, size: int, *, is_small: bool) -> None:
        self.address, self.size, self.is_small, self.is_free = address, size, is_small, False
        self.before: Tensor | None = None
        self.after: Tensor | None = None


class Segments:
    """The allocator of one device.

    goes_down: whether a later segment lies at a lower address. Of free blocks of one size the lowest address is taken,
    and where the driver puts segments is not known beforehand.
    """

    def __init__(self, *, goes_down: bool = False) -> None:
        self.reserved = 0
        """Bytes of all segments, which only grow."""
        self.allocated = 0
        """Bytes of the blocks in use."""
        self.peak_allocated = 0
        self._num_segments = 0
        self._step = -1 if goes_down else 1
        self._free: tuple[_Free, _Free] = ([], [])
        """Free blocks of large and of small segments."""

    def take(self, num_bytes: int) -> Tensor:
        """A tensor of so many bytes. Returns its block, which `give` takes back.

        >>> segments = Segments()
        >>> blocks = [segments.take(size * MIB) for size in (12, 6)]
        >>> segments.reserved // MIB, segments.peak_allocated // MIB  # 12 + 20
        (32, 18)
        """
        size = max(SMALLEST_BYTES, round_up(num_bytes, SMALLEST_BYTES))
        is_small = size <= SMALL_BYTES
        free = self._free[is_small]
        place = bisect_left(free, (size,))
        block = free.pop(place)[2] if place < len(free) else self._new_segment(size, is_small=is_small)
        block.is_free = False
        rest = block.size - size
        if rest > SMALL_BYTES or (is_small and rest):
            self._split(block, size, rest)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def give(self, *blocks: Tensor) -> None:
        """Give tensors back; their segments stay reserved.

        >>> segments = Segments()
        >>> segments.give(segments.take(100 * MIB))
        >>> small = segments.take(2 * MIB)  # lies in the block of 100 now
        >>> large = segments.take(100 * MIB)
        >>> segments.reserved // MIB
        200
        """
        for block in blocks:
            self.allocated -= block.size
            after, before = block.after, block.before
            if after is not None and after.is_free:
                self._remove(after)
                _join(block, after)
            if before is not None and before.is_free:
                self._remove(before)
                _join(before, block)
                block = before
            self._insert(block)

    def _new_segment(self, size: int, *, is_small: bool) -> Tensor:
        """Addresses are so far apart that no two blocks share one."""
        middle = MIDDLE_SEGMENT if size < MIDDLE_BYTES else round_up(size, SEGMENT_STEP)
        length = SMALL_SEGMENT if is_small else middle
        self._num_segments += 1
        self.reserved += length
        return Tensor(self._step * (self._num_segments << 48), length, is_small=is_small)

    def _split(self, block: Tensor, size: int, rest: int) -> None:
        block.size = size
        other = Tensor(block.address + size, rest, is_small=block.is_small)
        other.before, other.after = block, block.after
        if block.after is not None:
            block.after.before = other
        block.after = other
        self._insert(other)

    def _insert(self, block: Tensor) -> None:
        block.is_free = True
        insort(self._free[block.is_small], (block.size, block.address, block))

    def _remove(self, block: Tensor) -> None:
        free = self._free[block.is_small]
        del free[bisect_left(free, (block.size, block.address))]


_Free = list[tuple[int, int, Tensor]]
"""Blocks by size, then by address, which no two share."""


def _join(block: Tensor, after: Tensor) -> None:
    block.size += after.size
    block.after = after.after
    if after.after is not None:
        after.after.before = block
