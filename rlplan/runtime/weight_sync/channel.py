"""Channel: the interface of all transports, which carry packets from a trainer process to all engine processes.

In: packets, each with a place in a bounded memory (memory/weight_sync/packets.py). Out: the same bytes on the other
side, with their version and a checksum (checksums.py).
Left out: the contents of packets (contents/). This module does not import torch, because the driver imports it.

An update is one pass over all packets. The driver numbers updates (`serial`), so that packets left over from a failed
update are never mistaken for packets of the next one.
"""

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol, cast

from rlplan.errors import RunError
from rlplan.memory.weight_sync.packets import Packet
from rlplan.vocabulary import Transport

if TYPE_CHECKING:
    import torch

LONGEST_PAUSE_S = 1e-4
"""Longest pause between two polls of a counter: packets take milliseconds, a poll takes microseconds."""


class Encoding(IntEnum):
    """Encoding of a packet's payload: all weights in place, or only the changes."""

    FULL = 0
    DELTA = 1


@dataclass(frozen=True, slots=True)
class Update:
    """One attempt to send the weights."""

    serial: int
    """Number of the attempt."""

    version: int
    """Weight version that the engines hold afterwards."""

    is_full: bool
    """All weights are sent, so the update does not depend on earlier ones."""

    timeout_s: float
    """Time limit for the entire update."""

    verifies: bool = False
    """Verification: engines that hold this version load it again and compare; adapters are compared without loading."""


@dataclass(frozen=True, slots=True)
class VerificationReport:
    """An engine process's comparison of its own parameters with the trainer's weights."""

    num_compared: int
    """Compared parameters, buffers and packed matrices of the engine; or compared matrices of the adapter."""

    different: tuple[str, ...] = ()
    """Parameters that do not equal the trainer's weights."""

    untaken: tuple[str, ...] = ()
    """Weights of the trainer, by checkpoint name, that no parameter loaded."""

    kept_back: tuple[str, ...] = ()
    """Weights that vLLM had not read when their packet was released, so a later packet may have overwritten them."""

    not_compared: tuple[str, ...] = ()
    """Parameters with padding that vLLM never writes; or matrices of the adapter that cannot be read back."""

    is_conclusive: bool = True
    """False while every B of an adapter is zero, before the first step; the next update is then verified too."""


@dataclass(frozen=True, slots=True)
class SendReport:
    """The sender's result of an update."""

    num_bytes: int
    full_bytes: int
    """Bytes that a full update would have sent."""

    checksums: dict[str, int] = field(repr=False)
    """Checksum of every weight that the trainer holds, by name, whether or not it was sent."""


@dataclass(slots=True)
class ReceiveReport:
    """A receiver's result of an update."""

    num_bytes: int = 0
    applied_s: float = 0.0
    """Seconds that the engine spent loading received tensors."""

    checksums: dict[str, int] = field(default_factory=dict, repr=False)
    """Checksum of every weight as loaded, by name; empty if the update failed."""

    mismatch: str = ""
    """The packet whose checksum changed on the way, in words; empty without a mismatch."""


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a packet: seven 64-bit integers."""

    serial: int
    version: int
    index: int
    """Index of the packet within the update, from 0."""

    encoding: int
    """An `Encoding`."""

    base: int
    """Serial of the update that a delta builds on; 0 for a full packet."""

    num_bytes: int
    """Size of the payload, rounded up to 64."""

    checksum: int
    """Checksum over the weights of a full packet, or over the bytes of a delta."""

    def words(self) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)


HEADER_WORDS = len(Header.__slots__)


@dataclass(frozen=True, slots=True)
class Endpoint:
    transport: Transport
    num_readers: int
    """Engine processes that read."""

    dtype: str = "float32"
    """Torch's name of the type in which weights are sent."""

    path: str = ""
    """The shared file or folder, for transports that use one."""

    host: str = "127.0.0.1"
    """The sender's address, for transports over a network."""

    port: int = 0
    """The sender's port, for transports over a network."""

    timeout_s: float = 60.0
    """Time limit for readers to connect, and for one collective operation."""

    handles: Any = field(default=None, repr=False)
    """Handles of device memory, pickled; None for transports through host memory."""


@dataclass(frozen=True, slots=True)
class BaseHandle:
    """Handle with which another process on the same device opens a trainer's frozen base."""

    num_bytes: int
    process_id: int
    descriptor: int = -1
    """Descriptor of the memory file in that process; -1 if the memory is a GPU's."""

    on_device: bytes = field(default=b"", repr=False)
    """The GPU's id and its IPC handle, pickled: they pass through the driver, which does not import torch."""


