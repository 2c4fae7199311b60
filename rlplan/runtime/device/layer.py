"""The device layer: all that the runtime asks of an accelerator, behind one interface.

In: a place where tensors lie. Out: the device there, or None where that is the host's own memory. CUDA answers
(cuda.py, with nvml.py the only files that call it); without a GPU tests have a stand-in (tests/runtime/device/).
Left out: what torch itself does with a tensor on a device; which GPUs a machine has (host/detect.py).
This module imports no torch: processes that hold nothing on a device read it, too.
"""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    allocated: int
    """In tensors now, by torch's allocator."""

    peak_allocated: int
    """The most in tensors since the peak was reset, by torch's allocator."""

    reserved: int
    """That torch's allocator keeps, in tensors or not."""

    process: int
    """Of this process by the driver, context and libraries included; 0 where it does not tell processes apart."""

    total: int
    """In use on the whole GPU, by the driver."""

    @property
    def peak(self) -> int:
        """The most that tensors took, with the process's context and libraries where the driver tells them apart."""
        return self.peak_allocated + max(0, self.process - self.reserved)

    @property
    def held(self) -> int:
        """What the process keeps from others; of the whole GPU where the driver does not tell processes apart.

        Torch's own count does not know what vLLM's sleeping allocator gives back. A difference between two moments at
        which the others held the same is right either way.
        """
        return self.process or self.total


class Event(Protocol):
    """A mark on a stream."""

    def record(self, stream: Any) -> None:
        """Behind what the stream has to do now."""

    def query(self) -> bool:
        """Whether the stream has come so far."""
        ...


class Device(Protocol):
    """An accelerator as a process sees it."""

    place: "torch.device"
    """Where its tensors lie."""

    collectives: str
    """The backends of torch.distributed for ranks that compute on such devices."""

    def begin(self) -> None:
        """This process computes here from now on."""

    def finish(self) -> None:
        """Wait for everything that it still has to do."""

    def finish_stream(self) -> None:
        """Wait for what was asked of it on the current stream."""

    def new_stream(self) -> Any:
        """A stream beside the current one."""

    def follow(self, stream: Any) -> None:
        """Let a stream wait for what was asked on the current one."""

    def new_event(self) -> Event:
        """A mark, recorded nowhere yet."""
        ...

    def uuid(self) -> str:
        """Of the device: its number says nothing to a process that sees others."""
        ...

    def capability(self) -> tuple[int, int]:
        """Compute capability."""
        ...

    def pinned(self, num_bytes: int) -> "torch.Tensor":
        """Bytes of the host's memory that the device can fetch by itself."""
        ...

    def shareable(self, num_bytes: int) -> "torch.Tensor":
        """Zeroed bytes on the device that other processes can open."""
        ...

    def share(self, memory: "torch.Tensor") -> Any:
        """A handle of shareable bytes that can be pickled; they stay as long as this process holds them."""

    def open(self, handle: Any) -> "torch.Tensor":
        """The same bytes, of another process on the same device."""
        ...

    def meet(self, host: str, port: int, rank: int, num_ranks: int) -> tuple[Any, Any]:
        """(group, communicator) of ranks on several devices; rank 0 listens at the address.

        The group has `broadcast_obj` and `barrier`, the communicator `broadcast` on a stream and `destroy`, as vLLM's.
        """
        ...

    def empty_cache(self) -> None:
        """Give what torch's allocator keeps of freed memory back, for others on the device."""

    def free_bytes(self) -> int:
        """On the whole device."""
        ...

    def held(self) -> DeviceBytes:
        """What this process holds now."""
        ...

    def reset_peak(self) -> None:
        """Count the peak from now on."""

    def generator_state(self) -> "torch.Tensor":
        """Of the device's random numbers, as bytes on the host."""
        ...

    def set_generator_state(self, state: "torch.Tensor") -> None:
        """As `generator_state` gave it."""


_standing_in: list[Device] = []
"""Simulated devices of the tests, the newest last; always empty in a run."""


def present() -> Device | None:
    """The device that this process can compute on, None where it sees none."""
    if _standing_in:
        return _standing_in[-1]
    from rlplan.runtime.device.cuda import CudaDevice, is_there

    return CudaDevice() if is_there() else None


def device_of(place: "torch.device") -> Device | None:
    """The device on which tensors of a place lie, None for plain host memory."""
    for device in reversed(_standing_in):
        if device.place.type == place.type:
            return device
    if place.type == "cpu":
        return None
    from rlplan.runtime.device.cuda import CudaDevice

    return CudaDevice(place)


def begun() -> Device | None:
    """The device that this process holds something on. Torch is not imported for it, and no context is made."""
    if _standing_in:
        return _standing_in[-1]
    if "torch" not in sys.modules:
        return None
    from rlplan.runtime.device.cuda import CudaDevice, has_context

    return CudaDevice() if has_context() else None
