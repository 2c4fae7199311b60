"""Communication between the ranks of one micro-batch: inside each layer, and between pipeline stages.

In: a TrainSetting, a micro-batch, the number of exchanges, a Cluster. Out: a Cost. Left out:
ZeRO's gathers (shards.py), imbalance between experts, rows that one message brings to several experts.

Ranks of a stage are neighbours, and stages follow each other: Megatron-Core 0.14, parallel_state.py, `tp-cp-ep-dp-pp`.
Experts have a rank order of their own in it: ep neighbours (`expert_tensor_parallel_size` 1), whatever tp and cp are.
"""

from rlplan.memory.trainers.shape import Recompute
from rlplan.timing.cost import NOTHING, Cost, Resource
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.network.collectives import time_all_gather, time_all_to_all
from rlplan.timing.network.links import find_link
from rlplan.timing.training.settings import MicroBatch, TrainSetting

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
