"""The device layer: one interface for everything that the runtime asks of an accelerator.

In: a place of tensors. Out: the device there, or None for host memory. CUDA implements it in cuda.py; only that file
and nvml.py call CUDA or NVML. Tests without a GPU use a stand-in (tests/runtime/device/).
Left out: operations of torch on tensors; which GPUs a machine has (host/detect.py).
This module must not import torch, because processes without tensors read it too.
"""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Bytes in use on a device at one moment."""

    allocated: int
    """Bytes in tensors now, by torch's allocator."""

    peak_allocated: int
    """Largest bytes in tensors since the peak was reset, by torch's allocator."""

    reserved: int
    """Bytes that torch's allocator has taken from the device, in tensors or not."""

    process: int
    """Bytes of this process by the driver, with context and libraries; 0 if the driver does not report processes."""

    total: int
    """Bytes in use on the whole GPU, by the driver."""

    @property
    def peak(self) -> int:
        """Largest bytes of tensors, plus the process's context and libraries if the driver reports processes."""
        return self.peak_allocated + max(0, self.process - self.reserved)

    @property
    def held(self) -> int:
        """Bytes of the process, or of the whole GPU if the driver does not report processes.

        Torch's own count misses what vLLM's sleeping allocator frees. A difference between two moments is right in both
        cases, provided that other processes did not change.
        """
        return self.process or self.total


class Event(Protocol):
    """A mark on a stream."""

    def record(self, stream: Any) -> None:
        """Record the mark after the work that is queued on the stream."""

    def query(self) -> bool:
        """Whether the stream has reached the mark."""
        ...


class Device(Protocol):
    """An accelerator as a process sees it."""

    place: "torch.device"
    """The torch device of its tensors."""

    collectives: str
    """The backends of torch.distributed for ranks that compute on such devices."""

    def begin(self) -> None:
        """Make this the device of the process."""

    def finish(self) -> None:
        """Wait for all queued work of the device."""

    def finish_stream(self) -> None:
        """Wait for the queued work of the current stream."""

    def new_stream(self) -> Any:
        """A new stream that runs beside the current one."""

    def follow(self, stream: Any) -> None:
        """Let a stream wait for the queued work of the current one."""

    def new_event(self) -> Event:
        """A mark that is not recorded yet."""
        ...

    def uuid(self) -> str:
        """The device's UUID; its number differs between processes that see different devices."""
        ...

    def capability(self) -> tuple[int, int]:
        """The compute capability, major and minor."""
        ...

    def pinned(self, num_bytes: int) -> "torch.Tensor":
        """Pinned bytes of host memory, which the device can read by DMA."""
        ...

    def shareable(self, num_bytes: int) -> "torch.Tensor":
        """Zeroed bytes on the device that other processes can open."""
        ...

    def share(self, memory: "torch.Tensor") -> Any:
        """A picklable handle of shareable bytes. The bytes live as long as this process references them."""

    def open(self, handle: Any) -> "torch.Tensor":
        """The bytes behind a handle of another process on the same device."""
        ...

    def meet(self, host: str, port: int, rank: int, num_ranks: int) -> tuple[Any, Any]:
        """A group and a communicator of ranks on several devices; rank 0 listens at the address.

        As in vLLM, the group has `broadcast_obj` and `barrier`, and the communicator has `broadcast` on a stream and
        `destroy`.
        """
        ...

    def empty_cache(self) -> None:
        """Release the cached memory of torch's allocator to other processes on the device."""

    def free_bytes(self) -> int:
        """Free bytes of the whole device."""
        ...

    def held(self) -> DeviceBytes:
        """Bytes in use now."""
        ...

    def reset_peak(self) -> None:
        """Restart the count of the peak."""

    def generator_state(self) -> "torch.Tensor":
        """The state of the device's random generator, as bytes on the host."""
        ...

    def set_generator_state(self, state: "torch.Tensor") -> None:
        """Restore a state that `generator_state` returned."""


_standing_in: list[Device] = []
"""Stand-in devices of the tests, the newest last; always empty in a run."""


def present() -> Device | None:
    """The device that this process can compute on, or None."""
    if _standing_in:
        return _standing_in[-1]
    from rlplan.runtime.device.cuda import CudaDevice, is_there

    return CudaDevice() if is_there() else None


def device_of(place: "torch.device") -> Device | None:
    """The device of a place, or None for host memory."""
    for device in reversed(_standing_in):
        if device.place.type == place.type:
            return device
    if place.type == "cpu":
        return None
    from rlplan.runtime.device.cuda import CudaDevice

    return CudaDevice(place)


def begun() -> Device | None:
    """The device on which this process already has a context, or None. Imports no torch and creates no context."""
    if _standing_in:
        return _standing_in[-1]
    if "torch" not in sys.modules:
        return None
    from rlplan.runtime.device.cuda import CudaDevice, has_context

    return CudaDevice() if has_context() else None
