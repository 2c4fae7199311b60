"""The frozen base in one memory: views on the trainer's side, the same bytes in another process, counted once."""

import dataclasses
import mmap
import os
from multiprocessing import get_context
from multiprocessing.connection import Connection

import pytest
import torch

from rlplan.errors import RunError
from rlplan.memory.model.engine_base import shared_base_bytes
from rlplan.runtime.measure.memory_meter import peak_inside, resident_bytes
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.weight_sync.channel import BaseHandle
from rlplan.runtime.weight_sync.shared_base import HeldBase, OpenedBase
from rlplan.units import MIB
from tests.factories import make_model
from tests.runtime.device.host_device import HostDevice, using

CPU = torch.device("cpu")
MODEL = make_model()


class Frozen(torch.nn.Module):
    """The factory model's parameters, by their names, each of one number; some as PEFT leaves them."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.whole = {
            p.name.replace("q_proj.weight", "q_proj.base_layer.weight"): torch.nn.Parameter(
                torch.full(p.shape, float(n), dtype=dtype), requires_grad=False
            )
            for n, p in enumerate(MODEL.parameters)
        }

    def named_parameters(self, *_: object, **__: object) -> "list[tuple[str, torch.nn.Parameter]]":  # type: ignore[override]
        return list(self.whole.items())


def make_base(module: Frozen | None = None) -> HeldBase:
    base = HeldBase(MODEL, torch.float32, CPU)
    base.adopt_module(module or Frozen())
    return base


def test_every_parameter_becomes_a_view_with_the_same_numbers() -> None:
    module = Frozen()
    base = make_base(module)
    assert base.memory.numel() == base.num_bytes == shared_base_bytes(MODEL, 4)
    for number, parameter in enumerate(module.whole.values()):
        assert base.holds(parameter.data)
        assert bool((parameter == number).all())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.norm.weight": None}, "the trainer has no frozen torch.float32 model.norm.weight"),
        (
            {"model.extra.weight": torch.nn.Parameter(torch.ones(1), requires_grad=False)},
            "model.extra.weight is not a weight of",
        ),
        ({"model.norm.weight": torch.nn.Parameter(torch.ones(MODEL.hidden_size))}, "no frozen"),
    ],
)
def test_a_module_with_other_weights_is_refused_by_name(
    change: dict[str, torch.nn.Parameter | None], words: str
) -> None:
    module = Frozen()
    module.whole = {name: p for name, p in (module.whole | change).items() if p is not None}
    with pytest.raises(RunError, match=words) as caught:
        make_base(module)
    assert "rollout.shares_base=false" in str(caught.value)


def open_elsewhere(handle: BaseHandle, answers: Connection) -> None:
    """Another process: what it sees, and then writes."""
    base = OpenedBase(handle, MODEL, torch.float32)
    sums = {name: float(tensor.double().sum()) for name, tensor in base.tensors.items()}
    base.memory.fill_(255)
    base.close()
    answers.send(sums)


def test_another_process_sees_the_same_numbers_and_its_writes_stay_there() -> None:
    module = Frozen()
    base = make_base(module)
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=open_elsewhere, args=(base.handle(), theirs))
    process.start()
    assert ours.poll(scale_seconds(60.0))
    sums = ours.recv()
    process.join()
    assert sums == {t.name: sum(float(module_sum(module, m.name)) for m in t.members) for t in base.layout}
    assert all(bool((parameter == n).all()) for n, parameter in enumerate(module.whole.values()))


def module_sum(module: Frozen, name: str) -> torch.Tensor:
    name = name.replace("q_proj.weight", "q_proj.base_layer.weight")
    return module.whole[name].double().sum()


def test_the_pages_are_left_out_of_what_the_engine_s_process_holds() -> None:
    model = MODEL.model_copy(update={"vocab_size": 1 << 20, "hidden_size": 16})
    size, descriptor = shared_base_bytes(model, 4), os.memfd_create("rlplan-test")
    os.posix_fallocate(descriptor, 0, size)
    before = resident_bytes()
    with peak_inside() as peak:
        base = OpenedBase(BaseHandle(size, os.getpid(), descriptor), model, torch.float32)
        assert abs(resident_bytes() - before) < 8 * MIB < size
    assert peak.num_bytes - before < 8 * MIB
    # The pages come from the kernel: malloc may serve a tensor of this size from memory that is already resident.
    with peak_inside() as own, mmap.mmap(-1, 32 * MIB) as private:
        for page in range(0, len(private), mmap.PAGESIZE):
            private[page] = 1
    assert 30 * MIB < own.num_bytes - before < 48 * MIB
    base.close()
    assert abs(resident_bytes() - before) < 8 * MIB
    os.close(descriptor)


def test_memory_of_another_size_or_of_a_process_that_is_gone_is_refused() -> None:
    handle = make_base().handle()
    with pytest.raises(RunError, match="the engine's weights need"):
        OpenedBase(dataclasses.replace(handle, num_bytes=handle.num_bytes + mmap.PAGESIZE), MODEL, torch.float32)
    with pytest.raises(RunError, match=r"cannot open .* \(/proc/0/fd/"):
        OpenedBase(dataclasses.replace(handle, process_id=0), MODEL, torch.float32)


def test_on_a_device_it_is_opened_through_the_device_layer_and_on_no_other() -> None:
    with using(HostDevice(64 * MIB)):
        module = Frozen()
        base = make_base(module)
        handle = base.handle()
        assert (handle.descriptor, base.descriptor) == (-1, -1)
        opened = OpenedBase(handle, MODEL, torch.float32)
        assert all(torch.equal(opened.tensors[t.name].flatten()[:1], view_tensor(base, t.name)) for t in base.layout)
    with using(HostDevice(64 * MIB, number=1)), pytest.raises(RunError, match=r"on GPU HOST-0, .* on GPU HOST-1"):
        OpenedBase(handle, MODEL, torch.float32)
    with pytest.raises(RunError, match="the engine sees no GPU"):
        OpenedBase(handle, MODEL, torch.float32)


def view_tensor(base: HeldBase, name: str) -> torch.Tensor:
    (tensor,) = [entry for entry in base.layout if entry.name == name]
    return base.memory[tensor.start : tensor.start + 4].view(torch.float32)
