"""CUDA IPC without a GPU: a reader opens the sender's memory only on the sender's own GPU."""

import pickle
from typing import Any

import pytest
import torch

from rlplan.errors import RunError
from rlplan.runtime.weight_sync.channel import Endpoint
from rlplan.runtime.weight_sync.transports import cuda_ipc
from rlplan.runtime.weight_sync.transports.cuda_ipc import CudaIpcInlet
from rlplan.vocabulary import Transport


def rebuilt(*arguments: Any) -> tuple[Any, ...]:
    """In place of torch's own, which needs a GPU."""
    return arguments


def reader(uuid: str) -> CudaIpcInlet:
    inlet = object.__new__(CudaIpcInlet)
    handles = pickle.dumps((uuid, (rebuilt, tuple(range(8)))))
    inlet.endpoint = Endpoint(Transport.CUDA_IPC, 1, handles=handles)
    return inlet


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc, "gpu_uuid", lambda: "GPU-a")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)


def test_the_memory_is_opened_under_the_reader_s_own_number_of_the_gpu() -> None:
    assert reader("GPU-a")._memory() == (0, 1, 2, 3, 4, 5, 5, 7)


def test_a_reader_on_another_gpu_is_refused_by_name() -> None:
    with pytest.raises(RunError, match=r"arena lies on GPU GPU-b, and this process computes on GPU-a"):
        reader("GPU-b")._memory()
