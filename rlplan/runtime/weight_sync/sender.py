"""Sender: the trainer's side of weight sync, on the rank that sends.

In: a WeightSource and an Update. Out: packets in the channel. One call sends a whole update; nothing is asked of the
driver in between.
"""

from collections.abc import Sequence
from contextlib import suppress

import torch

from rlplan.memory.weight_sync.packets import Packet
from rlplan.runtime.weight_sync.channel import Encoding, Endpoint, Header, Outlet, SendReport, Update
from rlplan.runtime.weight_sync.checksums import Checksums, checksum_packet, checksum_payload
from rlplan.runtime.weight_sync.contents.delta import SentWeights
from rlplan.runtime.weight_sync.contents.full import fill
from rlplan.runtime.weight_sync.source import WeightSource
from rlplan.runtime.weight_sync.transports.registry import make_outlet


class PolicySender:
    """Sends the policy. `open` anew after a failure that broke the channel; a full update needs nothing before it."""

    def __init__(self, packets: Sequence[Packet], dtype: torch.dtype, *, sends_deltas: bool = False) -> None:
        self.packets, self.dtype = packets, dtype
        self.outlet: Outlet | None = None
        self.sent = SentWeights(packets, dtype) if sends_deltas else None
        self._checksums = Checksums(dtype)

    @property
    def num_bytes(self) -> int:
        return (self.outlet.num_bytes if self.outlet else 0) + (self.sent.num_bytes if self.sent else 0)

    def offer(self, endpoint: Endpoint) -> Endpoint:
        """Let go of an earlier channel and prepare a new one; readers open what this gives."""
        self.close()
        self.outlet = make_outlet(endpoint, self.packets)
        if self.sent is not None:
            self.sent.serial = 0
        return self.outlet.endpoint

    def open(self, endpoint: Endpoint) -> None:
        """Open the channel that was offered, beside the readers."""
        assert self.outlet is not None, "offer comes first"
        assert self.outlet.endpoint.path == endpoint.path, "the channel that was offered is opened"
        self.outlet.connect()

    def send(self, source: WeightSource, update: Update) -> SendReport:
        """One whole update. Raises: RunError when a reader gives up or time is up; other ranks are not left waiting."""
        assert self.outlet is not None, "the channel is opened first"
        outlet, position = self.outlet, 0
        found: dict[str, int] = {}
        base = 0 if update.is_full or self.sent is None else self.sent.serial
        num_bytes = 0
        try:
            outlet.begin(update)
            for position in range(len(self.packets)):
                header, sums = self._write(outlet.buffer(position), position, source, update, base)
                found |= sums
                num_bytes += header.num_bytes
                outlet.publish(header)
            outlet.finish()
        except BaseException:
            with suppress(OSError):
                outlet.abort()  # where not even that is possible, the readers' time runs out
            if self.sent is not None:
                self.sent.serial = 0  # what the readers hold is not known
            source.take_part(entry.name for packet in self.packets[position:] for entry in packet.bucket.entries)
            raise
        if self.sent is not None:
            self.sent.serial = update.serial
        full_bytes = sum(packet.bucket.num_bytes for packet in self.packets)
        return SendReport(num_bytes, full_bytes, found)

    def close(self) -> None:
        if self.outlet is not None:
            self.outlet.close()
            self.outlet = None

    def _write(
        self, buffer: torch.Tensor, index: int, source: WeightSource, update: Update, base: int
    ) -> tuple[Header, dict[str, int]]:
        """Fill a packet: what has changed since update `base`, or everything where that is 0. And its checksums."""
        bucket, sums = self.packets[index].bucket, dict[str, int]()
        encoding, size = Encoding.FULL, bucket.num_bytes
        tensors = self._checksums.watch(source.tensors(bucket), sums)
        if self.sent is None:
            fill(buffer, bucket, tensors, self.dtype)
        elif base:
            encoding, size = self.sent.encode(index, buffer, tensors)
        else:
            self.sent.put(index, buffer, tensors)
        checksum = checksum_packet(sums) if encoding == Encoding.FULL else checksum_payload(buffer[:size])
        return Header(update.serial, update.version, index, encoding, base, size, checksum), sums
