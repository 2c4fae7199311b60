"""Rough times with the signatures of timing/, until timing/ has them: this file goes then.

In: models, choices, a cluster. Out: costs. Left out: nearly everything; only the order of magnitude is meant.
"""

from dataclasses import dataclass

from rlplan.memory.gpu.engine import EngineChoice
from rlplan.memory.gpu.states import TrainerChoice
from rlplan.spec.budget import BudgetRollout, BudgetTraining
from rlplan.spec.lengths import Lengths
from rlplan.spec.model import ModelSpec
from rlplan.timing.cluster import Cluster
from rlplan.timing.cost import NOTHING, Cost, Resource
from rlplan.vocabulary import Dtype, Role

LINK = 50e9
HOST_LINK = 50e9
NETWORK = 20e9


@dataclass(frozen=True)
class EngineSpeed:
    """How fast one engine decodes."""

    model: ModelSpec
    rollout: BudgetRollout
    choice: EngineChoice
    cluster: Cluster


@dataclass(frozen=True)
class GenerationWork:
    """One engine's share of a step."""

    num_rollouts: int
    prompt_len: float
    num_samples: int
    lengths: Lengths
    max_num_seqs: int
    kv_tokens: int


def generate_cost(speed: EngineSpeed, work: GenerationWork) -> Cost:
    """Seconds of one engine's share of a step."""
    length = work.prompt_len + work.lengths.mean
    at_once = max(1.0, min(work.num_rollouts, work.max_num_seqs, work.kv_tokens / length))
    cluster, tp, weights = speed.cluster, speed.choice.tp, 2.0 * speed.model.num_parameters
    step = weights / tp / (cluster.memory_bytes_per_s * cluster.serving.memory.value)
    latency = speed.model.num_layers * (cluster.serving.layer.value + 2 * (tp > 1) * cluster.serving.collective.value)
    steps = work.lengths.mean * work.num_rollouts / at_once
    prefill = 2.0 * speed.model.num_parameters * work.prompt_len * work.num_rollouts / work.num_samples
    rate = tp * cluster.flops_per_s(Dtype.BFLOAT16) * cluster.serving.matmul.value
    parts = {Resource.MEMORY: steps * step, Resource.LATENCY: steps * latency, Resource.COMPUTE: prefill / rate}
    return Cost(parts)


@dataclass(frozen=True)
class TrainWork:
    """A mini-batch of all ranks."""

    num_rollouts: int
    mean_len: float
    mean_square_len: float
    max_len: int
    num_head_tokens_per_rollout: float


@dataclass(frozen=True)
class TrainSetting:
    """Who trains what on how many ranks."""

    model: ModelSpec
    role: Role
    training: BudgetTraining
    choice: TrainerChoice
    num_ranks: int
    target: str


def train_cost(setting: TrainSetting, work: TrainWork, cluster: Cluster) -> Cost:
    """Forward and backward of a mini-batch."""
    choice, ranks = setting.choice, setting.num_ranks
    numel, tokens = setting.model.num_parameters, work.num_rollouts * work.mean_len
    flops = (8 if choice.recomputes else 6) * numel * tokens
    rate = ranks * cluster.flops_per_s(Dtype.BFLOAT16) * cluster.efficiencies.matmul.value
    passes = max(1.0, work.num_rollouts / (ranks / choice.ranks_per_sequence) / choice.micro_batch)
    thin = 1 + 500 / (choice.micro_batch * work.mean_len / choice.ranks_per_sequence)
    gathered = 2 * numel * (3 if choice.zero_stage == 3 else 0) * passes / LINK if ranks > 1 else 0.0
    host = 4 * numel * passes / ranks / HOST_LINK * choice.offloads_parameters
    reduced = 2 * numel / LINK * (ranks > 1)
    split = 0.05 * (choice.ranks_per_sequence - 1) * flops / rate
    parts = {Resource.COMPUTE: flops / rate * thin, Resource.DEVICE_LINK: gathered * 0.2 + reduced + split}
    return Cost(parts | ({Resource.HOST_LINK: host} if host else {}))


def optimizer_cost(setting: TrainSetting, cluster: Cluster) -> Cost:
    """One optimizer step."""
    states = 16.0 * setting.model.num_parameters / (setting.num_ranks if setting.choice.zero_stage else 1)
    if setting.choice.offloads_optimizer:
        return Cost({Resource.HOST: states / 10e9, Resource.HOST_LINK: states / 4 / HOST_LINK})
    return Cost({Resource.MEMORY: 2 * states / cluster.memory_bytes_per_s})


def score_cost(setting: TrainSetting, work: TrainWork, cluster: Cluster) -> Cost:
    """A pass without gradients."""
    return Cost({Resource.COMPUTE: train_cost(setting, work, cluster).seconds / 3})


@dataclass(frozen=True)
class SyncWork:
    """One hand-over of weights."""

    transport: str
    element_bytes: int
    num_training: int
    num_generation: int
    tp: int
    zero_stage: int
    bucket_bytes: int
    adapter_bytes: int
    same_devices: bool


def sync_cost(model: ModelSpec, work: SyncWork, training: Cluster, generation: Cluster) -> Cost:
    """The hand-over."""
    size = work.adapter_bytes or work.element_bytes * model.num_parameters
    if work.transport == "disk":
        return Cost({Resource.DISK: size / 2e9})
    return Cost({Resource.DEVICE_LINK if work.same_devices else Resource.NETWORK: size / NETWORK})


def sleep_cost(num_bytes: int, level: int, cluster: Cluster) -> Cost:
    """The engine's weights to the host, or dropped."""
    return Cost({Resource.HOST_LINK: num_bytes / HOST_LINK}) if level == 1 else Cost({Resource.LATENCY: 0.1})


def wake_weights_cost(num_bytes: int, level: int, cluster: Cluster) -> Cost:
    """And back."""
    return sleep_cost(num_bytes, level, cluster)


def wake_kv_cost(num_bytes: int, cluster: Cluster) -> Cost:
    """Memory of the KV cache is mapped."""
    return Cost({Resource.LATENCY: num_bytes / 1e12}) if num_bytes else NOTHING


def offload_cost(num_bytes: int, cluster: Cluster) -> Cost:
    """A role's states to the host."""
    return Cost({Resource.HOST_LINK: num_bytes / HOST_LINK})


def reload_cost(num_bytes: int, cluster: Cluster) -> Cost:
    """And back."""
    return offload_cost(num_bytes, cluster)
