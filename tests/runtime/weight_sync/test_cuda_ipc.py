"""CUDA IPC over the device layer's stand-in: one copy, on the device, opened by another process on the same device."""

import pickle
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from rlplan.errors import RunError
from rlplan.memory.weight_sync.packets import arena_bytes, plan_packets
from rlplan.runtime.device import cuda
from rlplan.runtime.device.cuda import CudaDevice
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.weight_sync.channel import Endpoint, Update
from rlplan.runtime.weight_sync.receiver import PolicyReceiver
from rlplan.runtime.weight_sync.sender import PolicySender
from rlplan.runtime.weight_sync.source import WeightSource
from rlplan.runtime.weight_sync.transports.cuda_ipc import CudaIpcInlet
from rlplan.units import MIB
from rlplan.vocabulary import Transport
from tests.factories import make_model
from tests.runtime.device.host_device import HostDevice, host_device, using
from tests.runtime.weight_sync.test_transports import own_arenas

PACKETS = plan_packets(make_model().parameters, 4, 4000)
TIMEOUT_S = scale_seconds(30.0)
UPDATE = Update(1, 1, True, TIMEOUT_S)


def rebuilt(*arguments: Any) -> tuple[Any, ...]:
    """Replaces torch's own, which needs a GPU."""
    return arguments


def test_the_memory_is_opened_under_the_reader_s_own_number_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    assert CudaDevice().open((rebuilt, tuple(range(8)))) == (0, 1, 2, 3, 4, 5, 5, 7)
    assert cuda.CudaDevice().place == torch.device("cuda", 5)


def test_a_reader_on_another_gpu_is_refused_by_name() -> None:
    inlet = object.__new__(CudaIpcInlet)
    inlet.endpoint = Endpoint(Transport.CUDA_IPC, 1, handles=pickle.dumps(("GPU-b", None)))
    with using(HostDevice(MIB)), pytest.raises(RunError, match=r"arena is on GPU GPU-b, but this .* on GPU HOST-0"):
        inlet._memory()


def test_a_process_without_a_gpu_says_so_and_leaves_no_arena() -> None:
    before = own_arenas()
    with pytest.raises(RunError, match="this process sees no GPU"):
        PolicySender(PACKETS, torch.float32).offer(Endpoint(Transport.CUDA_IPC, 1))
    assert own_arenas() == before


class Module(torch.nn.Module):
    """The factory model's parameters, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = {p.name: torch.full(p.shape, float(n)) for n, p in enumerate(make_model().parameters)}

    def named_parameters(self, *_: object, **__: object) -> Any:
        return ((name, torch.nn.Parameter(tensor)) for name, tensor in self.whole.items())


def receive(endpoint: Endpoint, answers: Connection) -> None:
    """Another process: the largest and the sum of all weights that came, and what its own device holds of them."""
    with host_device(16 * MIB) as device:
        receiver = PolicyReceiver(PACKETS, torch.float32, 0)
        receiver.connect(endpoint)
        answers.send(device.held().allocated)
        answers.send({name: float(tensor.mean()) for name, tensor in receiver.tensors(UPDATE)})
        receiver.close()


def test_weights_reach_another_process_through_the_device_without_a_second_copy() -> None:
    context = get_context("fork")  # which need not import torch anew
    answers, theirs = context.Pipe()
    with host_device(16 * MIB) as device:
        sender = PolicySender(PACKETS, torch.float32)
        endpoint = sender.offer(Endpoint(Transport.CUDA_IPC, 1, timeout_s=TIMEOUT_S))
        assert device.held().allocated == arena_bytes(PACKETS)
        reader = context.Process(target=receive, args=(endpoint, theirs))
        reader.start()
        assert answers.poll(2 * TIMEOUT_S)
        assert answers.recv() == 0
        module = Module()
        sender.send(WeightSource(module), UPDATE)
        assert answers.recv() == {name: float(tensor.mean()) for name, tensor in module.whole.items()}
        reader.join(TIMEOUT_S)
        assert reader.exitcode == 0
        before = device.held().allocated
        sender.close()
        assert before - device.held().allocated == arena_bytes(PACKETS)


def test_an_arena_for_which_the_device_has_no_room_fails_as_on_cuda_and_is_gone() -> None:
    before = own_arenas()
    with host_device(arena_bytes(PACKETS) - 1), pytest.raises(torch.OutOfMemoryError, match="are taken"):
        PolicySender(PACKETS, torch.float32).offer(Endpoint(Transport.CUDA_IPC, 1))
    assert own_arenas() == before
