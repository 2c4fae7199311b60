"""Sender: the trainer's side of weight sync, on the sending rank.

In: a WeightSource and an Update. Out: packets in the channel. One call sends a complete update without the driver.
"""

from collections.abc import Sequence
from contextlib import suppress

import torch

from rlplan.memory.weight_sync.packets import Packet
from rlplan.runtime.weight_sync.channel import Encoding, Endpoint, Header, Outlet, SendReport, Update, make_outlet
from rlplan.runtime.weight_sync.checksums import Checksums, checksum_packet, checksum_payload
from rlplan.runtime.weight_sync.contents.delta import SentWeights
from rlplan.runtime.weight_sync.contents.full import fill
from rlplan.runtime.weight_sync.source import WeightSource


class PolicySender:
    """Sends the policy. A broken channel must be offered and opened again; the next update is then a full one."""

    def __init__(self, packets: Sequence[Packet], dtype: torch.dtype, *, sends_deltas: bool = False) -> None:
        self.packets, self.dtype = packets, dtype
        self.outlet: Outlet | None = None
        self.sent = SentWeights(packets, dtype) if sends_deltas else None
        self._checksums = Checksums(dtype)

    @property
    def num_bytes(self) -> int:
        return (self.outlet.num_bytes if self.outlet else 0) + (self.sent.num_bytes if self.sent else 0)

    def offer(self, endpoint: Endpoint) -> Endpoint:
        """Close an earlier channel and prepare a new one; return the endpoint that readers open."""
        self.close()
        self.outlet = make_outlet(endpoint, self.packets)
        if self.sent is not None:
            self.sent.serial = 0
        return self.outlet.endpoint

    def connect(self, endpoint: Endpoint) -> None:
        """Open the offered channel while the readers do the same."""
        assert self.outlet is not None, "offer comes first"
        assert self.outlet.endpoint.path == endpoint.path, "only the offered channel can be opened"
        self.outlet.connect()

    def send(self, source: WeightSource, update: Update) -> SendReport:
        """Send one update. Raises: RunError when a reader aborts or the time is up.

        After a failure this rank still takes part in the gathers that other ranks wait for.
        """
        assert self.outlet is not None, "the channel is opened first"
        outlet, position = self.outlet, 0
        checksums: dict[str, int] = {}
        base = 0 if update.is_full or self.sent is None else self.sent.serial
        num_bytes = 0
        try:
            outlet.begin(update)
            for position in range(len(self.packets)):
                header, sums = self._write(outlet.buffer(position), position, source, update, base)
                checksums |= sums
                num_bytes += header.num_bytes
                outlet.publish(header)
            outlet.finish()
        except BaseException:
            with suppress(OSError):
                outlet.abort()  # if even that fails, the readers run into their timeout
            if self.sent is not None:
                self.sent.serial = 0  # the readers' state is unknown
            source.join_gathers(entry.name for packet in self.packets[position:] for entry in packet.bucket.entries)
            raise
        if self.sent is not None:
            self.sent.serial = update.serial
        full_bytes = sum(packet.bucket.num_bytes for packet in self.packets)
        return SendReport(num_bytes, full_bytes, checksums)

    def close(self) -> None:
        if self.outlet is not None:
            self.outlet.close()
            self.outlet = None

    def _write(
        self, buffer: torch.Tensor, index: int, source: WeightSource, update: Update, base: int
    ) -> tuple[Header, dict[str, int]]:
        """Fill a packet with the changes since update `base`, or with all weights if that is 0.

        Returns: its header, and the checksums of its weights.
        """
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
