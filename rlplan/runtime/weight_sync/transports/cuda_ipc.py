"""The CUDA IPC transport: the trainer writes packets into device memory that the engines on the same GPU have mapped.

In: packets. Out: payloads that are views of the trainer's arena: one copy in all, on the device. The shared pages carry
only counters and headers, as with shared memory. Left out: GPUs other than the sender's, and engines inside the
trainer's own process (CUDA does not open its own handles).
**Not yet run on a GPU**; run over the stand-in of the tests (tests/runtime/device).

CUDA works behind the processor's back: a packet is published, and given back, when the stream has come so far.
"""

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from rlplan.memory.weight_sync.packets import Packet, arena_bytes
from rlplan.runtime.device.layer import Device, present
from rlplan.runtime.weight_sync.channel import Header, sync_error
from rlplan.runtime.weight_sync.transports.shared_memory import SharedMemoryInlet, SharedMemoryOutlet


class CudaIpcOutlet(SharedMemoryOutlet):
    @staticmethod
    def payload_bytes(packets: Sequence[Packet]) -> int:
        """Nothing behind the control pages: payloads lie on the device."""
        return 0

    def handles(self) -> bytes:
        """The GPU's id and what opens the arena there, as bytes: they pass through the driver, which has no torch."""
        device = needed_device()
        return pickle.dumps((device.uuid(), device.share(self.arena)))

    def publish(self, header: Header) -> None:
        """Let the readers have the packet, when it is written."""
        needed_device().finish_stream()
        super().publish(header)

    def _memory(self) -> torch.Tensor:
        return needed_device().shareable(arena_bytes(self.packets))


class CudaIpcInlet(SharedMemoryInlet):
    def release(self, index: int) -> None:
        """The packet has been read, when the stream has come so far."""
        needed_device().finish_stream()
        super().release(index)

    def _memory(self) -> Any:
        device = needed_device()
        uuid, handle = pickle.loads(self.endpoint.handles)  # from a process of this run
        if uuid != device.uuid():
            raise sync_error(f"the sender's arena lies on GPU {uuid}, and this process computes on {device.uuid()}")
        return device.open(handle)


def needed_device() -> Device:
    """The GPU that this process computes on. Raises: RunError where it sees none."""
    device = present()
    if device is None:
        raise sync_error("this process sees no GPU, and its weights go through a GPU's memory")
    return device
