"""Colocated with sleep, and hybrid with IPC, on a device that is too small for both sides at once.

The schedule of a plan for a GPU, the controller, the weight sync and the offloading are the runtime's own; what trains
and generates is a few tensors on the device layer's stand-in, which runs out as a GPU does.
"""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.gpu.jobs import plan_on_gpu
from rlplan.dataflow.schedule import Action, Schedule
from rlplan.memory.weight_sync.packets import plan_packets
from rlplan.runtime.device.host import HostDevice
from rlplan.runtime.device.layer import using
from rlplan.runtime.driver.controller import Controller
from rlplan.runtime.processes.machine_speed import scaled
from rlplan.runtime.weight_sync.channel import Endpoint, Update
from rlplan.runtime.weight_sync.receiver import PolicyReceiver
from rlplan.runtime.weight_sync.sender import PolicySender
from rlplan.runtime.weight_sync.source import WeightSource
from rlplan.runtime.workers.trainer.offloaded_states import OffloadedStates
from rlplan.units import MIB
from rlplan.vocabulary import ActionKind, Transport
from tests.factories import make_model

PARAMETERS = make_model().parameters
STATES, CACHE, ACTIVATIONS = 8 * MIB, 8 * MIB, MIB
BESIDE = 3 * MIB
"""Weights of three sides, the arena, and what two of them add checksums up in."""
NUM_STEPS = 2
TIMEOUT_S = scaled(60.0)


class Trained(torch.nn.Module):
    """A role's weights under the model's own names, and the states of its optimizer."""

    def __init__(self, states: int) -> None:
        super().__init__()
        self.whole = {p.name: torch.zeros(p.shape) for p in PARAMETERS}
        self.states = torch.ones(states, dtype=torch.uint8)
        self.offloaded = OffloadedStates()

    def named_parameters(self, *_: object, **__: object) -> Iterator[tuple[str, torch.nn.Parameter]]:  # type: ignore[override]
        yield from ((name, torch.nn.Parameter(tensor, requires_grad=False)) for name, tensor in self.whole.items())

    def offload(self) -> None:
        storages = [tensor.untyped_storage() for tensor in (*self.whole.values(), self.states)]
        self.offloaded.offload(storages, in_memory=True)


class OneGpu:
    """What the actions of a schedule do on one device: roles that train and score, and an engine."""

    def __init__(self, device: HostDevice) -> None:
        self.device, self.roles, self.version, self.serial = device, dict[str, Trained](), 0, 0
        self.weights: dict[str, torch.Tensor] = {}
        self.cache: torch.Tensor | None = None
        self.done: list[str] = []

    def perform(self, action: Action, step: int) -> None:
        """Raises: OutOfMemoryError where the device is full."""
        with self.device.memory:
            getattr(self, f"do_{action.kind}", lambda action: None)(action)
        self.done.append(action.id)

    def do_start_trainer(self, action: Action) -> None:
        self.roles["policy"] = Trained(STATES)

    def do_start_scorer(self, action: Action) -> None:
        self.roles["reference"] = Trained(0)

    def do_start_engine(self, action: Action) -> None:
        packets = plan_packets(PARAMETERS, 4, 4000)
        self.sender, self.receiver = PolicySender(packets, torch.float32), PolicyReceiver(packets, torch.float32, 0)
        endpoint = self.sender.offer(Endpoint(Transport.CUDA_IPC, 1, timeout_s=TIMEOUT_S))
        self.sender.open(endpoint)
        self.receiver.open(endpoint)
        self.do_wake_weights(action)
        self.do_wake_kv_cache(action)

    def do_sleep_engine(self, action: Action) -> None:
        self.weights, self.cache = {}, None

    def do_wake_weights(self, action: Action) -> None:
        self.weights = {p.name: torch.full(p.shape, -1.0) for p in PARAMETERS}
        if self.version == 0:  # loaded, not sent
            self.weights = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}

    def do_wake_kv_cache(self, action: Action) -> None:
        self.cache = torch.zeros(CACHE, dtype=torch.uint8)

    def do_generate(self, action: Action) -> None:
        assert self.cache is not None
        assert {float(tensor.mean()) for tensor in self.weights.values()} == {float(self.version)}

    do_evaluate = do_generate

    def do_score(self, action: Action) -> None:
        torch.zeros(ACTIVATIONS // 4)
        assert {float(tensor.mean()) for tensor in self.roles["reference"].whole.values()} == {0.0}

    def do_train_forward_backward(self, action: Action) -> None:
        torch.zeros(ACTIVATIONS // 4)

    def do_optimizer_step(self, action: Action) -> None:
        policy = self.roles["policy"]
        assert int(policy.states.sum()) == STATES
        for tensor in policy.whole.values():
            tensor += 1
        self.version += 1

    def do_sync_weights(self, action: Action) -> None:
        self.serial += 1
        update = Update(self.serial, self.version, True, TIMEOUT_S)
        source = WeightSource(self.roles["policy"])
        sending = threading.Thread(target=self.sender.send, args=(source, update))
        sending.start()
        for name, tensor in self.receiver.tensors(update):
            self.weights[name].copy_(tensor)
        sending.join(TIMEOUT_S)

    def do_offload_role(self, action: Action) -> None:
        self.roles[str(action.role)].offload()

    def do_reload_role(self, action: Action) -> None:
        self.roles[str(action.role)].offloaded.bring_back()


def play(schedule: Schedule, num_bytes: int) -> OneGpu:
    """A start, two steps and the end of a schedule on a device of so many bytes."""
    device = HostDevice(num_bytes)
    with using(device):
        gpu = OneGpu(device)
        Controller(schedule, gpu.perform, lambda action: TIMEOUT_S).run(NUM_STEPS, lambda step: None)
    return gpu


def without(schedule: Schedule, kind: ActionKind) -> Schedule:
    """The schedule as it would be if an action of a kind did nothing."""
    nothing: Any = ActionKind.VERIFY
    step = tuple(replace(action, kind=nothing) if action.kind is kind else action for action in schedule.step)
    return replace(schedule, step=step)


def test_colocated_the_engine_sleeps_and_roles_are_offloaded_so_that_one_side_at_a_time_fits() -> None:
    schedule = plan_on_gpu("colocated", "h100-sxm", NUM_STEPS).schedule
    gpu = play(schedule, STATES + BESIDE)
    assert gpu.version == gpu.serial == NUM_STEPS
    assert gpu.done.count("sleep_engine") == NUM_STEPS + 1


@pytest.mark.parametrize("kind", [ActionKind.SLEEP_ENGINE, ActionKind.OFFLOAD_ROLE])
def test_colocated_without_sleep_or_offload_runs_out(kind: ActionKind) -> None:
    schedule = without(plan_on_gpu("colocated", "h100-sxm", NUM_STEPS).schedule, kind)
    with pytest.raises(torch.OutOfMemoryError, match="are taken"):
        play(schedule, STATES + BESIDE)


def test_hybrid_both_sides_stay_and_weights_go_by_ipc() -> None:
    schedule = plan_on_gpu("hybrid", "h100-sxm", NUM_STEPS).schedule
    gpu = play(schedule, STATES + CACHE + BESIDE)
    assert (gpu.version, gpu.serial) == (NUM_STEPS, NUM_STEPS + 1)
    with pytest.raises(torch.OutOfMemoryError, match="are taken"):
        play(schedule, STATES + CACHE)
