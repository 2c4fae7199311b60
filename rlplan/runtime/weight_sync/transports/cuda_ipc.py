"""The CUDA IPC transport: the trainer writes packets into device memory that the engines on the same GPU have mapped.

In: packets. Out: payloads that are views of the trainer's arena: one copy in all, on the device. The shared pages carry
only counters and headers, as with shared memory. Left out: GPUs other than the sender's, and engines inside the
trainer's own process (CUDA does not open its own handles).
**Not yet run on a GPU.** Written against torch 2.11 to 2.13, `torch.multiprocessing.reductions`.

CUDA works behind the processor's back: a packet is published, and given back, when the stream has come so far. Memory
from expandable segments has no handle; the arena is allocated while they are off.
"""

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from rlplan.memory.weight_sync.packets import Packet, arena_bytes
from rlplan.runtime.weight_sync.channel import Endpoint, Header, sync_error
from rlplan.runtime.weight_sync.transports.shared_memory import SharedMemoryInlet, SharedMemoryOutlet

_DEVICE_ARGUMENT = 6
"""Where `rebuild_cuda_tensor` takes the device; a reader may see the same GPU under another number."""


class CudaIpcOutlet(SharedMemoryOutlet):
    @staticmethod
    def payload_bytes(packets: Sequence[Packet]) -> int:
        """Nothing behind the control pages: payloads lie on the device."""
        return 0

    def __init__(self, endpoint: Endpoint, packets: Sequence[Packet]) -> None:
        super().__init__(endpoint, packets)
        # as bytes: they pass through the driver, which has no torch
        handles = pickle.dumps((gpu_uuid(), torch.multiprocessing.reductions.reduce_tensor(self.arena)))
        self.endpoint = replace(self.endpoint, handles=handles)

    def publish(self, header: Header) -> None:
        """Let the readers have the packet, when it is written."""
        torch.cuda.current_stream().synchronize()
        super().publish(header)

    def _memory(self) -> torch.Tensor:
        set_segments = getattr(torch.cuda.memory, "_set_allocator_settings", None)
        if set_segments is not None:
            set_segments("expandable_segments:False")
        return torch.zeros(arena_bytes(self.packets), dtype=torch.uint8, device="cuda")


class CudaIpcInlet(SharedMemoryInlet):
    def release(self, index: int) -> None:
        """The packet has been read, when the stream has come so far."""
        torch.cuda.current_stream().synchronize()
        super().release(index)

    def _memory(self) -> Any:
        uuid, (rebuild, arguments) = pickle.loads(self.endpoint.handles)  # from a process of this run
        if uuid != gpu_uuid():
            raise sync_error(f"the sender's arena lies on GPU {uuid}, and this process computes on {gpu_uuid()}")
        arguments = list(arguments)
        arguments[_DEVICE_ARGUMENT] = torch.cuda.current_device()
        return rebuild(*arguments)


def gpu_uuid() -> str:
    """Of the GPU that this process computes on: its number says nothing to a process that sees others."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
