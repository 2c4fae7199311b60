"""The stand-in for a GPU: N bytes that run out, states that leave it and come back."""

from typing import Any

import pytest
import torch

from rlplan.runtime.device.layer import begun, device_of, present
from rlplan.runtime.workers.trainer.offloaded_states import OffloadedStates
from rlplan.runtime.workers.worker_device import empty_device_cache, worker_device
from rlplan.units import MIB
from tests.factories import gpu_job
from tests.runtime.device.host_device import HostDevice, host_device, using

CPU = torch.device("cpu")


def test_without_one_host_memory_is_no_device() -> None:
    assert device_of(CPU) is None
    with using(HostDevice(MIB)) as device:
        assert present() is begun() is device_of(CPU) is device
    assert device_of(CPU) is None


def test_a_job_for_gpus_computes_on_it() -> None:
    job: Any = gpu_job({"policy": "Qwen/Qwen2.5-7B", "algorithm": "grpo", "hardware": "1xH100"})
    with using(HostDevice(MIB)):
        assert worker_device(job) == CPU


def test_it_counts_tensors_as_they_come_and_go() -> None:
    with host_device(10 * MIB) as device:
        entry = torch.zeros(MIB, dtype=torch.uint8)
        view = entry[10:]
        two = entry + entry
        assert device.held().allocated == 2 * MIB
        assert device.free_bytes() == 8 * MIB
        del entry, two
        assert device.held().allocated == MIB  # the view holds it
        del view
        assert (device.held().allocated, device.held().peak) == (0, 2 * MIB)
        device.reset_peak()
        assert device.held().peak == 0


def test_it_runs_out_as_cuda_does_and_nothing_of_the_failure_stays() -> None:
    with host_device(MIB) as device:
        kept = torch.zeros(MIB // 2, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError, match=r"512.* of 1.00 MiB are taken"):
            torch.zeros(MIB, dtype=torch.uint8)
        assert device.held().allocated == kept.numel()


def test_a_backward_pass_counts_too() -> None:
    weight = torch.zeros(256, 256, requires_grad=True)
    with host_device(MIB) as device:
        (weight * 2).sum().backward()
        assert weight.grad is not None
        assert device.held().allocated == weight.grad.nbytes


def test_offloaded_states_leave_it_and_come_back_bit_for_bit() -> None:
    with host_device(4 * MIB) as device:
        states = torch.arange(MIB // 4, dtype=torch.int32)
        before, offloaded = int(states.sum()), OffloadedStates()
        held_bytes = device.held().allocated
        offloaded.offload([states.untyped_storage()], in_memory=True)
        empty_device_cache(CPU)
        assert held_bytes - device.held().allocated == MIB
        other = torch.ones(3 * MIB, dtype=torch.uint8)  # what takes its turn
        del other
        offloaded.reload()
        assert int(states.sum()) == before
        assert device.held().allocated >= MIB


def test_states_find_no_room_when_the_other_side_is_still_there() -> None:
    with host_device(2 * MIB):
        states, offloaded = torch.zeros(MIB, dtype=torch.uint8), OffloadedStates()
        offloaded.offload([states.untyped_storage()], in_memory=True)
        other = torch.ones(2 * MIB, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError):
            offloaded.reload()
        del other
