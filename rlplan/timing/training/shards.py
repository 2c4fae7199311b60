"""ZeRO traffic: weights gathered for a pass, gradients reduced after it, and how much of it overlaps with compute;
and communication between the ranks of one micro-batch, inside each layer and between pipeline stages.

In: a TrainSetting, a micro-batch, a cluster. Out: Costs of one pass and of one optimizer step. Left out: bucket sizes
(they matter below some megabytes), prefetching that memory does not allow, imbalance between experts, rows that one
message brings to several experts.

Ranks of a stage are neighbours, and stages follow each other: Megatron-Core 0.14, parallel_state.py, `tp-cp-ep-dp-pp`.
Experts have a rank order of their own in it: ep neighbours (`expert_tensor_parallel_size` 1), whatever tp and cp are.

Symbols: P parameters of a tensor and pipeline rank, e bytes per weight, g bytes of a gradient in transit, N ranks.
"""

from typing import NamedTuple

from rlplan.memory.trainers.shape import Recompute
from rlplan.spec.model import Component, ModelSpec
from rlplan.spec.models.adapters import list_lora_parameters
from rlplan.timing.cost import NOTHING, Cost, Resource
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.network.collectives import (
    find_link,
    time_all_gather,
    time_all_reduce,
    time_all_to_all,
    time_reduce_scatter,
)
from rlplan.timing.training.settings import MicroBatch, TrainSetting

CONTENTION = 0.15
"""Slowdown of compute by overlapped traffic, as a share of the traffic's time: NCCL occupies 16 to 24 of 108 to 132
multiprocessors (NCCL 2.20, channels of large collectives). Assumed."""


class Part(NamedTuple):
    """Parameters of a rank that are sharded over one group of ranks."""

    numel: float
    ranks: int
    """Ranks with the same parameters, which shard the states."""
    stride: int
    """Distance between these ranks."""


def trained_parts(setting: TrainSetting) -> tuple[Part, ...]:
    """Parameters that a rank trains: adapters where there are any, else all that it holds."""
    lora, choice = setting.training.lora, setting.choice
    if lora:
        whole = sum(tensor.numel for tensor in list_lora_parameters(setting.model, lora.rank, lora.target_modules))
        return (Part(whole / (choice.tp * choice.pp), _ranks(setting, choice.tp), choice.tp),)
    return held_parts(setting)


def held_parts(setting: TrainSetting) -> tuple[Part, ...]:
    """Parameters that a rank holds: dense ones divided by tp and pp, routed experts by their own ranks and pp.

    Source: Megatron-Core 0.14 parallel_state.py: experts have data parallel groups of their own.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> num_experts(find_model("Qwen/Qwen2.5-7B"))
    0
    """
    choice, experts = setting.choice, num_experts(setting.model)
    num_dense = setting.model.num_parameters - experts
    dense = Part(num_dense / (choice.tp * choice.pp), _ranks(setting, choice.tp), choice.tp)
    if not experts:
        return (dense,)
    expert_ranks = choice.expert_ranks
    return dense, Part(experts / (expert_ranks * choice.pp), _ranks(setting, expert_ranks), expert_ranks)


def num_trained(setting: TrainSetting) -> float:
    """Trained parameters of one rank."""
    return sum(part.numel for part in trained_parts(setting))


def num_experts(model: ModelSpec) -> int:
    """Parameters of all routed experts."""
    return model.numel_by_component.get(Component.EXPERTS, 0)


