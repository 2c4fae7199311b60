"""The CUDA IPC transport: the trainer writes packets into device memory that engines on the same GPU have mapped.

In: packets. Out: payloads that are views of the trainer's arena, so there is one copy per GPU. The shared pages hold
only counters and headers. Left out: GPUs other than the sender's, and engines inside the trainer's process, because
CUDA opens no handle in the process that made it.
**Not yet run on a GPU**; tested with the simulated device of the tests (tests/runtime/device).

CUDA operations are asynchronous: a packet is published or released only after the stream has finished with it.
"""

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from rlplan.memory.weight_sync.packets import Packet, arena_bytes
from rlplan.runtime.device.cuda import CudaDevice
from rlplan.runtime.device.layer import present
from rlplan.runtime.weight_sync.channel import Header, sync_error
from rlplan.runtime.weight_sync.transports.shared_memory import SharedMemoryInlet, SharedMemoryOutlet


class CudaIpcOutlet(SharedMemoryOutlet):
    @staticmethod
    def payload_bytes(packets: Sequence[Packet]) -> int:
        """Payload bytes in the shared file: none, because payloads lie on the device."""
        return 0

    def handles(self) -> bytes:
        """The GPU's id and its IPC handle, pickled: they pass through the driver, which does not import torch."""
        device = require_device()
        return pickle.dumps((device.uuid(), device.share(self.arena)))

    def publish(self, header: Header) -> None:
        """Make the packet available to the readers once the stream has written it."""
        require_device().finish_stream()
        super().publish(header)

    def _memory(self) -> torch.Tensor:
        return require_device().shareable(arena_bytes(self.packets))


class CudaIpcInlet(SharedMemoryInlet):
    def release(self, index: int) -> None:
        """Release the packet once the stream has read it."""
        require_device().finish_stream()
        super().release(index)

    def _memory(self) -> Any:
        device = require_device()
        uuid, handle = pickle.loads(self.endpoint.handles)  # trusted: written by a process of this run
        if uuid != device.uuid():
            raise sync_error(f"the sender's arena is on GPU {uuid}, but this process runs on GPU {device.uuid()}")
        return device.open(handle)


def require_device() -> CudaDevice:
    """The GPU of this process. Raises: RunError where it sees none."""
    device = present()
    if device is None:
        raise sync_error("this process sees no GPU, but its transport uses GPU memory")
    return device
