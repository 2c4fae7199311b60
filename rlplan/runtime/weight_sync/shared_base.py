"""The shared base: a trainer rank and the engine on its device hold the frozen base weights once, in shared memory.

In: a model's shape and, on the trainer's side, a module. Out: parameters that are views of the memory; a handle with
which the engine opens it. Left out: the engine's parameters (workers/engine/base_loading.py), when sharing is possible
(planner/checks/engine_base.py).

On a CPU the memory is an unnamed file, opened by the trainer's process id and descriptor. It disappears with its last
process, however that ends, and a restarted engine opens it again. The trainer counts its pages in its memory figures.
The engine maps them copy-on-write, so it cannot change the trainer's weights. On a GPU the trainer allocates the memory
and the engine opens it by CUDA IPC, as in transports/cuda_ipc.py. **Not yet run on a GPU.**
"""

import mmap
import os
import pickle
from collections.abc import Iterator
from typing import Any

import torch

from rlplan.errors import RunError
from rlplan.memory.model.engine_base import SharedTensor, build_shared_layout, shared_base_bytes
from rlplan.runtime.device.cuda import CudaDevice
from rlplan.runtime.device.layer import device_of, present
from rlplan.runtime.measure.memory_meter import counted_elsewhere
from rlplan.runtime.weight_sync.channel import BaseHandle
from rlplan.spec.model import ModelSpec
from rlplan.units import format_bytes, round_up

WHERE = "rollout.shares_base"
_BASE_LAYER = ".base_layer."
"""Part of a parameter's name where PEFT wraps a linear layer with an adapter."""


def base_error(what: str) -> RunError:
    return RunError(
        what,
        where=WHERE,
        rule="every weight of the engine equals one of the trainer's frozen base, bit for bit, on the same device",
        way_out=f"{WHERE}=false gives the engine its own copy of the weights",
    )


class _SharedMemory:
    """Memory that both sides map."""

    memory: torch.Tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a view of the memory."""
        return tensor.untyped_storage().data_ptr() == self.memory.untyped_storage().data_ptr()


class HeldBase(_SharedMemory):
    """The trainer's side: owns the base for the lifetime of the process."""

    def __init__(self, model: ModelSpec, dtype: torch.dtype, place: torch.device) -> None:
        self.layout, self.dtype = build_shared_layout(model, dtype.itemsize), dtype
        self.num_bytes, self.device, self.descriptor = shared_base_bytes(model, dtype.itemsize), device_of(place), -1
        self.memory = self._host_memory() if self.device is None else self.device.shareable(self.num_bytes)

    def adopt_module(self, module: torch.nn.Module) -> None:
        """Copy a module's frozen parameters into the base one by one, and replace them by views.

        Raises: RunError where the module's frozen parameters are not those of the plan.
        """
        named = module.named_parameters()
        parameters = {name.replace(_BASE_LAYER, "."): p for name, p in named if ".lora_" not in name}
        for tensor in self.layout:
            view, first = base_view(self.memory, tensor, self.dtype), 0
            for member in tensor.members:
                parameter = parameters.pop(member.name, None)
                part = view[first : first + member.shape[0]]
                first += member.shape[0]
                if parameter is None or parameter.requires_grad or not _fits(parameter, part):
                    raise base_error(f"the trainer has no frozen {part.dtype} {member.name} of {member.shape}")
                part = part[: len(parameter)]  # without vLLM's padding rows of the vocabulary
                part.copy_(parameter.data)
                parameter.data = part
        if parameters:
            raise base_error(f"the trainer's weight {next(iter(parameters))} is not a weight of the engine")

    def handle(self) -> BaseHandle:
        if self.device is None:
            return BaseHandle(self.num_bytes, os.getpid(), self.descriptor)
        opener = pickle.dumps((self.device.uuid(), self.device.share(self.memory)))
        self.device.finish()  # complete the copies before the engine reads the memory
        return BaseHandle(self.num_bytes, os.getpid(), on_device=opener)

    def _host_memory(self) -> torch.Tensor:
        """Zeroed pages, all allocated now: otherwise a lack of memory would end the process by a signal later."""
        self.descriptor = os.memfd_create("rlplan-base")
        try:
            os.posix_fallocate(self.descriptor, 0, self.num_bytes)
        except OSError as error:
            os.close(self.descriptor)
            raise base_error(f"cannot allocate {format_bytes(self.num_bytes)} for the base: {error.strerror}") from None
        return torch.frombuffer(mmap.mmap(self.descriptor, self.num_bytes), dtype=torch.uint8)


