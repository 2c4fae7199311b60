"""Channel: what every transport does. Packets of bytes go from one trainer process to every process of the engines.

In: packets, each with a place in a bounded memory (memory/weight_sync/packets.py). Out: the same bytes on the other
side, with their version and a checksum (checksums.py).
Left out: what the bytes mean (contents/full.py, contents/delta.py). The driver reads this module, so that it imports no
torch by itself.

An update is one pass over all packets. The driver numbers updates (`serial`), so that what is left over from one that
failed is never taken for a part of the next.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol

from rlplan.errors import RunError
from rlplan.memory.weight_sync.packets import Packet
from rlplan.vocabulary import Transport

if TYPE_CHECKING:
    import torch

LONGEST_PAUSE_S = 1e-4
"""Between two looks at a counter: packets take milliseconds, and a look takes microseconds."""


class Encoding(IntEnum):
    """What the bytes of a packet are: all weights in their places, or what has changed."""

    FULL = 0
    DELTA = 1


@dataclass(frozen=True, slots=True)
class Update:
    serial: int
    """Number of the attempt."""

    version: int
    is_full: bool
    """Nothing that came before is used."""

    timeout_s: float

    verifies: bool = False
    """The engines hold these weights already: they load them again, and compare. Adapters are compared alone."""


@dataclass(frozen=True, slots=True)
class VerificationReport:
    """What an engine process found when it compared its own parameters with the trainer's weights."""

    num_compared: int
    """Parameters, buffers and packed matrices of the engine; or matrices of the adapter."""

    different: tuple[str, ...] = ()
    """Those that hold something else than the trainer's weights."""

    untaken: tuple[str, ...] = ()
    """Weights of the trainer, as a checkpoint names them, that no parameter has taken."""

    kept_back: tuple[str, ...] = ()
    """Weights that were not read before their packet was given back, and so may be read from another one."""

    not_compared: tuple[str, ...] = ()
    """Parameters with padding that vLLM never writes; or matrices of the adapter that cannot be read back."""

    is_conclusive: bool = True
    """False where every B of an adapter is still zero, before the first step: the next update is compared too."""


@dataclass(frozen=True, slots=True)
class SendReport:
    num_bytes: int
    full_bytes: int
    """That a full update would have sent."""

    checksums: dict[str, int] = field(repr=False)
    """Of every weight that the trainer holds, by name, whether or not it was sent."""


@dataclass(slots=True)
class ReceiveReport:
    num_bytes: int = 0
    applied_s: float = 0.0
    """Inside the engine, from a tensor handed over until the next one is due."""

    checksums: dict[str, int] = field(default_factory=dict, repr=False)
    """Of every weight that this side holds, by name, as it was fed in; none where the update failed."""

    mismatch: str = ""
    """What came with another checksum than it left with, and so ended the update."""


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before a packet: seven integers of 64 bits."""

    serial: int
    version: int
    index: int
    """Of the packet within the update, from 0."""

    encoding: int
    """An `Encoding`."""

    base: int
    """Serial of the update that this one is laid over; 0: it sends everything."""

    num_bytes: int
    """Of the payload, rounded up to 64."""

    checksum: int
    """Of a full packet over its weights, of a delta over its bytes."""

    def words(self) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)


HEADER_WORDS = len(Header.__slots__)


@dataclass(frozen=True, slots=True)
class Endpoint:
    transport: Transport
    num_readers: int
    """Processes of engines that read."""

    dtype: str = "float32"
    """Torch's name of the type in which weights go."""

    path: str = ""
    """A shared file or folder."""

    host: str = "127.0.0.1"
    """The sender's address, of a store."""

    port: int = 0
    """Of a store."""

    timeout_s: float = 60.0
    """For readers to come, and for one operation of a group."""

    handles: Any = field(default=None, repr=False)
    """Of device memory."""


@dataclass(frozen=True, slots=True)
class BaseHandle:
    """What opens a trainer's base in another process on the same device."""

    num_bytes: int
    process_id: int
    descriptor: int = -1
    """Of the file, in that process; -1 where the memory is a GPU's."""

    on_device: bytes = field(default=b"", repr=False)
    """The GPU's id and the IPC handle there, as bytes: they pass through the driver, which has no torch."""


class _Side(Protocol):
    """Either side of a transport. num_bytes: of the memory that payloads take here."""

    num_bytes: int

    def begin(self, update: Update) -> None:
        """An update follows."""

    def abort(self) -> None:
        """This update has failed here: the other sides stop waiting for it."""

    def close(self) -> None:
        """Let go of everything. May be called twice."""


class Outlet(_Side, Protocol):
    """The trainer's side. Packets are written in order, each exactly once an update. endpoint: what readers open."""

    endpoint: Endpoint

    def connect(self) -> None:
        """Wait for the readers, where the transport has to."""

    def buffer(self, index: int) -> "torch.Tensor":
        """The packet's memory, as bytes, as soon as what was in it is not needed."""
        ...

    def publish(self, header: Header) -> None:
        """The packet is written: let the readers have it."""

    def finish(self) -> None:
        """Wait until every reader has read everything."""


class Inlet(_Side, Protocol):
    """A reader's side."""

    def take(self, index: int) -> "tuple[Header, torch.Tensor]":
        """Wait for a packet: its header, and its bytes, which stay until `release`."""
        ...

    def release(self, index: int) -> None:
        """The packet has been read; its memory may be written again."""


def check_packet(header: Header, payload: "torch.Tensor", update: Update, index: int) -> None:
    """Raises: RunError when a packet is not the one that is due, or is not whole."""
    if (header.serial, header.version, header.index) != (update.serial, update.version, index):
        raise sync_error(
            f"packet {header.index} of update {header.serial} (version {header.version}) came where packet {index} of "
            f"update {update.serial} (version {update.version}) was due"
        )
    if header.num_bytes != payload.numel():
        raise sync_error(f"packet {index} has {payload.numel()} of {header.num_bytes} bytes")


class GivenUpError(RunError):
    """The other side has given up an update. It knows why."""


def sync_error(what: str, kind: type[RunError] = RunError) -> RunError:
    return kind(
        what,
        where="weight sync",
        rule="every packet arrives whole, in order and in time, or the update fails",
        way_out="the run sends everything once more by itself; if that fails too, read the logs of both sides",
    )


class Deadline:
    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.end = time.monotonic() + timeout_s

    def left_s(self) -> float:
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
    return arena[packet.start : packet.start + packet.bucket.num_bytes]


def as_hex(checksum: int) -> str:
    """A checksum as it is printed."""
    return f"{checksum & (1 << 64) - 1:016x}"
