"""The shared-memory transport: the trainer writes packets into /dev/shm, and engines read them in place.

In: packets. Out: payloads that are views of the shared pages, so there is one copy per host. Left out: other hosts.
"""

import os
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from rlplan.memory.weight_sync.packets import Packet, arena_bytes
from rlplan.runtime.weight_sync.channel import (
    HEADER_WORDS,
    Deadline,
    Endpoint,
    GivenUpError,
    Header,
    Update,
    packet_view,
    sync_error,
)
from rlplan.runtime.weight_sync.transports.arena import (
    MAX_READERS,
    SENDER,
    SHARED_FOLDER,
    ControlPage,
    control_bytes,
    create_arena,
)


class SharedPages:
    """Either side's mapping of the pages. side: this process's side; others: the sides that it waits for."""

    def __init__(self, endpoint: Endpoint, packets: Sequence[Packet], side: int, others: Sequence[int]) -> None:
        self.endpoint, self.packets, self.others = endpoint, packets, others
        self.control = ControlPage(endpoint.path, len(packets), side)
        self.arena = self._memory()
        self.num_bytes = self.arena.numel()
        self.serial = 0
        self.deadline = Deadline(0.0)

    def begin(self, update: Update) -> None:
        self.serial, self.deadline = update.serial, Deadline(update.timeout_s)

    def abort(self) -> None:
        self.control.fail(self.serial)

    def close(self) -> None:
        """Unmap the pages; idempotent. Payload tensors keep their pages until they are freed."""
        if not self.control.is_closed:
            del self.arena
            self.control.close()

    def _memory(self) -> torch.Tensor:
        """Memory of the payloads, after the control pages."""
        return torch.frombuffer(self.control.map, dtype=torch.uint8, offset=control_bytes(self.packets))

    def _stop_if_failed(self) -> None:
        """Raises: GivenUpError where the other side has aborted the update or ended."""
        if self.control.has_failed(self.serial):
            raise sync_error(f"the other side has aborted update {self.serial}", GivenUpError)
        if (pid := self.control.find_ended(self.others)) is not None:
            raise sync_error(f"the other side has ended (process {pid}) in update {self.serial}", GivenUpError)


class SharedMemoryOutlet(SharedPages):
    def __init__(self, endpoint: Endpoint, packets: Sequence[Packet]) -> None:
        """Create the shared file. It is unlinked when the first update begins: by then all readers have mapped it."""
        if endpoint.num_readers > MAX_READERS:
            raise sync_error(f"{endpoint.num_readers} engine processes; one arena supports at most {MAX_READERS}")
        path = Path(SHARED_FOLDER) / f"rlplan-{os.getpid()}-{uuid.uuid4().hex}"
        create_arena(str(path), control_bytes(packets) + self.payload_bytes(packets))
        try:
            super().__init__(replace(endpoint, path=str(path)), packets, SENDER, range(1, endpoint.num_readers + 1))
            self.endpoint = replace(self.endpoint, handles=self.handles())
        except BaseException:
            path.unlink()  # no other process knows the path yet
            raise

    @staticmethod
    def payload_bytes(packets: Sequence[Packet]) -> int:
        return arena_bytes(packets)

    def handles(self) -> bytes | None:
        """Handles of the payloads' memory for readers; None if the path suffices."""
        return None

    def connect(self) -> None:
        """Do nothing: readers may connect at any time."""

    def begin(self, update: Update) -> None:
        super().begin(update)
        Path(self.endpoint.path).unlink(missing_ok=True)

    def buffer(self, index: int) -> torch.Tensor:
        """Wait until the packets in this memory have been read, and return it."""
        packet = self.packets[index]
        self._wait_until_read(packet.after, f"reading of packet {packet.after - 1}")
        return packet_view(self.arena, packet)

    def publish(self, header: Header) -> None:
        self.control.publish(header.serial, header.index, header.words())

    def finish(self) -> None:
        self._wait_until_read(len(self.packets), "reading of the last packet")

    def close(self) -> None:
        """Unmap the pages, and remove the file if no update has begun."""
        super().close()
        Path(self.endpoint.path).unlink(missing_ok=True)

    def _wait_until_read(self, num_packets: int, what: str) -> None:
        def is_read() -> bool:
            self._stop_if_failed()
            readers = self.endpoint.num_readers
            return num_packets == 0 or self.control.num_read_by_all(self.serial, readers) >= num_packets

        self.deadline.wait(is_read, what)


class SharedMemoryInlet(SharedPages):
    def __init__(self, endpoint: Endpoint, packets: Sequence[Packet], reader: int) -> None:
        super().__init__(endpoint, packets, reader + 1, (SENDER,))
        self.reader = reader

    def take(self, index: int) -> tuple[Header, torch.Tensor]:
        def is_published() -> bool:
            self._stop_if_failed()
            return self.control.is_published(self.serial, index)

        self.deadline.wait(is_published, f"arrival of packet {index}")
        header = Header(*self.control.header(index)[:HEADER_WORDS])
        return header, packet_view(self.arena, self.packets[index])[: header.num_bytes]

    def release(self, index: int) -> None:
        self.control.read(self.serial, self.reader, index + 1)