def _ranks(setting: TrainSetting, num_parts: int) -> int:
    """Ranks that shard the states of one of `num_parts` parts: all of a stage that hold this part, or some of them."""
    return setting.training.sharding_ranks(max(1, setting.num_ranks // (num_parts * setting.choice.pp)))


def pass_traffic(setting: TrainSetting, cluster: Cluster, *, is_training: bool) -> Cost:
    """Seconds of ZeRO's collectives in one pass, without overlap.

    Counts: stage 3 gathers e P before the forward pass and again before the backward pass. Stages 2 and 3 reduce and
    scatter g P after it. Where `fsdp_size` makes several groups of S ranks, they all-reduce their shards, g P / S.
    Source: Rajbhandari et al. 2020, section 7.2.2 (3 P in stage 3 against 2 P); torch 2.13 distributed/fsdp (HSDP).
    Differs: recomputation needs no third gather, because the backward pass keeps a layer's weights.
    """
    stage = setting.choice.zero_stage
    total = _host_traffic(setting, cluster, is_training=is_training)
    for numel, ranks, stride in held_parts(setting) if stage == 3 else ():
        gather = time_all_gather(numel * setting.training.dtype.num_bytes, ranks, cluster, stride)
        total += (gather + _layer_hops(setting, gather)).times(2 if is_training else 1)
    for numel, ranks, stride in trained_parts(setting) if is_training and stage >= 2 else ():
        total += time_reduce_scatter(numel * setting.runs.reduce_bytes, ranks, cluster, stride)
        groups = setting.num_ranks // (ranks * stride)
        total += time_all_reduce(numel * setting.runs.reduce_bytes / ranks, groups, cluster, ranks * stride)
    return total


def _host_traffic(setting: TrainSetting, cluster: Cluster, *, is_training: bool) -> Cost:
    """Seconds on the host link in one pass: offloaded weights up before each gather, gradients down to an offloaded
    optimizer, each rank its own shard. Source: Ren et al. 2021, section 4; Rajbhandari et al. 2021, section 5."""
    choice, link, e = setting.choice, cluster.gpu.host_link, setting.training.dtype.num_bytes
    moved = 0.0
    if choice.offloads_parameters:
        moved += sum(part.numel / part.ranks for part in held_parts(setting)) * e * (2 if is_training else 1)
    if choice.offloads_optimizer and is_training:
        moved += sum(part.numel / (part.ranks if choice.zero_stage else 1) for part in trained_parts(setting)) * e
    if not moved or link is None:
        return NOTHING
    return Cost({Resource.HOST_LINK: moved / (link.bytes_per_s.value * cluster.efficiencies.host_link.value)})


def _layer_hops(setting: TrainSetting, whole: Cost) -> Cost:
    """Hops of the further gathers, because stage 3 gathers layer by layer."""
    hops = whole.parts.get(Resource.LATENCY, 0.0)
    return Cost({Resource.LATENCY: hops * (setting.model.num_layers / setting.choice.pp - 1)})


def step_traffic(setting: TrainSetting, cluster: Cluster) -> Cost:
    """Seconds of the collectives of an optimizer step: gradients that no pass has reduced, and updated weights.

    Counts: stage 0 an all-reduce of g P; stage 1 a reduce-scatter of g P; stages 1 and 2 a gather of e P.
    Source: Rajbhandari et al. 2020, section 7.1; Megatron's distributed optimizer is stage 1.
    """
    stage, total = setting.choice.zero_stage, NOTHING
    for numel, ranks, stride in trained_parts(setting):
        if stage == 0:
            total += time_all_reduce(numel * setting.runs.reduce_bytes, ranks, cluster, stride)
        if stage == 1:
            total += time_reduce_scatter(numel * setting.runs.reduce_bytes, ranks, cluster, stride)
        if stage in (1, 2):
            total += time_all_gather(numel * setting.training.dtype.num_bytes, ranks, cluster, stride)
    return total


def overlap(computing: Cost, traffic: Cost, num_layers: float) -> Cost:
    """Add traffic that overlaps with compute; only its exposed part takes additional time.

    Counts: max(0, traffic - computing), the traffic of the first layer, which nothing can hide, and the slowdown of
    compute by the hidden part. Source: Zhao et al. 2023 (FSDP), section 3.3; DeepSpeed's prefetching.

    >>> hidden = overlap(Cost({Resource.COMPUTE: 10.0}), Cost({Resource.NETWORK: 4.0}), 4)
    >>> round(hidden.seconds, 2), round(overlap(hidden, NOTHING, 4).seconds, 2)  # 10 + 1 + 0.15 * 3
    (11.45, 11.45)
    """
    whole = traffic.seconds
    if not whole:
        return computing
    # the first layer has no earlier compute that could hide its traffic
    exposed = min(whole, max(0.0, whole - computing.seconds) + whole / max(1.0, num_layers))
    slowed = CONTENTION * (whole - exposed)
    return computing + traffic.times((exposed + slowed) / whole)


HIDDEN_BY_ASYNC_TP = 0.3
"""Share of tensor-parallel collectives, with their reordering of rows, that overlaps with matmuls. Source: PyTorch,
"Introducing async tensor parallelism" (2024), from memory: a step is 8 % faster, and these collectives are a quarter
of it."""

ROWS_SHARE = 0.886
"""Share of an all-gather's rate that NCCL's all-to-all of expert rows reaches inside a host. Source: measured on eight
B200 (SimuMax, configs/system/b200_bf16_ceperm.json): 0.597 and 0.674 of the link. Assumes: the same on other GPUs (four
A100 reach 0.92). Ulysses's equal messages have no measurement and keep the full rate."""


def exchange_cost(setting: TrainSetting, batch: MicroBatch, exchanges: float, cluster: Cluster) -> Cost:
    """Seconds of communication within one micro-batch, without experts (`expert_exchange_cost`). Only `hides_tp`
    overlaps any of it.

    Counts, per layer forward: tensor parallelism all-reduces e h T after attention and after the MLP (sequence
    parallelism splits each into two halves with the same bytes). Ulysses has an all-to-all of q, k, v and of the
    output, context parallelism a ring of keys and values. The backward pass repeats all of it. torchtitan's
    per-operator recomputation keeps reduced results and repeats gathers. torchao gathers 8 bits with tensor scales.
    Source: Shoeybi et al. 2019, section 3; Jacobs et al. 2023 (Ulysses), section 3.2; Liu et al. 2023 (ring attention).
    """
    model, choice, e = setting.model, setting.choice, setting.training.dtype.num_bytes
    rows = batch.num_tokens / setting.ranks_of_tokens
    layers = model.num_layers / choice.pp
    total = NOTHING
    if choice.tp > 1:
        hidden = HIDDEN_BY_ASYNC_TP if setting.runs.hides_tp else 0.0
        gathers, reductions = _halves(setting, exchanges)
        halves = (gathers / (e if setting.runs.gathers_8bit else 1) + reductions) * layers * (1 - hidden)
        total += time_all_gather(e * model.hidden_size * rows, choice.tp, cluster).times(halves)
    stride = choice.tp
    if choice.ulysses > 1:
        width = 2 * model.q_size + 2 * model.kv_size
        layer_cost = time_all_to_all(e * width * rows, choice.ulysses, cluster, stride)
        total += layer_cost.times(layers * exchanges)
    if choice.cp > 1:
        layer_cost = time_all_gather(e * 2 * model.kv_size * rows * choice.cp, choice.cp, cluster, stride)
        total += layer_cost.times(layers * exchanges)
    return total


def _halves(setting: TrainSetting, exchanges: float) -> tuple[float, float]:
    """Number of gathers and of reductions of a layer's rows among tensor-parallel ranks."""
    again = 2 if setting.recompute is Recompute.SELECTIVE and exchanges > 1 else 0
    return 2 * exchanges + again, 2 * exchanges


def ordered_bytes(setting: TrainSetting, batch: MicroBatch, exchanges: float) -> float:
    """Bytes that a rank reads and writes to reorder rows of all layers around tensor-parallel collectives.

    Counts: torch gathers along the first dimension, which is the batch's sequence dimension. Shares of the ranks are
    then chunked and concatenated along the tokens, e h read and e h written, after each gather and, in reverse, before
    each reduction; 1 byte instead of e for 8-bit gathers. Async tensor parallelism hides its share of this too. A
    single sequence needs no reordering.
    Source: torch 2.13 distributed/_functional_collectives.py (`all_gather_single`, `reduce_scatter_single`).
    """
    if setting.choice.tp == 1 or setting.backend != "fsdp2" or batch.num_sequences <= 1:
        return 0.0
    e = setting.training.dtype.num_bytes
    gathers, reductions = _halves(setting, exchanges)
    copied = gathers * (1 if setting.runs.gathers_8bit else e) + reductions * e
    rows = batch.num_tokens / setting.ranks_of_tokens
    copied *= 1 - HIDDEN_BY_ASYNC_TP if setting.runs.hides_tp else 1.0
    return 2.0 * copied * setting.model.hidden_size * rows * setting.model.num_layers / setting.choice.pp


def expert_exchange_cost(setting: TrainSetting, batch: MicroBatch, exchanges: float, cluster: Cluster) -> Cost:
    """Seconds in which rows travel to experts and back, without overlap.

    Counts: per expert layer, the rows of a rank (T / tp under sequence parallelism) there and back; the backward pass
    repeats it. The busiest rank receives `expert_imbalance` times as many. Inside a host NCCL reaches `ROWS_SHARE` of
    the rate; DeepEP's and HybridEP's kernels reach all of it.
    Source: Megatron-Core 0.14 moe/token_dispatcher.py.
    """
    model, choice, experts = setting.model, setting.choice, setting.model.experts
    if choice.ep == 1 or experts is None:
        return NOTHING
    rows = batch.num_tokens / setting.ranks_of_tokens / choice.tp
    width = experts.latent_size or model.hidden_size
    copies = float(experts.num_active)
    sent = setting.training.dtype.num_bytes * width * copies * rows
    groups = (experts.num_groups, experts.active_groups)
    once = copies if setting.runs.sends_once else None
    one_way_cost = time_all_to_all(sent, choice.ep, cluster, copies=once, groups=groups)
    if not setting.runs.sends_once and (inside := one_way_cost.parts.get(Resource.DEVICE_LINK)):
        one_way_cost += Cost({Resource.DEVICE_LINK: inside * (1 / ROWS_SHARE - 1)})
    return one_way_cost.times(setting.expert_imbalance * 2 * len(experts.layers) / choice.pp * exchanges)


def stage_transfer_cost(setting: TrainSetting, batch: MicroBatch, cluster: Cluster) -> Cost:
    """Seconds to send a micro-batch's hidden states, or their gradients, from a rank of one stage to the next stage.

    Counts: e h T, divided by tp under sequence parallelism, through the rank's own adapter between hosts.
    Source: Narayanan et al. 2021, section 4.1 (scatter/gather).
    """
    pp = setting.choice.pp
    if pp == 1:
        return NOTHING
    rows = batch.num_tokens / setting.ranks_of_tokens / setting.row_shards
    route = find_link(cluster, 2, max(1, setting.num_ranks // pp))
    sent = setting.training.dtype.num_bytes * setting.model.hidden_size * rows
    return Cost({route.resource: sent / route.bytes_per_s, Resource.LATENCY: route.latency_s})
