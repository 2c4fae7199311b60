"""The NCCL transport: broadcasts between GPUs, from the sending rank to all engine processes.

In: packets. Out: the same bytes in the readers' own arenas, on their devices. Headers use vLLM's stateless group (TCP).
Payloads use a separate NCCL communicator, because a second NCCL group created by torch fails next to vLLM's.
Left out: several sending ranks, sharded tensors. **Not yet run on a GPU**; tested with the simulated device of the
tests (tests/runtime/device). Written against vLLM 0.32.

NCCL cannot be interrupted: a broadcast that misses its deadline fails the update, and the communicator with it.
"""

import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from rlplan.memory.weight_sync.packets import Packet, arena_bytes
from rlplan.runtime.device.layer import Event
from rlplan.runtime.weight_sync.channel import Deadline, Endpoint, Header, Update, packet_view, sync_error
from rlplan.runtime.weight_sync.transports.cuda_ipc import require_device


class NcclSide:
    """Either side: a member of the group, with its own arena on its device."""

    def __init__(self, endpoint: Endpoint, packets: Sequence[Packet]) -> None:
        self.endpoint, self.packets = endpoint, packets
        self.device = require_device()
        self.arena = torch.zeros(arena_bytes(packets), dtype=torch.uint8, device=self.device.place)
        self.num_bytes = self.arena.numel()
        self.group: Any = None
        self.communicator: Any = None
        self.stream = self.device.new_stream()
        self.deadline = Deadline(0.0)

    def begin(self, update: Update) -> None:
        if self.communicator is None:
            raise sync_error("the communicator was closed after a failure")
        self.deadline = Deadline(update.timeout_s)

    def abort(self) -> None:
        """Leave the group; it cannot be used again."""
        communicator, self.communicator, self.group = self.communicator, None, None
        if communicator is not None:
            communicator.destroy()

    def close(self) -> None:
        self.abort()
        self.arena = self.arena[:0]

    def _join(self, rank: int) -> None:
        endpoint = self.endpoint
        self.group, self.communicator = self.device.meet(endpoint.host, endpoint.port, rank, endpoint.num_readers + 1)

    def _broadcast(self, header: Header | None, index: int) -> tuple[Header, torch.Tensor, Event]:
        """Send (rank 0) or receive a packet; return header, payload, and the event that marks its completion."""
        if self.group is None:
            raise sync_error("the communicator was closed")
        header = Header(*self.group.broadcast_obj(None if header is None else header.words(), src=0))
        payload = packet_view(self.arena, self.packets[index])[: header.num_bytes]
        self.device.follow(self.stream)  # the broadcast starts after pending reads and writes of this arena memory
        self.communicator.broadcast(payload, src=0, stream=self.stream)
        event = self.device.new_event()
        event.record(self.stream)
        return header, payload, event


class NcclOutlet(NcclSide):
    def __init__(self, endpoint: Endpoint, packets: Sequence[Packet]) -> None:
        """Choose a free port; the store listens there once the channel is opened."""
        with socket.socket() as probe:
            probe.bind((endpoint.host, 0))
            port = probe.getsockname()[1]
        super().__init__(replace(endpoint, port=port), packets)
        self._sent: list[Event] = []

    def connect(self) -> None:
        self._join(0)

    def begin(self, update: Update) -> None:
        super().begin(update)
        self._sent = []

    def buffer(self, index: int) -> torch.Tensor:
        """Wait until the packets in this memory have been sent, and return it."""
        for position in range(self.packets[index].after):
            self.deadline.wait(self._sent[position].query, f"sending of packet {position}")
        return packet_view(self.arena, self.packets[index])

    def publish(self, header: Header) -> None:
        self._sent.append(self._broadcast(header, header.index)[2])

    def finish(self) -> None:
        for position, event in enumerate(self._sent):
            self.deadline.wait(event.query, f"sending of packet {position}")
        self.group.barrier(timeout=self.deadline.left_s())


class NcclInlet(NcclSide):
    def __init__(self, endpoint: Endpoint, packets: Sequence[Packet], reader: int) -> None:
        super().__init__(endpoint, packets)
        self._join(reader + 1)

    def take(self, index: int) -> tuple[Header, torch.Tensor]:
        header, payload, event = self._broadcast(None, index)
        self.deadline.wait(event.query, f"arrival of packet {index}")
        return header, payload

    def release(self, index: int) -> None:
        """Free the packet's memory; after the last packet, join the barrier that `finish` waits for."""
        self.device.finish_stream()
        if index + 1 == len(self.packets):
            self.group.barrier(timeout=self.deadline.left_s())
