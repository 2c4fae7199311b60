"""The shared-memory file of a channel: pages with counters and headers, then the arena of packets.

In: a path and packets. Out: the mapped file. Counters are aligned 8-byte words, each written by one side and read by
the other. Left out: tensors over the packets, which each side makes from the map (shared_memory.py).

Word 0 holds the last failed update, word 1 the number of packets published. Words 2 to 63 hold the packets read by each
reader, and 64 to 127 the process ids of the sender and the readers. From word 128 on there are the packets' headers, 8
words each. Counters continue over updates: update `serial` of n packets starts at serial * n. A waiting side learns
from the kernel (pidfd) that the other side has ended.
Assumes: a processor that keeps the order of stores (x86; on ARM the interpreter's locks order them in practice).
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
"""Number of the sender's side; reader n has side n + 1."""
HEADER_STRIDE = 8


def control_bytes(packets: Sequence[Packet]) -> int:
    return round_up(8 * (FIRST_HEADER + HEADER_STRIDE * len(packets)), mmap.PAGESIZE)


def create_arena(path: str, num_bytes: int) -> None:
    """Create the shared file with all its pages. Raises: RunError when /dev/shm has too little space."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with writing_file(Path(path), num_bytes, "lower placement.sync_bucket"):
            os.posix_fallocate(
                descriptor, 0, num_bytes
            )  # a full /dev/shm would otherwise raise SIGBUS at a later write
    except BaseException:
        Path(path).unlink()
        raise
    finally:
        os.close(descriptor)


class ControlPage:
    """A mapped shared file and the counters at its beginning. side: the side of this process."""

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
        """Counter value after `num_packets` packets of an update."""
        return serial * self.num_packets + num_packets

    def has_failed(self, serial: int) -> bool:
        return self._words[FAILED] >= serial

    def fail(self, serial: int) -> None:
        self._words[FAILED] = max(self._words[FAILED], serial)

    def publish(self, serial: int, index: int, header: Sequence[int]) -> None:
        first = FIRST_HEADER + HEADER_STRIDE * index
        for position, word in enumerate(header):
            self._words[first + position] = word
        # The counter is written last: readers poll it, and must then find the complete header and payload.
        self._words[PUBLISHED] = self.encode_count(serial, index + 1)

    def header(self, index: int) -> list[int]:
        first = FIRST_HEADER + HEADER_STRIDE * index
        return list(self._words[first : first + HEADER_STRIDE])

    def is_published(self, serial: int, index: int) -> bool:
        return self._words[PUBLISHED] >= self.encode_count(serial, index + 1)

    def read(self, serial: int, reader: int, num_packets: int) -> None:
        """Record that this reader has read the first `num_packets` packets."""
        self._words[FIRST_READER + reader] = self.encode_count(serial, num_packets)

    def num_read_by_all(self, serial: int, num_readers: int) -> int:
        """Number of this update's packets that every reader has read; negative while one is in an earlier update."""
        done = min(self._words[FIRST_READER : FIRST_READER + num_readers])
        return done - self.encode_count(serial, 0)

    def find_ended(self, sides: Sequence[int]) -> int | None:
        """Process id of one of these sides that has ended; None while all are alive or not yet connected."""
        poll = select.poll()
        for side in sides:
            pid = self._words[FIRST_PID + side]
            if pid and side not in self._processes:
                try:
                    self._processes[side] = os.pidfd_open(pid)  # unlike a process id, it is never reused
                except ProcessLookupError:
                    return pid
            if side in self._processes:
                poll.register(self._processes[side], select.POLLIN)
        ended = {descriptor for descriptor, _ in poll.poll(0)}
        return next((self._words[FIRST_PID + side] for side in sides if self._processes.get(side) in ended), None)

    def close(self) -> None:
        """Unmap the file; idempotent. While tensors still view the map, it stays until they are freed."""
        if not self.is_closed:
            self.is_closed = True
            while self._processes:
                os.close(self._processes.popitem()[1])
            self._words.release()
            with contextlib.suppress(BufferError):
                self.map.close()
