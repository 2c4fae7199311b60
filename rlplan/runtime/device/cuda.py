"""CUDA behind the device layer. Only this file and nvml.py have lines that need a GPU to run.

In: a torch device, by default the GPU that this process computes on. Out: a CudaDevice. docs/gpu.md prints every line
of this file that calls CUDA. **Not yet run on a GPU.** Written against torch 2.11 to 2.13.

Memory from expandable segments has no IPC handle, so shared memory is allocated while they are off.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from rlplan.runtime.device.layer import DeviceBytes, Event
from rlplan.runtime.device.nvml import bytes_of_this_process

_DEVICE_ARGUMENT = 6
"""Index of the device among the arguments of `rebuild_cuda_tensor`; a reader may see the GPU under another number."""


def is_there() -> bool:
    return torch.cuda.is_available()


def has_context() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def num_devices() -> int:
    return torch.cuda.device_count()


class CudaDevice:
    """An accelerator as a process sees it. place: the torch device of its tensors."""

    collectives = "cpu:gloo,cuda:nccl"
    """The backends of torch.distributed for ranks that compute on such devices."""

    def __init__(self, place: torch.device | None = None) -> None:
        self.place = place or torch.device("cuda", torch.cuda.current_device())

    def begin(self) -> None:
        """Make this the current device of the process."""
        # Libraries that create a context by themselves take the current device.
        torch.cuda.set_device(self.place)

    def finish(self) -> None:
        """Wait for all queued work of the device."""
        torch.cuda.synchronize()

    def finish_stream(self) -> None:
        """Wait for the queued work of the current stream."""
        torch.cuda.current_stream(self.place).synchronize()

    def new_stream(self) -> Any:
        """A new stream that runs beside the current one."""
        return torch.cuda.Stream(self.place)

    def follow(self, stream: Any) -> None:
        """Let a stream wait for the queued work of the current one."""
        stream.wait_stream(torch.cuda.current_stream(self.place))

    def new_event(self) -> Event:
        """A new event, not recorded yet."""
        return torch.cuda.Event()

    def uuid(self) -> str:
        """The device's UUID; its number differs between processes that see different devices."""
        return str(torch.cuda.get_device_properties(self.place).uuid)

    def capability(self) -> tuple[int, int]:
        """The compute capability, major and minor."""
        return torch.cuda.get_device_capability(self.place)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Pinned bytes of host memory, which the device can read by DMA."""
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def shareable(self, num_bytes: int) -> torch.Tensor:
        """Zeroed bytes on the device that other processes can open."""
        set_segments = getattr(torch.cuda.memory, "_set_allocator_settings", None)
        if set_segments is not None:
            set_segments("expandable_segments:False")
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.place)

    def share(self, memory: torch.Tensor) -> Any:
        """A picklable handle of shareable bytes. The bytes live as long as this process references them."""
        return torch.multiprocessing.reductions.reduce_tensor(memory)

    def open(self, handle: Any) -> torch.Tensor:
        """The bytes behind a handle of another process on the same device."""
        rebuild, arguments = handle[0], list(handle[1])
        arguments[_DEVICE_ARGUMENT] = torch.cuda.current_device()
        opened: torch.Tensor = rebuild(*arguments)
        return opened

    def meet(self, host: str, port: int, rank: int, num_ranks: int) -> tuple[Any, Any]:
        """A group and a communicator of ranks on several devices; rank 0 listens at the address.

        As in vLLM, the group has `broadcast_obj` and `barrier`, and the communicator has `broadcast` on a stream and
        `destroy`.
        """
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        group = StatelessProcessGroup.create(host, port, rank, num_ranks)
        with _free_nccl_settings():
            return group, PyNcclCommunicator(group, device=self.place)

    def empty_cache(self) -> None:
        """Release the cached memory of torch's allocator to other processes on the device."""
        torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        """Free bytes of the whole device."""
        return int(torch.cuda.mem_get_info()[0])

    def held(self) -> DeviceBytes:
        """Bytes in use now."""
        free, total = torch.cuda.mem_get_info()
        return DeviceBytes(
            allocated=torch.cuda.memory_allocated(),
            peak_allocated=torch.cuda.max_memory_allocated(),
            reserved=torch.cuda.memory_reserved(),
            process=bytes_of_this_process(self.uuid()),
            total=total - free,
        )

    def reset_peak(self) -> None:
        """Restart the count of the peak."""
        torch.cuda.reset_peak_memory_stats()

    def generator_state(self) -> torch.Tensor:
        """The state of the device's random generator, as bytes on the host."""
        return torch.cuda.get_rng_state()

    def set_generator_state(self, state: torch.Tensor) -> None:
        """Restore a state that `generator_state` returned."""
        torch.cuda.set_rng_state(state)


def _free_nccl_settings() -> AbstractContextManager[Any]:
    """Undo vLLM's NCCL settings for a block: vLLM >= 0.28 pins NCCL_CUMEM_ENABLE, which both sides must share."""
    try:
        from vllm.utils.nccl import unpinned_nccl_env
    except ImportError:
        return nullcontext()
    context: AbstractContextManager[Any] = unpinned_nccl_env()
    return context
