"""Receiver: an engine process's side of weight sync.

In: an open channel and an Update. Out: (name, tensor) of every weight that came, layer by layer; a tensor is valid
until its packet is given back, and whoever keeps it longer copies it before that. Left out: what the engine does with
them (vllm_extension.py).
"""

import time
from collections.abc import Callable, Generator, Sequence

import torch

from rlplan.memory.weight_sync.buckets import BucketEntry
from rlplan.memory.weight_sync.packets import Packet
from rlplan.runtime.weight_sync.channel import (
    Encoding,
    Endpoint,
    Header,
    Inlet,
    ReceiveReport,
    Update,
    as_hex,
    check_packet,
    sync_error,
)
from rlplan.runtime.weight_sync.checksums import Checksums, checksum_packet, checksum_payload
from rlplan.runtime.weight_sync.contents.delta import SentWeights
from rlplan.runtime.weight_sync.contents.full import view_entries
from rlplan.runtime.weight_sync.transports.registry import open_inlet


class PolicyReceiver:
    """Receives the policy. report: of the last update."""

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

    def open(self, endpoint: Endpoint) -> None:
        self.close()
        self.inlet = open_inlet(endpoint, self.packets, self.reader)

    def tensors(
        self, update: Update, before_release: Callable[[torch.Tensor], None] | None = None
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """All weights of an update. before_release: called with the memory in which a packet's tensors lie, before it
        may be written again. Of deltas that is the copy, which the next update changes.

        Raises: RunError when a packet is late, wrong or not the one that is due.
        """
        assert self.inlet is not None, "the channel is opened first"
        inlet, self.report = self.inlet, ReceiveReport()
        found: dict[str, int] = {}
        try:
            inlet.begin(update)
            for index in range(len(self.packets)):
                header, payload = inlet.take(index)
                check_packet(header, payload, update, index)
                if header.encoding == Encoding.DELTA:
                    self._check(checksum_payload(payload), header)
                source, entries = self._apply_packet(header, payload, index)
                found |= self._verify_checksums(source, header, index)
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
                self.held.serial = 0
            raise
        self.report.checksums = found
        if self.held is not None:
            self.held.serial = update.serial

    def _verify_checksums(self, source: torch.Tensor, header: Header, index: int) -> dict[str, int]:
        """Checksums of a packet's weights, of all of them also where a delta feeds only some in."""
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
            f"{as_hex(checksum)}, it left with {as_hex(header.checksum)}"
        )
        raise sync_error(self.report.mismatch)

    def _apply_packet(
        self, header: Header, payload: torch.Tensor, index: int
    ) -> tuple[torch.Tensor, Sequence[BucketEntry]]:
        """Where a packet's tensors lie now, and which of them are fed in."""
        everything = self.packets[index].bucket.entries
        if header.encoding == Encoding.DELTA:
            if self.held is None or header.base != self.held.serial or not header.base:
                raise sync_error(f"packet {index} is laid over update {header.base}, which is not held here")
            return self.held.copies[index], self.held.apply(index, payload)
        if payload.numel() != self.packets[index].bucket.num_bytes:
            raise sync_error(
                f"packet {index} has {payload.numel()} of {self.packets[index].bucket.num_bytes} bytes, and is no delta"
            )
        if self.held is None:
            return payload, everything
        self.held.take(index, payload)
        return self.held.copies[index], everything

    def close(self) -> None:
        if self.inlet is not None:
            self.inlet.close()
            self.inlet = None
