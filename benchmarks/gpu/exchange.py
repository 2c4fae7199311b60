"""Transfers out of a process or the device and back, by rlplan's own runtime with only torch.

In: a case and a device. Out: bytes, seconds and differences, by name. `sync`: a small policy takes optimizer steps and
is sent to another process, through the CUDA IPC transport (shared memory on a CPU); both compute log-probs. `offload`:
a trainer's states go to the host's memory and come back.
Left out: engines (serving.py, jobs.py), more than one GPU.
"""

import time
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.cases import Case
from benchmarks.gpu.device import finish
from benchmarks.gpu.meters import used_by_driver
from rlplan.memory.weight_sync.packets import Packet, plan_packets
from rlplan.runtime.weight_sync.channel import Endpoint, Update
from rlplan.runtime.weight_sync.receiver import PolicyReceiver
from rlplan.runtime.weight_sync.sender import PolicySender
from rlplan.runtime.weight_sync.source import WeightSource
from rlplan.runtime.workers.trainer.offloaded_states import OffloadedStates
from rlplan.runtime.workers.worker_device import empty_device_cache
from rlplan.spec.model import Parameter
from rlplan.units import GIB, MIB
from rlplan.vocabulary import Transport

DTYPE = torch.bfloat16
NUM_UPDATES = 2
TIMEOUT_S = 60.0
SIZES = (32_000, 2048, 8)
TINY_SIZES = (256, 32, 2)
"""Sizes of a policy: tokens, hidden size, layers."""


class SmallPolicy(nn.Module):
    """Linear layers between an embedding and a head: enough for every weight to matter to the log-probs."""

    def __init__(self, vocab_size: int, hidden: int, num_layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden)
        self.layers = nn.ModuleList([nn.Linear(hidden, hidden) for _ in range(num_layers)])
        self.head = nn.Linear(hidden, vocab_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probs [tokens - 1] of each next token, in fp32."""
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        logprobs = torch.log_softmax(self.head(hidden)[:-1].float(), dim=-1)
        return logprobs.gather(1, tokens[1:].unsqueeze(1)).squeeze(1)


def measure_sync(case: Case, device: torch.device, used_before: int | None) -> dict[str, float]:
    """Optimizer steps, each sent to another process; how far apart its log-probs are, and how fast packets go.

    Raises: RuntimeError where the log-probs of the same weights differ, RunError where a packet is damaged.
    """
    policy, tokens = _policy(case, device)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    packets, sender = _packets(case, policy), None
    context = torch.multiprocessing.get_context("spawn")
    updates, answers = context.Queue(), context.Queue()
    transport = Transport.CUDA_IPC if device.type == "cuda" else Transport.SHARED_MEMORY
    receiver = None
    try:
        sender = PolicySender(packets, DTYPE)
        endpoint = sender.offer(Endpoint(transport, 1, dtype="bfloat16", timeout_s=TIMEOUT_S))
        receiver = context.Process(target=_receive, args=(case, str(device), endpoint, updates, answers), daemon=True)
        receiver.start()
        _answer(answers)  # it has opened the channel: from the first update on its file has no name
        sender.connect(endpoint)
        differences, seconds, report = [], [], None
        for serial in range(1, NUM_UPDATES + 1):
            (-policy(tokens).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            update = Update(serial, serial, True, TIMEOUT_S)
            updates.put(update)
            started = time.perf_counter()
            report = sender.send(WeightSource(policy), update)
            theirs = torch.tensor(_answer(answers))
            seconds.append(time.perf_counter() - started)
            differences.append(float((policy(tokens).detach().cpu() - theirs).abs().max()))
    finally:
        if receiver is not None and receiver.pid is not None:
            receiver.kill()
            receiver.join()
        if sender is not None:
            sender.close()
    if max(differences) > 0:  # the same weights, the same kernels
        raise RuntimeError(f"after a sync log-probs differ by {max(differences):.3g}")
    assert report is not None
    rate = report.num_bytes / min(seconds)
    return {
        "sent_bytes": report.num_bytes,
        "first_sync_s": seconds[0],
        "sync_s": min(seconds),
        "sync_bytes_per_s": rate,
        "logprob_difference_max": max(differences),
    }


def _receive(case: Case, device: str, endpoint: Endpoint, updates: Any, answers: Any) -> None:
    """The other process: its own policy takes what is sent, and answers with log-probs, or with what went wrong."""
    try:
        policy, tokens = _policy(case, torch.device(device), seed=1)
        places = dict(policy.named_parameters())
        receiver = PolicyReceiver(_packets(case, policy), DTYPE, 0)
        receiver.connect(endpoint)
        answers.put([])
        with torch.no_grad():
            while True:
                for name, tensor in receiver.tensors(updates.get(timeout=TIMEOUT_S)):
                    places[name].copy_(tensor)
                answers.put(policy(tokens).tolist())
    except Exception as error:
        answers.put(f"the receiver: {type(error).__name__}: {error}")


def _answer(answers: Any) -> list[float]:
    """The receiver's next answer. Raises: RuntimeError where that is an error."""
    answer: list[float] | str = answers.get(timeout=TIMEOUT_S)
    if isinstance(answer, str):
        raise RuntimeError(answer)
    return answer


def _policy(case: Case, device: torch.device, seed: int = 0) -> tuple[SmallPolicy, torch.Tensor]:
    """(policy, tokens): tokens are the same for every seed."""
    sizes = TINY_SIZES if case.is_tiny else SIZES
    tokens = torch.arange(128, device=device) * 7 % sizes[0]
    torch.manual_seed(seed)
    return SmallPolicy(*sizes).to(device, DTYPE), tokens


def _packets(case: Case, policy: SmallPolicy) -> tuple[Packet, ...]:
    """The policy's weights in at least two packets."""
    parameters = tuple(Parameter(name, tuple(tensor.shape)) for name, tensor in policy.named_parameters())
    return tuple(plan_packets(parameters, DTYPE.itemsize, 16 << 10 if case.is_tiny else 64 * MIB))


def measure_offload(case: Case, device: torch.device, used_before: int | None) -> dict[str, float]:
    """States go to the host's memory (pinned, from a GPU) and come back. Raises: RuntimeError where they are others."""
    size = 4 * MIB if case.is_tiny else GIB
    states = [torch.arange(size // 4, device=device, dtype=torch.int32) + n for n in range(2)]
    sums, offloaded = [int(state.sum()) for state in states], OffloadedStates()
    storages = [state.untyped_storage() for state in states]
    reserved_bytes, times = [_driver_bytes(device)], []
    for act in (lambda: offloaded.offload(storages, in_memory=True), offloaded.reload):
        started = time.perf_counter()
        act()
        finish(device)
        times.append(time.perf_counter() - started)
        empty_device_cache(device)
        reserved_bytes.append(_driver_bytes(device))
    if [int(state.sum()) for state in states] != sums:
        raise RuntimeError("offloaded states came back as others")
    rates = {"offload_bytes_per_s": 2 * size / times[0], "reload_bytes_per_s": 2 * size / times[1]}
    if device.type != "cuda":
        return {"offloaded_bytes": 2 * size} | rates
    return {
        "offloaded_bytes": 2 * size,
        "freed_bytes": reserved_bytes[0] - reserved_bytes[1],
        "back_bytes": reserved_bytes[2] - reserved_bytes[1],
    } | rates


def _driver_bytes(device: torch.device) -> int:
    """Bytes on the device by its driver; 0 on a CPU, or where it does not say."""
    finish(device)
    return (used_by_driver() or 0) if device.type == "cuda" else 0
