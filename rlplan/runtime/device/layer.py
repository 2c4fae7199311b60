"""The device layer: everything that the runtime asks of an accelerator.

In: the torch device of tensors. Out: a CudaDevice, or None for host memory. Only cuda.py and nvml.py call CUDA or NVML.
Tests without a GPU use a stand-in (tests/runtime/device/).
Left out: operations of torch on tensors; which GPUs a machine has (host/detect.py).
This module must not import torch, because processes without tensors read it too.
"""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from rlplan.runtime.device.cuda import CudaDevice


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

        Torch's own count misses memory that vLLM's sleep mode frees. The difference between two moments is right in
        both cases, unless another process's memory changed in between.
        """
        return self.process or self.total


class Event(Protocol):
    """An event on a stream, as torch's."""

    def record(self, stream: Any) -> None:
        """Record the event after the work that is queued on the stream."""

    def query(self) -> bool:
        """Whether the stream has completed the work before the event."""
        ...


_standing_in: "list[CudaDevice]" = []
"""Stand-in devices of the tests, the newest last; always empty in a run."""


def present() -> "CudaDevice | None":
    """The device that this process can compute on, or None."""
    if _standing_in:
        return _standing_in[-1]
    from rlplan.runtime.device.cuda import CudaDevice, is_there

    return CudaDevice() if is_there() else None


def device_of(place: "torch.device") -> "CudaDevice | None":
    """The device layer's device for a torch device; None for host memory."""
    for device in reversed(_standing_in):
        if device.place.type == place.type:
            return device
    if place.type == "cpu":
        return None
    from rlplan.runtime.device.cuda import CudaDevice

    return CudaDevice(place)


def begun() -> "CudaDevice | None":
    """The device on which this process already has a context, or None. Imports no torch and creates no context."""
    if _standing_in:
        return _standing_in[-1]
    if "torch" not in sys.modules:
        return None
    from rlplan.runtime.device.cuda import CudaDevice, has_context

    return CudaDevice() if has_context() else None
