"""Receiver: an engine process's side of weight sync.

In: an open channel and an Update. Out: (name, tensor) of every received weight, layer by layer. A tensor is valid until
its packet is released; code that keeps it longer must copy it. Left out: loading into vLLM (vllm_extension.py).
"""

import time
from collections.abc import Callable, Generator, Sequence

import torch

from rlplan.memory.weight_sync.packets import BucketEntry, Packet
from rlplan.runtime.weight_sync.channel import (
    Encoding,
    Endpoint,
    Header,
    Inlet,
    ReceiveReport,
    Update,
    as_hex,
    check_packet,
    open_inlet,
    sync_error,
)
from rlplan.runtime.weight_sync.checksums import Checksums, checksum_packet, checksum_payload
from rlplan.runtime.weight_sync.contents.delta import SentWeights
from rlplan.runtime.weight_sync.contents.full import view_entries


class PolicyReceiver:
    """Receives the policy. report: result of the last update. held: the weights as received, if deltas are used."""

    def __init__(
        self, packets: Sequence[Packet], dtype: torch.dtype, reader: int, *, takes_deltas: bool = False
    ) -> None:
        self.packets, self.dtype, self.reader = packets, dtype, reader
        self.held = SentWeights(packets, dtype) if takes_deltas else None
        self.inlet: Inlet | None = None
        self.report = ReceiveReport()
        self._checksums = Checksums(dtype)

    @property
    def num_bytes(self) -> int:
        return (self.inlet.num_bytes if self.inlet else 0) + (self.held.num_bytes if self.held else 0)

    def connect(self, endpoint: Endpoint) -> None:
        self.close()
        self.inlet = open_inlet(endpoint, self.packets, self.reader)

    def tensors(
        self, update: Update, before_release: Callable[[torch.Tensor], None] | None = None
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield all weights of an update.

        before_release: called with the memory of a packet's tensors, before it may be overwritten. With deltas this is
        the local copy, which the next update changes. Raises: RunError when a packet is late, corrupt or out of order.
        """
        assert self.inlet is not None, "the channel is opened first"
        inlet, self.report = self.inlet, ReceiveReport()
        checksums: dict[str, int] = {}
        try:
            inlet.begin(update)
            for index in range(len(self.packets)):
                header, payload = inlet.take(index)
                check_packet(header, payload, update, index)
                if header.encoding == Encoding.DELTA:
                    self._check(checksum_payload(payload), header)
                source, entries = self._apply_packet(header, payload, index)
                checksums |= self._verify_checksums(source, header, index)  # before vLLM sees a tensor of the packet
                start = time.perf_counter()
                yield from view_entries(source, entries, self.dtype)
                if before_release is not None:
                    before_release(source)
                self.report.applied_s += time.perf_counter() - start
                inlet.release(index)
                self.report.num_bytes += header.num_bytes
        except BaseException:
            inlet.abort()
            if self.held is not None:
                self.held.serial = 0  # the copy may be half updated, so no delta can build on it
            raise
        self.report.checksums = checksums
        if self.held is not None:
            self.held.serial = update.serial

    def _verify_checksums(self, source: torch.Tensor, header: Header, index: int) -> dict[str, int]:
        """Checksums of all weights of a packet, including those that a delta leaves unchanged.

        Raises: RunError where a full packet's checksum differs from the sender's.
        """
        sums = {
            name: self._checksums.compute(tensor)
            for name, tensor in view_entries(source, self.packets[index].bucket.entries, self.dtype)
        }
        if header.encoding == Encoding.FULL:
            self._check(checksum_packet(sums), header)
        return sums

    def _check(self, checksum: int, header: Header) -> None:
        """Raises: RunError when a packet was changed on its way."""
        if checksum == header.checksum:
            return
        entries = self.packets[header.index].bucket.entries
        self.report.mismatch = (
            f"packet {header.index} ({entries[0].name} to {entries[-1].name}) arrived with checksum "
            f"{as_hex(checksum)}, was sent with {as_hex(header.checksum)}"
        )
        raise sync_error(self.report.mismatch)

    def _apply_packet(
        self, header: Header, payload: torch.Tensor, index: int
    ) -> tuple[torch.Tensor, Sequence[BucketEntry]]:
        """Return the memory of a packet's tensors, and the entries to load; apply a delta first."""
        all_entries = self.packets[index].bucket.entries
        if header.encoding == Encoding.DELTA:
            if self.held is None or header.base != self.held.serial or not header.base:
                raise sync_error(f"packet {index} is a delta to update {header.base}, which this process does not have")
            return self.held.copies[index], self.held.apply(index, payload)
        if payload.numel() != self.packets[index].bucket.num_bytes:
            raise sync_error(
                f"packet {index} has {payload.numel()} of {self.packets[index].bucket.num_bytes} bytes, and is no delta"
            )
        if self.held is None:
            return payload, all_entries
        self.held.take(index, payload)
        return self.held.copies[index], all_entries

    def close(self) -> None:
        if self.inlet is not None:
            self.inlet.close()
            self.inlet = None