class _Side(Protocol):
    """Either side of a transport. num_bytes: memory that payloads take in this process."""

    num_bytes: int

    def begin(self, update: Update) -> None:
        """Prepare for an update."""

    def abort(self) -> None:
        """Mark this update as failed, so that the other sides stop waiting for it."""

    def close(self) -> None:
        """Release all resources; idempotent."""


class Outlet(_Side, Protocol):
    """The trainer's side. Packets are written in order, each once per update. endpoint: the address for readers."""

    endpoint: Endpoint

    def connect(self) -> None:
        """Wait until the readers have connected, if the transport requires it."""

    def buffer(self, index: int) -> "torch.Tensor":
        """Wait until a packet's memory may be overwritten, and return it as bytes."""
        ...

    def publish(self, header: Header) -> None:
        """Make a written packet available to the readers."""

    def finish(self) -> None:
        """Wait until every reader has read all packets."""


class Inlet(_Side, Protocol):
    """A reader's side."""

    def take(self, index: int) -> "tuple[Header, torch.Tensor]":
        """Wait for a packet; return its header and its bytes, which stay valid until `release`."""
        ...

    def release(self, index: int) -> None:
        """Allow the sender to overwrite the packet's memory."""


_MODULES = {
    Transport.SHARED_MEMORY: ("shared_memory", "SharedMemory"),
    Transport.GLOO: ("gloo", "Gloo"),
    Transport.DISK: ("disk", "Disk"),
    Transport.CUDA_IPC: ("cuda_ipc", "CudaIpc"),
    Transport.NCCL: ("nccl", "Nccl"),
}
"""Module and prefix of the classes of each transport, which are imported only where they are used."""


def make_outlet(endpoint: Endpoint, packets: Sequence[Packet]) -> Outlet:
    """Create the sender's side; its `endpoint` names the file, port or device memory that readers open."""
    return cast(Outlet, _load_class(endpoint, "Outlet")(endpoint, packets))


def open_inlet(endpoint: Endpoint, packets: Sequence[Packet], reader: int) -> Inlet:
    """Create a reader's side. reader: its number among all processes of all engines."""
    return cast(Inlet, _load_class(endpoint, "Inlet")(endpoint, packets, reader))


def _load_class(endpoint: Endpoint, side: str) -> Any:
    module, prefix = _MODULES[endpoint.transport]
    return getattr(importlib.import_module(f"rlplan.runtime.weight_sync.transports.{module}"), prefix + side)


def check_packet(header: Header, payload: "torch.Tensor", update: Update, index: int) -> None:
    """Raises: RunError when a packet is not the expected one, or is incomplete."""
    if (header.serial, header.version, header.index) != (update.serial, update.version, index):
        raise sync_error(
            f"received packet {header.index} of update {header.serial} (version {header.version}), expected packet "
            f"{index} of update {update.serial} (version {update.version})"
        )
    if header.num_bytes != payload.numel():
        raise sync_error(f"packet {index} has {payload.numel()} of {header.num_bytes} bytes")


class GivenUpError(RunError):
    """The other side has aborted an update; its own error names the reason."""


def sync_error(what: str, kind: type[RunError] = RunError) -> RunError:
    return kind(
        what,
        where="weight sync",
        rule="every packet arrives complete, in order and in time, or the update fails",
        way_out="the run sends all weights once more automatically; if that fails too, read the logs of both sides",
    )


class Deadline:
    """A point in time until which to wait."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.end = time.monotonic() + timeout_s

    def left_s(self) -> float:
        return max(1e-3, self.end - time.monotonic())

    def wait(self, is_ready: Callable[[], bool], what: str) -> None:
        """Poll `is_ready`, with growing pauses. Raises: RunError at the deadline."""
        pause_s = 2e-5  # most waits are short; longer pauses spare the CPU in long ones
        while not is_ready():
            if time.monotonic() > self.end:
                raise sync_error(f"{what} did not happen within {self.timeout_s:.1f} s")
            time.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, pause_s * 1.5)


def packet_view(arena: "torch.Tensor", packet: Packet) -> "torch.Tensor":
    return arena[packet.start : packet.start + packet.bucket.num_bytes]


def as_hex(checksum: int) -> str:
    """A checksum as 16 hexadecimal digits."""
    return f"{checksum & (1 << 64) - 1:016x}"
