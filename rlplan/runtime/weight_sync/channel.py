"""Channel: what every transport does. Packets of bytes go from one trainer process to every process of the engines.

In: packets, each with a place in a bounded memory (memory/weight_sync.py). Out: the same bytes on the other side, with
their version and a checksum that was taken before they left.
Left out: what the bytes mean (full_content.py, delta_content.py). The driver reads this module, so that it imports no
torch by itself.

An update is one pass over all packets. The driver numbers updates (`serial`), so that what is left over from one that
failed is never taken for a part of the next.
"""

import hashlib
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol

from rlplan.errors import RunError
from rlplan.memory.weight_sync import Packet
from rlplan.vocabulary import Transport

if TYPE_CHECKING:
    import torch

CHECKSUM_WORDS = 1 << 17
"""Words of 8 bytes that are summed up at a time: 1 MiB."""

LONGEST_PAUSE_S = 1e-4
"""Between two looks at a counter: packets take milliseconds, and a look takes microseconds."""


PENDING = 0
"""The checksum of a packet that may be read already, while its checksum is still being taken."""


class Encoding(IntEnum):
    """What the bytes of a packet are: all weights in their places, or what has changed."""

    FULL = 0
    DELTA = 1


@dataclass(frozen=True, slots=True)
class Update:
    """One sync. serial: number of the attempt; version: of the weights; is_full: nothing that came before is used."""

    serial: int
    version: int
    is_full: bool
    timeout_s: float


@dataclass(frozen=True, slots=True)
class SendReport:
    """What an update took here. num_bytes: sent; waited_s: for readers; filled_s: copying and checksums."""

    num_bytes: int
    full_bytes: int
    waited_s: float
    filled_s: float


@dataclass(frozen=True, slots=True)
class Header:
    """One packet. base: serial of the update that a delta is laid over. num_bytes: of the payload, rounded up to 64."""

    serial: int
    version: int
    index: int
    encoding: int
    base: int
    num_bytes: int
    checksum: int

    def words(self) -> tuple[int, ...]:
        """The header as seven integers of 64 bits."""
        return tuple(getattr(self, name) for name in self.__slots__)


HEADER_WORDS = len(Header.__slots__)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where both sides meet. path: a shared file or folder; host and port: of a store; handles: of device memory.

    host: the sender's address. timeout_s: for readers to come, and for one operation of a group.
    """

    transport: Transport
    num_readers: int
    dtype: str = "float32"
    path: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    timeout_s: float = 60.0
    handles: Any = field(default=None, repr=False)


class Outlet(Protocol):
    """The trainer's side of a transport. Packets are written in order, each exactly once an update.

    num_bytes: of the memory that payloads take on this side. endpoint: what readers open. confirms_later: whether a
    packet may be published with its checksum pending, so that the readers need not wait for it.
    """

    num_bytes: int
    endpoint: Endpoint
    confirms_later: bool

    def open(self) -> None:
        """Wait for the readers, where the transport has to."""
        ...

    def begin(self, update: Update) -> None:
        """An update follows."""
        ...

    def buffer(self, index: int) -> "torch.Tensor":
        """The packet's memory, as bytes, as soon as nobody needs what was in it."""
        ...

    def publish(self, header: Header) -> None:
        """The packet is written: let the readers have it."""
        ...

    def confirm(self, index: int, checksum: int) -> None:
        """The checksum of a packet that was published without it."""
        ...

    def finish(self) -> None:
        """Wait until every reader has read everything."""
        ...

    def abort(self) -> None:
        """This update has failed: readers stop waiting for it."""
        ...

    def close(self) -> None:
        """Let go of everything. May be called twice."""
        ...


class Inlet(Protocol):
    """A reader's side of a transport. num_bytes: of the memory that payloads take on this side."""

    num_bytes: int

    def begin(self, update: Update) -> None:
        """An update follows."""
        ...

    def take(self, index: int) -> "tuple[Header, torch.Tensor]":
        """Wait for a packet: its header, and its bytes, which stay until `release`."""
        ...

    def release(self, index: int) -> None:
        """The packet has been read; its memory may be written again."""
        ...

    def confirmed(self, index: int) -> int:
        """Wait for the checksum of a packet that came without it."""
        ...

    def abort(self) -> None:
        """This update has failed here: the sender stops waiting."""
        ...

    def close(self) -> None:
        """Let go of everything. May be called twice."""
        ...


def checksum(payload: "torch.Tensor") -> int:
    """64 bits over a payload of whole 64-byte lines: sums of each MiB, in order.

    Assumes: what goes wrong is a truncated, stale, torn or misplaced part. Words that change places within one MiB go
    unnoticed: a sum reads 28 GB/s on one core here, where zlib's CRC reads 3.
    """
    import torch

    parts = payload.view(torch.int64).split(CHECKSUM_WORDS)
    sums = torch.stack([part.sum() for part in parts]).tolist()
    digest = hashlib.blake2b(struct.pack(f"<{len(sums)}q", *sums), digest_size=8, key=str(payload.numel()).encode())
    return int.from_bytes(digest.digest(), "little", signed=True) or 1


def check_packet(header: Header, payload: "torch.Tensor", update: Update, index: int) -> None:
    """Raises: RunError when a packet is not the one that is due, or is not whole."""
    if (header.serial, header.version, header.index) != (update.serial, update.version, index):
        raise sync_error(
            f"packet {header.index} of update {header.serial} (version {header.version}) came where packet {index} of "
            f"update {update.serial} (version {update.version}) was due"
        )
    if header.num_bytes != payload.numel():
        raise sync_error(f"packet {index} has {payload.numel()} of {header.num_bytes} bytes")


def check_checksum(found: int, said: int, index: int) -> None:
    """Raises: RunError when a packet was changed on its way."""
    if found != said:
        raise sync_error(
            f"packet {index} arrived with checksum {found & (1 << 64) - 1:016x}, it left with "
            f"{said & (1 << 64) - 1:016x}"
        )


def sync_error(what: str) -> RunError:
    """A failed update."""
    return RunError(
        what,
        where="weight sync",
        rule="every packet arrives whole, in order and in time, or the update fails",
        way_out="the run sends everything once more by itself; if that fails too, read the logs of both sides",
    )


class Deadline:
    """The end of an update's time."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.end = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Seconds left, at least a millisecond."""
        return max(1e-3, self.end - time.monotonic())

    def wait(self, is_ready: Callable[[], bool], what: str) -> None:
        """Look again and again, less and less often. Raises: RunError at the deadline."""
        pause_s = 2e-5
        while not is_ready():
            if time.monotonic() > self.end:
                raise sync_error(f"{what} did not happen within {self.timeout_s:.1f} s")
            time.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, pause_s * 1.5)


def packet_view(arena: "torch.Tensor", packet: Packet) -> "torch.Tensor":
    """A packet's bytes in an arena."""
    return arena[packet.start : packet.start + packet.bucket.num_bytes]