class OpenedBase(_SharedMemory):
    """The engine's side. Raises: RunError where the trainer's memory cannot be opened here."""

    def __init__(self, handle: BaseHandle, model: ModelSpec, dtype: torch.dtype) -> None:
        wanted = shared_base_bytes(model, dtype.itemsize)
        if handle.num_bytes != wanted:
            raise base_error(
                f"the trainer's base has {handle.num_bytes} bytes, the engine's weights need {wanted} bytes"
            )
        self.num_bytes, self.is_on_host = wanted, handle.descriptor >= 0
        self.memory = _map_host_memory(handle) if self.is_on_host else _open_device_memory(handle, present())
        with counted_elsewhere(self._num_counted):
            if self.is_on_host:
                int(self.memory[:: mmap.PAGESIZE].sum())  # touch every page, so that it is mapped
        self.layout = build_shared_layout(model, dtype.itemsize)
        self.tensors = {tensor.name: base_view(self.memory, tensor, dtype) for tensor in self.layout}
        self._rows = {parameter.name: parameter.shape[0] for parameter in model.parameters}

    def weights(self) -> Iterator[tuple[str, torch.Tensor, str]]:
        """Yield (name, tensor) of each of the trainer's weights, and the name of the engine's tensor it is a part of.

        The parts of an engine's tensor follow each other in order.
        """
        for tensor in self.layout:
            first = 0
            for member in tensor.members:
                yield member.name, self.tensors[tensor.name][first : first + self._rows[member.name]], tensor.name
                first += member.shape[0]

    @property
    def _num_counted(self) -> int:
        """Bytes of host pages that the trainer counts, rounded up to pages as in the kernel's statistics."""
        return round_up(self.num_bytes, mmap.PAGESIZE) if self.is_on_host else 0

    def close(self) -> None:
        """Release the memory. The engine's parameters, which are views of it, must be freed before."""
        with counted_elsewhere(-self._num_counted):
            del self.memory, self.tensors


def base_view(memory: torch.Tensor, tensor: SharedTensor, dtype: torch.dtype) -> torch.Tensor:
    """View of a tensor in the shared memory."""
    return memory[tensor.start : tensor.start + tensor.num_bytes].view(dtype).view(tensor.shape)


def _fits(parameter: torch.Tensor, part: torch.Tensor) -> bool:
    same = parameter.dtype is part.dtype and parameter.shape[1:] == part.shape[1:]
    return same and len(parameter) <= len(part)


def _map_host_memory(handle: BaseHandle) -> torch.Tensor:
    path = f"/proc/{handle.process_id}/fd/{handle.descriptor}"
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise base_error(f"cannot open the memory of the trainer's process ({path}): {error.strerror}") from None
    try:
        if os.fstat(descriptor).st_size != handle.num_bytes:
            raise base_error(f"{path} has {os.fstat(descriptor).st_size} bytes, the base has {handle.num_bytes} bytes")
        memory = mmap.mmap(descriptor, handle.num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _open_device_memory(handle: BaseHandle, device: CudaDevice | None) -> Any:
    if device is None:
        raise base_error("the engine sees no GPU, but the trainer's base is in GPU memory")
    uuid, opener = pickle.loads(handle.on_device)  # trusted: written by a process of this run
    if uuid != device.uuid():
        raise base_error(f"the trainer's base is on GPU {uuid}, but the engine runs on GPU {device.uuid()}")
    return device.open(opener)
