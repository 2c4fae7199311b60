"""The frozen base that a trainer rank and the engine on its device hold once: one memory, two processes.

In: a model's shape and, on the trainer's side, a module. Out: parameters that are views of the memory; a handle with
which the engine opens it. Left out: the engine's parameters (workers/engine/base_loading.py), when it can be done
(planner/shared_base.py).

On a CPU the memory is a file without a name, opened by the trainer's process id and descriptor: it goes with its last
process, however that ends, and an engine that was restarted opens it again. On a GPU it is the trainer's and opened by
CUDA IPC, through the device layer as in transports/cuda_ipc.py. **Not yet run on a GPU.**
The trainer counts its pages. The engine maps them privately, so that what it might write does not reach the trainer.
"""

import mmap
import os
import pickle
from collections.abc import Iterator
from typing import Any

import torch

from rlplan.errors import RunError
from rlplan.memory.serving.shared_base import SharedTensor, shared_base_bytes, shared_layout
from rlplan.runtime.device.layer import Device, device_of, present
from rlplan.runtime.measure.memory_meter import counted_elsewhere
from rlplan.runtime.weight_sync.channel import BaseHandle
from rlplan.spec.model import ModelSpec
from rlplan.units import format_bytes, round_up

WHERE = "rollout.shares_base"
_BASE_LAYER = ".base_layer."
"""PEFT's name for a linear layer beside which adapters stand."""


def base_error(what: str) -> RunError:
    return RunError(
        what,
        where=WHERE,
        rule="every weight of the engine is, bit by bit, one of the trainer's frozen base, on the same device",
        way_out=f"{WHERE}=false gives the engine weights of its own",
    )


class HeldBase:
    """The trainer's side: its base lies here as long as the process lives."""

    def __init__(self, model: ModelSpec, dtype: torch.dtype, place: torch.device) -> None:
        self.layout, self.dtype = shared_layout(model, dtype.itemsize), dtype
        self.num_bytes, self.device, self.descriptor = shared_base_bytes(model, dtype.itemsize), device_of(place), -1
        self.memory = self._host_memory() if self.device is None else self.device.shareable(self.num_bytes)

    def adopt_module(self, module: torch.nn.Module) -> None:
        """Copy the frozen parameters of a module in, one after the other, and leave views of them in their place.

        Raises: RunError where the module has others than the plan counts.
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
                part = part[: len(parameter)]  # behind it are the padded rows of a vocabulary table
                part.copy_(parameter.data)
                parameter.data = part
        if parameters:
            raise base_error(f"the trainer's weight {next(iter(parameters))} is none of the engine's")

    def handle(self) -> BaseHandle:
        if self.device is None:
            return BaseHandle(self.num_bytes, os.getpid(), self.descriptor)
        opener = pickle.dumps((self.device.uuid(), self.device.share(self.memory)))
        self.device.finish()  # what was copied in is there before anybody reads it
        return BaseHandle(self.num_bytes, os.getpid(), on_device=opener)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self.memory.untyped_storage().data_ptr()

    def _host_memory(self) -> torch.Tensor:
        """Zeroed pages, all of them taken at once: what is missing is said here, and not by a signal later."""
        self.descriptor = os.memfd_create("rlplan-base")
        try:
            os.posix_fallocate(self.descriptor, 0, self.num_bytes)
        except OSError as error:
            os.close(self.descriptor)
            raise base_error(f"{format_bytes(self.num_bytes)} for the base cannot be had: {error.strerror}") from None
        return torch.frombuffer(mmap.mmap(self.descriptor, self.num_bytes), dtype=torch.uint8)


class OpenedBase:
    """The engine's side. Raises: RunError where the trainer's memory cannot be opened here."""

    def __init__(self, handle: BaseHandle, model: ModelSpec, dtype: torch.dtype) -> None:
        wanted = shared_base_bytes(model, dtype.itemsize)
        if handle.num_bytes != wanted:
            raise base_error(f"the trainer's base has {handle.num_bytes} bytes, the engine's weights take {wanted}")
        self.num_bytes, self.is_on_host = wanted, handle.descriptor >= 0
        self.memory = _map_host_memory(handle) if self.is_on_host else _open_device_memory(handle, present())
        with counted_elsewhere(self._num_counted):
            if self.is_on_host:
                int(self.memory[:: mmap.PAGESIZE].sum())  # a page is mapped when it is touched
        self.layout = shared_layout(model, dtype.itemsize)
        self.tensors = {tensor.name: base_view(self.memory, tensor, dtype) for tensor in self.layout}
        self._rows = {parameter.name: parameter.shape[0] for parameter in model.parameters}

    def weights(self) -> Iterator[tuple[str, torch.Tensor, str]]:
        """(name, tensor) of each weight as the trainer has it, and the engine's tensor of which it is a part.

        The last part of a tensor comes last of it.
        """
        for tensor in self.layout:
            first = 0
            for member in tensor.members:
                yield member.name, self.tensors[tensor.name][first : first + self._rows[member.name]], tensor.name
                first += member.shape[0]

    @property
    def _num_counted(self) -> int:
        """Bytes of the host's pages that the trainer counts: in whole pages, as the kernel does."""
        return round_up(self.num_bytes, mmap.PAGESIZE) if self.is_on_host else 0

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self.memory.untyped_storage().data_ptr()

    def close(self) -> None:
        """Let go, when the engine's parameters are gone."""
        with counted_elsewhere(-self._num_counted):
            del self.memory, self.tensors


def base_view(memory: torch.Tensor, tensor: SharedTensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor where it lies in the memory."""
    return memory[tensor.start : tensor.start + tensor.num_bytes].view(dtype).view(tensor.shape)


def _fits(parameter: torch.Tensor, part: torch.Tensor) -> bool:
    same = parameter.dtype is part.dtype and parameter.shape[1:] == part.shape[1:]
    return same and len(parameter) <= len(part)


def _map_host_memory(handle: BaseHandle) -> torch.Tensor:
    path = f"/proc/{handle.process_id}/fd/{handle.descriptor}"
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise base_error(f"the memory of the trainer's process cannot be opened ({path}): {error.strerror}") from None
    try:
        if os.fstat(descriptor).st_size != handle.num_bytes:
            raise base_error(f"{path} has {os.fstat(descriptor).st_size} bytes, the base {handle.num_bytes}")
        memory = mmap.mmap(descriptor, handle.num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _open_device_memory(handle: BaseHandle, device: Device | None) -> Any:
    if device is None:
        raise base_error("the engine sees no GPU, and the trainer's base lies in a GPU's memory")
    uuid, opener = pickle.loads(handle.on_device)  # from a process of this run
    if uuid != device.uuid():
        raise base_error(f"the trainer's base lies on GPU {uuid}, and the engine computes on {device.uuid()}")
    return device.open(opener)
