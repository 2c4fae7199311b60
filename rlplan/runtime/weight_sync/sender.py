"""Sender: the trainer's side of weight sync, on the rank that sends.

In: a WeightSource and an Update. Out: packets in the channel. One call sends a whole update; nothing is asked of the
driver in between. Left out: adapters (adapter.py).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlplan.memory.weight_sync import Packet
from rlplan.runtime.weight_sync.channel import Encoding, Endpoint, Header, Outlet, Update, checksum
from rlplan.runtime.weight_sync.full_content import fill
from rlplan.runtime.weight_sync.source import WeightSource
from rlplan.runtime.weight_sync.transports import offer, open_outlet


@dataclass(frozen=True, slots=True)
class SendReport:
    """What an update took here. num_bytes: sent; waited_s: for readers; filled_s: copying and checksums."""

    num_bytes: int
    full_bytes: int
    waited_s: float
    filled_s: float


class PolicySender:
    """Sends the policy. `open` anew after a failure that broke the channel; a full update needs nothing before it."""

    def __init__(self, packets: Sequence[Packet], dtype: torch.dtype) -> None:
        self.packets, self.dtype = packets, dtype
        self.outlet: Outlet | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of staging held now."""
        return self.outlet.num_bytes if self.outlet is not None else 0

    def offer(self, endpoint: Endpoint) -> Endpoint:
        """Let go of an earlier channel and prepare a new one; readers open what this gives."""
        self.close()
        return offer(endpoint, self.packets)

    def open(self, endpoint: Endpoint) -> None:
        """Open the channel, beside the readers."""
        self.outlet = open_outlet(endpoint, self.packets)

    def send(self, source: WeightSource, update: Update) -> SendReport:
        """One whole update. Raises: RunError when a reader gives up or time is up; other ranks are not left waiting."""
        assert self.outlet is not None, "the channel is opened first"
        outlet, position = self.outlet, 0
        waited_s, filled_s, num_bytes = 0.0, 0.0, 0
        try:
            outlet.begin(update)
            for position, packet in enumerate(self.packets):
                start = time.perf_counter()
                buffer = outlet.buffer(position)
                ready = time.perf_counter()
                header = self._write(buffer, packet, source, update, position)
                filled_s += time.perf_counter() - ready
                waited_s += ready - start
                num_bytes += header.num_bytes
                outlet.publish(header)
            start = time.perf_counter()
            outlet.finish()
            waited_s += time.perf_counter() - start
        except BaseException:
            outlet.abort()
            source.take_part(entry.name for packet in self.packets[position:] for entry in packet.bucket.entries)
            raise
        return SendReport(num_bytes, sum(packet.bucket.num_bytes for packet in self.packets), waited_s, filled_s)

    def close(self) -> None:
        """Let go of the channel."""
        if self.outlet is not None:
            self.outlet.close()
            self.outlet = None

    def _write(self, buffer: torch.Tensor, packet: Packet, source: WeightSource, update: Update, index: int) -> Header:
        fill(buffer, packet.bucket, source.tensors(packet.bucket), self.dtype)
        size = packet.bucket.num_bytes
        return Header(update.serial, update.version, index, Encoding.FULL, 0, size, checksum(buffer[:size]))
