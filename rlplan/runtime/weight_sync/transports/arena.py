"""The file behind shared memory: one or more pages of counters and headers, then the arena.

In: a path and packets. Out: the mapped file. Counters are aligned words of 8 bytes, written by one side only and read
by the other. Left out: torch (both sides of every host-local transport share these pages).

Words: 0 the last update that failed; 1 packets published; 2 and on, for each reader, packets read; from 64 on the
process ids of the sender and the readers; from 128 on the packets' headers, 8 words each. Counts run on over updates:
update `serial` of n packets begins at serial * n. The kernel tells a waiting side that the other side has ended.
Assumes: a processor that keeps the order of stores (x86; on ARM the interpreter's own locks order them in practice).
"""

import contextlib
import mmap
import os
import select
from collections.abc import Sequence
from pathlib import Path

from rlplan.memory.weight_sync.packets import Packet
from rlplan.runtime.run_folder.disk_errors import writing_file
from rlplan.units import round_up

SHARED_FOLDER = "/dev/shm"
FAILED, PUBLISHED, FIRST_READER, FIRST_PID, FIRST_HEADER = 0, 1, 2, 64, 128
MAX_READERS = FIRST_PID - FIRST_READER
SENDER = 0
"""A side of the arena; reader n is side n + 1."""
HEADER_STRIDE = 8


def control_bytes(packets: Sequence[Packet]) -> int:
    return round_up(8 * (FIRST_HEADER + HEADER_STRIDE * len(packets)), mmap.PAGESIZE)


def create_arena(path: str, num_bytes: int) -> None:
    """Make the shared file with all its pages. Raises: RunError when /dev/shm has too little room."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with writing_file(Path(path), num_bytes, "lower placement.sync_bucket"):
            os.posix_fallocate(descriptor, 0, num_bytes)
    except BaseException:
        Path(path).unlink()
        raise
    finally:
        os.close(descriptor)


class ControlPage:
    """A mapped shared file and the counters at its beginning. side: whose this is."""

    def __init__(self, path: str, num_packets: int, side: int) -> None:
        descriptor = os.open(path, os.O_RDWR)
        try:
            self.map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)
        self.num_packets, self.is_closed = num_packets, False
        self._words = memoryview(self.map).cast("q")
        self._words[FIRST_PID + side] = os.getpid()
        self._processes: dict[int, int] = {}

    def encode_count(self, serial: int, num_packets: int) -> int:
        """What a counter shows when so many packets of an update are done."""
        return serial * self.num_packets + num_packets

    def has_failed(self, serial: int) -> bool:
        return self._words[FAILED] >= serial

    def fail(self, serial: int) -> None:
        self._words[FAILED] = max(self._words[FAILED], serial)

    def publish(self, serial: int, index: int, header: Sequence[int]) -> None:
        first = FIRST_HEADER + HEADER_STRIDE * index
        for position, word in enumerate(header):
            self._words[first + position] = word
        self._words[PUBLISHED] = self.encode_count(serial, index + 1)

    def header(self, index: int) -> list[int]:
        first = FIRST_HEADER + HEADER_STRIDE * index
        return list(self._words[first : first + HEADER_STRIDE])

    def is_published(self, serial: int, index: int) -> bool:
        return self._words[PUBLISHED] >= self.encode_count(serial, index + 1)

    def read(self, serial: int, reader: int, num_packets: int) -> None:
        """This reader is done with the first `num_packets`."""
        self._words[FIRST_READER + reader] = self.encode_count(serial, num_packets)

    def num_read_by_all(self, serial: int, num_readers: int) -> int:
        """Packets of the update that every reader is done with; negative while one is still in an earlier update."""
        done = min(self._words[FIRST_READER : FIRST_READER + num_readers])
        return done - self.encode_count(serial, 0)

    def gone(self, sides: Sequence[int]) -> int | None:
        """The process id of one of these sides that has ended; None while all are there or not yet there."""
        poll = select.poll()
        for side in sides:
            pid = self._words[FIRST_PID + side]
            if pid and side not in self._processes:
                try:
                    self._processes[side] = os.pidfd_open(pid)
                except ProcessLookupError:
                    return pid
            if side in self._processes:
                poll.register(self._processes[side], select.POLLIN)
        ended = {descriptor for descriptor, _ in poll.poll(0)}
        return next((self._words[FIRST_PID + side] for side in sides if self._processes.get(side) in ended), None)

    def close(self) -> None:
        """Unmap, once; where tensors over the map are still held, as soon as they are gone."""
        if not self.is_closed:
            self.is_closed = True
            while self._processes:
                os.close(self._processes.popitem()[1])
            self._words.release()
            with contextlib.suppress(BufferError):
                self.map.close()
