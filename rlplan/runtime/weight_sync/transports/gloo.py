"""The gloo transport: broadcasts over TCP in a separate group of the sending rank and all engine processes.

In: packets. Out: the same bytes in the readers' own arenas. Works between hosts.
Left out: the trainer's default group. The groups are separate, so that a gather never waits for a reader.

Each packet is two broadcasts, its header and its payload. The sender runs ahead as far as its arena allows. A thread of
each reader receives packets as far as its arena allows, while the engine loads. An all-reduce at the end counts the
readers that have read all packets.
"""

import queue
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlplan.memory.weight_sync.packets import Packet, arena_bytes
from rlplan.runtime.weight_sync.channel import HEADER_WORDS, Deadline, Endpoint, Header, Update, packet_view, sync_error


class GlooSide:
    """Either side: a member of the group, with its own arena."""

    def __init__(self, endpoint: Endpoint, packets: Sequence[Packet]) -> None:
        self.endpoint, self.packets = endpoint, packets
        self.arena = torch.zeros(arena_bytes(packets), dtype=torch.uint8)
        self.num_bytes = self.arena.numel()
        self.group: Any = None
        self.deadline = Deadline(0.0)

    def begin(self, update: Update) -> None:
        if self.group is None:
            raise sync_error("the process group was closed after a failure")
        self.deadline = Deadline(update.timeout_s)

    def abort(self) -> None:
        """Leave the group; the others see a closed connection."""
        group, self.group = self.group, None
        if group is not None:
            group.abort()

    def close(self) -> None:
        self.abort()
        self.arena = self.arena[:0]

    def _join(self, store: dist.Store, rank: int) -> None:
        gloo: Any = dist.ProcessGroupGloo  # torch's stub has neither `_Options` nor a group made with them
        options = gloo._Options()
        options._timeout = timedelta(seconds=self.endpoint.timeout_s)
        # One device for the interface that reaches the sender: gloo would otherwise resolve the host name.
        options._devices = [gloo.create_device(hostname=own_address(self.endpoint.host))]
        prefix = dist.PrefixStore("weight_sync", store)
        self.store = store
        self.group = gloo(prefix, rank, self.endpoint.num_readers + 1, options)

    def _broadcast(self, tensor: torch.Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        return self._group().broadcast([tensor], options)

    def _group(self) -> Any:
        if self.group is None:
            raise sync_error("the process group was closed")
        return self.group

    def _wait(self, work: Any, what: str) -> None:
        try:
            work.wait(timedelta(seconds=self.deadline.left_s()))
        except RuntimeError as error:
            text = str(error).splitlines()[0]
            raise sync_error(f"{what}: {text[:200]}") from None


class GlooOutlet(GlooSide):
    def __init__(self, endpoint: Endpoint, packets: Sequence[Packet]) -> None:
        """Listen on a free port of the sender's address only."""
        listener = socket.socket()
        listener.bind((endpoint.host, 0))
        listener.listen()
        super().__init__(replace(endpoint, port=listener.getsockname()[1]), packets)
        self.store = dist.TCPStore(
            endpoint.host,
            self.endpoint.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=endpoint.timeout_s),
            master_listen_fd=listener.detach(),
        )
        self._sent: list[tuple[Any, Any]] = []

    def connect(self) -> None:
        self._join(self.store, 0)

    def begin(self, update: Update) -> None:
        super().begin(update)
        self._sent = []

    def buffer(self, index: int) -> torch.Tensor:
        """Wait until the packets in this memory have been sent, and return it."""
        for position in range(self.packets[index].after):
            self._wait_until_sent(position)
        return packet_view(self.arena, self.packets[index])

    def publish(self, header: Header) -> None:
        words = torch.tensor(header.words(), dtype=torch.int64)
        payload = packet_view(self.arena, self.packets[header.index])[: header.num_bytes]
        self._sent.append(((self._broadcast(words), words), (self._broadcast(payload), payload)))

    def finish(self) -> None:
        for position in range(len(self._sent)):
            self._wait_until_sent(position)
        done = torch.zeros(1, dtype=torch.int64)
        self._wait(self._group().allreduce([done]), "reading of the last packet")
        if int(done) != self.endpoint.num_readers:
            raise sync_error(f"only {int(done)} of {self.endpoint.num_readers} engine processes read all packets")

    def _wait_until_sent(self, position: int) -> None:
        for work, _ in self._sent[position]:
            self._wait(work, f"sending of packet {position}")


class GlooInlet(GlooSide):
    def __init__(self, endpoint: Endpoint, packets: Sequence[Packet], reader: int) -> None:
        super().__init__(endpoint, packets)
        timeout = timedelta(seconds=endpoint.timeout_s)
        store = dist.TCPStore(endpoint.host, endpoint.port, is_master=False, timeout=timeout)
        self._join(store, reader + 1)
        self._came: queue.Queue[Header | BaseException] = queue.Queue()
        self._num_read, self._has_read = 0, threading.Condition()

    def begin(self, update: Update) -> None:
        super().begin(update)
        # A new queue, because the thread of a failed update may still put its error into the old one.
        self._came, self._num_read = queue.Queue(), 0
        threading.Thread(target=self._receive_packets, args=(self._came,), daemon=True).start()

    def take(self, index: int) -> tuple[Header, torch.Tensor]:
        try:
            header = self._came.get(timeout=self.deadline.left_s())
        except queue.Empty:
            raise sync_error(
                f"arrival of packet {index} did not happen within {self.deadline.timeout_s:.1f} s"
            ) from None
        if isinstance(header, BaseException):
            raise header
        return header, packet_view(self.arena, self.packets[index])[: header.num_bytes]

    def release(self, index: int) -> None:
        """Free the packet's memory; after the last packet, take part in the final all-reduce."""
        with self._has_read:
            self._num_read = index + 1
            self._has_read.notify()
        if index + 1 == len(self.packets):
            self._wait(self._group().allreduce([torch.ones(1, dtype=torch.int64)]), "the end of the update")

    def _receive_packets(self, came: "queue.Queue[Header | BaseException]") -> None:
        try:
            for index, packet in enumerate(self.packets):
                with self._has_read:
                    self._has_read.wait_for(lambda: self._num_read >= packet.after, self.deadline.left_s())  # noqa: B023
                words = torch.zeros(HEADER_WORDS, dtype=torch.int64)
                self._wait(self._broadcast(words), f"arrival of packet {index}")
                header = Header(*words.tolist())
                payload = packet_view(self.arena, packet)[: header.num_bytes]
                self._wait(self._broadcast(payload), f"arrival of packet {index}")
                came.put(header)
        except BaseException as error:
            came.put(error)


def own_address(peer: str) -> str:
    """This host's address on the route to a peer. Connecting a UDP socket only looks up the route and sends nothing.

    >>> own_address("127.0.0.1")
    '127.0.0.1'
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])
