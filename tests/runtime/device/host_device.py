"""A stand-in for a GPU in the host's memory: a device of N bytes that runs out, whose memory other processes open.

In: its size. Out: what rlplan/runtime/device/cuda.py does, on tensors of the CPU: allocations are counted and end in
torch's own OutOfMemoryError where the device is full (host_memory.py); shared memory takes the place of CUDA IPC;
streams have nothing to wait for, as every operation is done when it returns. vLLM's engine sleeps on it with
host_sleep.py.
Left out: kernels (a tensor computes as on a CPU), and the context.
Counting holds in the thread that entered `host_device`; IPC and events in all.
"""

import mmap
import os
import pickle
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from rlplan.runtime.device.cuda import CudaDevice
from rlplan.runtime.device.layer import DeviceBytes, _standing_in
from tests.runtime.device.host_memory import CountedMemory, SharedBytes

CAPABILITY = (9, 0)


class HostDevice(CudaDevice):
    """See rlplan/runtime/device/cuda.py. num_bytes: what it has. number: tells it from others on the same host.

    shared: where the processes that share it count together; None where there is one.
    """

    collectives = "gloo"

    def __init__(self, num_bytes: int, number: int = 0, shared: SharedBytes | None = None) -> None:
        self.place, self.num_bytes, self.number = torch.device("cpu"), num_bytes, number
        self.memory = CountedMemory(num_bytes, shared)
        self._files: dict[int, int] = {}

    def begin(self) -> None:
        """There is one."""

    def finish(self) -> None:
        """Everything is done when it returns."""

    def finish_stream(self) -> None:
        """Everything is done when it returns."""

    def new_stream(self) -> Any:
        return None

    def follow(self, stream: Any) -> None:
        """Everything is done when it returns."""

    def new_event(self) -> "HostEvent":
        return HostEvent()

    def uuid(self) -> str:
        return f"HOST-{self.number}"

    def capability(self) -> tuple[int, int]:
        return CAPABILITY

    def pinned(self, num_bytes: int) -> torch.Tensor:
        memory = _mapped(-1, num_bytes)
        self.memory.leave_out(memory)
        return memory

    def shareable(self, num_bytes: int) -> torch.Tensor:
        file = os.memfd_create("rlplan-device")
        os.ftruncate(file, max(1, num_bytes))
        memory = _mapped(file, num_bytes)
        try:
            self.memory.count(memory)
        except BaseException:
            os.close(file)
            raise
        self._files[memory.data_ptr()] = file
        weakref.finalize(memory.untyped_storage(), self._close, memory.data_ptr())
        return memory

    def _close(self, address: int) -> None:
        os.close(self._files.pop(address))

    def share(self, memory: torch.Tensor) -> Any:
        return os.getpid(), self._files[memory.data_ptr()], memory.numel()

    def open(self, handle: Any) -> torch.Tensor:
        process, number, num_bytes = handle
        file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
        try:
            memory = _mapped(file, num_bytes)
        finally:
            os.close(file)
        self.memory.leave_out(memory)  # the other process's
        return memory

    def meet(self, host: str, port: int, rank: int, num_ranks: int) -> "tuple[HostGroup, HostGroup]":
        group = HostGroup(host, port, rank, num_ranks)
        return group, group

    def empty_cache(self) -> None:
        """Nothing is kept of what was freed."""

    def free_bytes(self) -> int:
        return self.num_bytes - self.memory.now - self.memory.of_others

    def held(self) -> DeviceBytes:
        now = self.memory.now
        return DeviceBytes(now, self.memory.peak, reserved=now, process=now, total=now + self.memory.of_others)

    def reset_peak(self) -> None:
        self.memory.peak = self.memory.now

    def generator_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_generator_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


def _mapped(file: int, num_bytes: int) -> torch.Tensor:
    """Bytes of a file, or of nothing (-1), as a tensor; whoever calls says whether it counts."""
    with _disable_current_modes():
        return torch.frombuffer(mmap.mmap(file, max(1, num_bytes)), dtype=torch.uint8)[:num_bytes]


class HostGroup:
    """Ranks that meet at a store of torch: vLLM's group and its NCCL communicator in one."""

    def __init__(self, host: str, port: int, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks, self.count = rank, num_ranks, 0
        self.store: Any = torch.distributed.TCPStore(host, port, num_ranks, is_master=rank == 0)

    def broadcast_obj(self, thing: Any, src: int) -> Any:
        self.count += 1
        if self.rank == src:
            self.store.set(f"sent/{self.count}", pickle.dumps(thing))
            return thing
        return pickle.loads(self.store.get(f"sent/{self.count}"))  # from a process of this run

    def broadcast(self, payload: torch.Tensor, src: int, stream: Any) -> None:
        sent = self.broadcast_obj(bytes(payload.tolist()) if self.rank == src else None, src)
        if self.rank != src:
            payload.copy_(torch.frombuffer(bytearray(sent), dtype=torch.uint8))

    def barrier(self, timeout: float) -> None:
        self.count += 1
        if self.store.add(f"met/{self.count}", 1) == self.num_ranks:
            self.store.set(f"all/{self.count}", b"")
        self.store.wait([f"all/{self.count}"], timedelta(seconds=timeout))

    def destroy(self) -> None:
        self.store = None


class HostEvent:
    def record(self, stream: Any) -> None:
        """Everything is done when it returns."""

    def query(self) -> bool:
        return True


@contextmanager
def using(device: CudaDevice) -> Iterator[CudaDevice]:
    """Inside the block a device replaces this machine's own, in this process."""
    _standing_in.append(device)
    try:
        yield device
    finally:
        _standing_in.remove(device)


@contextmanager
def host_device(num_bytes: int) -> Iterator[HostDevice]:
    """Inside the block a stand-in of so many bytes takes the place of this machine's device."""
    device = HostDevice(num_bytes)
    with using(device), device.memory:
        yield device
