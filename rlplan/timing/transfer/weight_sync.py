"""Weight sync: seconds until the rollout engines hold the updated policy, by transport.

In: a model, its layout and transport, the two clusters. Out: a Cost. Left out: waiting for running rollouts, the first
weight sync (communicators, pinned memory), kernels that quantize on the way, congestion.

Symbols: B bytes of the weights, n their tensors as in a checkpoint (an expert has three matrices), W bytes of a bucket,
k = ceil(B/W) buckets, N training ranks, t ranks of an engine, M the memory bandwidth that kernels reach.

A sync does not run at line rate: large models arrive with 2 to 20 GB/s although each adapter carries 50. The time goes
into work per tensor (gather, lookup, copy) and, with a server, into work per byte. Three stages follow each other:
GATHER, SEND and LOAD. With two alternating buckets they overlap, and the slowest decides.

Each of the few constants belongs to one mechanism. They come from published times of ten weight syncs
(accuracy/data/measured_points.json and the second figures of the same rows). reports/runtime/seconds.md has the
remaining errors, and those with each source left out.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import ceil
from typing import Literal

from rlplan.spec.model import Component, ModelSpec
from rlplan.spec.models.adapters import list_linear_layers
from rlplan.timing.cost import NOTHING, Cost, Resource
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.transfer.switches import host_copy_cost
from rlplan.timing.transfer.wires import find_gather_wire, find_sender_wire
from rlplan.units import ceil_div
from rlplan.vocabulary import Backend

SyncTransport = Literal["cuda_ipc", "shared_memory", "nccl", "disk", "adapter", "delta"]

GATHER_S_PER_TENSOR = 0.36e-3
"""Seconds to gather one sharded tensor: dispatch, a small all-gather, a copy into the bucket. Source: 7 s for
Qwen3-30B-A3B (18,867 tensors) from 2 FSDP ranks to 30 ranks that receive without loading. Another transport takes
nearly as long there, so the wire is not the cause. Without that figure, 23.7 s for 235B with a checkpoint engine gives
the same."""
LOAD_S_PER_TENSOR = 0.29e-3
"""Seconds for each rank of an engine to look up a tensor and copy its part. Source: 48 s for GLM-4.5 355B (slime, flat
buckets over CUDA IPC) less its gather and the requests for buckets of 1 GiB."""
SEND_S_PER_TENSOR = 0.33e-3
"""Seconds of a broadcast per tensor instead of per bucket. Source: 58.6 s for Qwen3-235B-A22B without verl's checkpoint
engine, less gather and load."""
PICKLE_S_PER_TENSOR_AND_RANK = 0.26e-3
"""Seconds to pickle a tensor's handle into and out of a server request, per rank of an engine. Mechanism: SGLang
srt/weight_sync/utils.py `update_weights`. Source: 246 to 266 s for Qwen3-235B-A22B into engines of 16 ranks."""
SERVER_BYTES_PER_S = 4.9e9
"""Rate at which such a server takes weights. Source: 14.2 s for 32B, with the masters on the GPU (verl, SGLang,
docs/advance/delta_weight_sync.md). Not used in the fit: 28.5 to 29.1 s for 72B, where this rate gives 30 s."""
SERVER_S = 0.3
"""Seconds to pause, flush and resume servers, once per weight sync. Source: 0.61 s for 0.6B within one host (the same
page) less its bytes and handles."""
STAGED_BYTES_PER_S = 2.2e9
"""Rate at which a rank copies offloaded masters to the GPU before it gathers them. Source: 32B takes 3.7 s longer with
offload, where a rank has 8.2 GB (the same page). Not used in the fit: 7B, predicted 5.2 s, published 5.5 to 6.0 s."""
REQUEST_S_PER_TENSOR = 1e-3
"""Seconds to name one tensor to an engine that receives each by itself: an HTTP or Ray request with an answer, and a
`load_weights` call, which lists all parameters. Source: 40 s for Qwen3-30B-A3B in TRL, less gather, send and load."""
ROUND_TRIP_S = 5e-3
"""Seconds of a request to all engine ranks with an answer, per bucket. Assumed: a Ray call and a device
synchronization."""
WRITTEN_BYTES_PER_S = 1.6e9
"""Rate at which one rank copies weights to the host and writes safetensors. Source: prime-rl v0.4.0,
benchmarks/baselines: seconds between two steps of RL with full weights, 1.36 to 1.77 GB/s in 14 runs of 0.6B, 4B and
30B on H100, H200 and B200. Not used in the fit: a pageable copy and the assumed disk of their hosts give 2.2 GB/s."""
COMPARE_BYTES_PER_S = 0.46e9
"""Rate at which a rank compares its shard with the last one sent and packs changed elements. Source: 3.9 to 4.9 s, 11.2
to 11.9 s and 11.4 to 14.9 s for shards of 1.9, 4.1 and 7.3 GB (verl delta_sharded)."""
CHANGED_SHARE = 0.03
"""Share of bf16 elements that differ after a step. Assumed: the upper end of the 1 to 3 % that verl's users report."""
GATHERED_ELEMENT_BYTES = 2
"""Weights are gathered in 16 bits. Narrower ones are quantized on the way, and each then has a tensor of scales."""
INDEX_BYTES = 4
"""Bytes of the position that accompanies a changed element (verl)."""
CODED_BYTES_PER_S = 1.67e9
"""Rate of delta coding in rlplan's own runtime, in bytes of all weights. One thread of the sending rank compares them
on the host with the last ones sent and encodes changes. One thread per engine rank applies them to its copy, packet by
packet in alternation. Measured for both ends together: reports/runtime/sync.md, shared memory, delta."""
GAP_BYTES = 1
"""Bytes of the distance to the previous changed element. Source: `rlplan.runtime.weight_sync.contents.delta`."""


class Loader(StrEnum):
    """How an engine receives weights: its ranks read the buffers, or a server receives pickled handles."""

    IN_PLACE = "in_place"
    PICKLED = "pickled"


@dataclass(frozen=True)
class SyncSetup:
    """Setup of a weight sync."""

    transport: SyncTransport
    element_bytes: int
    num_training: int
    """Training GPUs; on shared devices, all GPUs."""
    num_generation: int
    tp: int = 1
    """Tensor-parallel ranks of one engine."""
    zero_stage: int = 3
    bucket_bytes: int = 512 << 20
    """Bytes sent at a time; 0 sends each tensor by itself."""
    adapter_bytes: int = 0
    """Bytes of all adapters, where only they are sent."""
    same_devices: bool = False
    trainer: Backend = "deepspeed"
    """Training backend. Megatron's ranks of one shard lie on different hosts."""
    loader: Loader = Loader.IN_PLACE
    has_two_buckets: bool = True
    """One bucket fills while the other is sent."""
    changed_share: float = CHANGED_SHARE
    """Share of 16-bit elements that a delta sends; of wider elements practically all change in a step."""
    requests_each_tensor: bool = False
    """Each tensor is named to the engines in a request of its own."""
    gathered_element_bytes: int = GATHERED_ELEMENT_BYTES
    """Bytes per element while ranks gather; 4 where FSDP gathers fp32 masters."""
    stages_masters: bool = False
    """Offloaded masters of a rank are copied to the GPU first."""
    attention_dp: int = 1
    """Groups of tp ranks of one engine that replicate all but the experts, which they share."""

    @property
    def is_sharded(self) -> bool:
        """Whether each training rank holds only a shard of the weights."""
        return self.num_training > 1 and (self.zero_stage == 3 or self.trainer != "deepspeed")

    @property
    def is_coded_by_one(self) -> bool:
        """Whether the sending rank finds the changes of all weights; otherwise each rank finds those of its shard."""
        return self.transport == "delta" and self.trainer == "deepspeed"


@lru_cache(maxsize=64)
def num_sent_tensors(model: ModelSpec) -> int:
    """Tensors of a weight sync: those of the checkpoint, where each expert's matrices are separate.

    Counts: E for a stack of E experts, 2 E where gate and up are one. Source: Hugging Face checkpoints of Qwen3-MoE,
    GLM-4.5, DeepSeek. Differs: gpt-oss and Llama 4 store stacks; engines still place each expert.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> num_sent_tensors(find_model("Qwen/Qwen3-30B-A3B"))  # 531 + 48 layers * (3 * 128 - 2)
    18867
    """
    return sum(
        (2 if "gate_up" in tensor.name else 1) * tensor.shape[0]
        if tensor.component is Component.EXPERTS and len(tensor.shape) == 3
        else 1
        for tensor in model.parameters
    )


def sync_cost(model: ModelSpec, setup: SyncSetup, training: Cluster, generation: Cluster) -> Cost:
    """Seconds of one weight sync.

    Counts: GATHER + SEND + LOAD in sequence, or the slowest plus one bucket of the others (`overlap_stages`). With
    deltas of rlplan's own runtime, GATHER ends on the host with coded changes, and LOAD starts there with all weights.
    Source: verl checkpoint_engine (two alternating buckets), slime update_weight (in sequence).
    Assumes: all ranks gather everything; every engine receives everything at the same time.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> from rlplan.spec.hardware.catalogue import get_gpu, get_node
    >>> gpu, node = get_gpu("h100", where=""), get_node("dgx-h100", where="")
    >>> model, eight = find_model("Qwen/Qwen2.5-7B"), Cluster(gpu, 8, 8, node)
    >>> setup = SyncSetup("nccl", 2, 8, 8, loader=Loader.PICKLED)  # SERVER_S + 15.2 GB at SERVER_BYTES_PER_S and more
    >>> round(sync_cost(model, setup, eight, eight).seconds, 1)  # 15.2 / 4.9 + 0.3, and 0.1 beside them
    3.5
    """
    ends = sync_ends(model, setup, training, generation)
    num_bytes, gather, load = ends.num_bytes, ends.gather, ends.load
    if setup.transport == "delta":
        wire = find_sender_wire(training, generation)
        send = Cost({wire.resource: wire.seconds(num_bytes)})
        if not setup.is_coded_by_one:
            return gather + send + load
        num_buckets = ceil_div(model.num_parameters * setup.element_bytes, setup.bucket_bytes)
        return overlap_stages((gather, send, load), num_buckets)
    if setup.transport == "disk":
        return gather + _through_disk(num_bytes, training, generation) + load
    if setup.transport == "shared_memory":
        return gather + host_copy_cost(num_bytes, training) + host_copy_cost(num_bytes, generation) + load
    if setup.transport == "cuda_ipc" or setup.same_devices:
        return gather + load
    send = _send(num_bytes, ends.num_tensors, training, generation, is_packed=setup.bucket_bytes > 0)
    send_all = gather + send + load
    if setup.has_two_buckets and setup.bucket_bytes:
        send_all = overlap_stages((gather, send, load), ceil_div(num_bytes, setup.bucket_bytes)) + _server(setup)
    return send_all + _stage_masters(model, setup)


@dataclass(frozen=True)
class SyncEnds:
    """The two ends of a weight sync, independent of the transport between them."""

    num_bytes: int
    """Bytes that travel."""
    num_tensors: int
    gather: Cost
    """Cost until the weights can be sent."""
    load: Cost
    """Cost after their arrival."""


def sync_ends(model: ModelSpec, setup: SyncSetup, training: Cluster, generation: Cluster) -> SyncEnds:
    """Compute the data of a sync and the work of both ends, for full weights, adapters or deltas."""
    num_bytes, tensors = model.num_parameters * setup.element_bytes, num_sent_tensors(model)
    if setup.transport == "delta" and not setup.is_coded_by_one:
        return _ends_of_shards(model, setup, generation)
    if setup.transport == "adapter":
        num_bytes, tensors = setup.adapter_bytes, 2 * len(list_linear_layers(model))
    gathered = num_bytes * max(1, setup.gathered_element_bytes // setup.element_bytes)
    gather = gather_cost(gathered, tensors, setup, training)
    # narrower weights have a tensor of scales each
    tensors *= 1 if setup.element_bytes >= GATHERED_ELEMENT_BYTES else 2
    share = held_share(model, setup) if setup.transport != "adapter" else 1 / setup.tp
    load = load_cost(num_bytes, tensors, setup, generation, share)
    if setup.is_coded_by_one:
        gather += host_copy_cost(gathered, training) + Cost({Resource.HOST: gathered / CODED_BYTES_PER_S})
        load += host_copy_cost(gathered * share, generation)
        num_bytes = changed_bytes(model, setup)
    return SyncEnds(num_bytes, tensors, gather, load)


def _ends_of_shards(model: ModelSpec, setup: SyncSetup, generation: Cluster) -> SyncEnds:
    """Both ends of a delta that every training rank finds in its own shard: a comparison, and two passes to write it.

    Source: verl docs/advance/delta_weight_sync.md.
    """
    num_bytes = model.num_parameters * setup.element_bytes
    compare = Cost({Resource.HOST: num_bytes / setup.num_training / COMPARE_BYTES_PER_S})
    write = Cost({Resource.MEMORY: 2 * num_bytes * held_share(model, setup) / generation.reached_memory_bytes_per_s})
    return SyncEnds(changed_bytes(model, setup), num_sent_tensors(model), compare, write + _server(setup))


def changed_bytes(model: ModelSpec, setup: SyncSetup) -> int:
    """Bytes of the changed elements with their positions.

    Counts: P c (e + INDEX_BYTES), c the changed share. rlplan's own coding: P c (e + GAP_BYTES), e at least 2, at most
    all weights. Source: as `sync_ends`. Assumes: all elements wider than 16 bits change.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> model = find_model("meta-llama/Llama-3.1-8B")  # 8,030,261,248 parameters, of which 3 % change
    >>> [changed_bytes(model, SyncSetup("delta", size, 8, 8)) for size in (2, 4)]  # 3 bytes each; all of 4
    [722723513, 32121044992]
    """
    size = setup.element_bytes
    share = setup.changed_share if size <= GATHERED_ELEMENT_BYTES else 1.0
    if not setup.is_coded_by_one:
        return ceil(model.num_parameters * share * (size + INDEX_BYTES))
    coded = max(size, GATHERED_ELEMENT_BYTES)
    return min(model.num_parameters * coded, ceil(model.num_parameters * share * (coded + GAP_BYTES)))


def overlap_stages(stages: tuple[Cost, ...], num_buckets: int) -> Cost:
    """Overlap stages that work on different buckets: the slowest stage, plus one bucket of each other stage.

    Counts: max(s) + (sum(s) - max(s)) / k. Source: a pipeline's fill. Assumes: buckets of one size.

    >>> overlap_stages((Cost({Resource.NETWORK: 4.0}), Cost({Resource.LATENCY: 10.0})), 4).seconds
    11.0
    """
    slowest = max(stages, key=lambda stage: stage.seconds)
    others = NOTHING
    for stage in stages:
        others += NOTHING if stage is slowest else stage
    return slowest + others.times(1 / max(1, num_buckets))


def gather_cost(num_bytes: int, num_tensors: int, setup: SyncSetup, training: Cluster) -> Cost:
    """Seconds until a rank has all weights in a bucket.

    Counts: (N-1)/N B over the slower of a host's own link and the network, n GATHER_S_PER_TENSOR; 2 B / M to pack.
    Source: torch DTensor.full_tensor; ring all-gather. Assumes: ZeRO 0 to 2 gather nothing.

    >>> from rlplan.spec.hardware.catalogue import get_gpu
    >>> gpu = Cluster(get_gpu("h100", where=""), 1, 1)
    >>> gather_cost(0, 100, SyncSetup("nccl", 2, 1, 1), gpu).seconds
    0.0
    """
    packing = Cost({Resource.MEMORY: 2 * num_bytes / training.reached_memory_bytes_per_s})
    if not setup.is_sharded:
        return packing
    wire = find_gather_wire(training, setup.num_training, is_strided=setup.trainer == "megatron")
    return packing + Cost({wire.resource: wire.seconds(num_bytes), Resource.LATENCY: num_tensors * GATHER_S_PER_TENSOR})


def held_share(model: ModelSpec, setup: SyncSetup) -> float:
    """Share of the weights that each rank of an engine loads.

    Counts: experts over all its ranks, all else over tp. Assumes: replicated shared experts (vLLM, tp and attention_dp
    above 1) are negligible.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> model = find_model("Qwen/Qwen3-30B-A3B")  # 28,991,029,248 of 30,532,122,624 parameters are experts'
    >>> round(held_share(model, SyncSetup("nccl", 2, 8, 8, tp=2, attention_dp=4)), 6)
    0.143928
    """
    experts = model.numel_by_component.get(Component.EXPERTS, 0) / model.num_parameters
    return (1 - experts + experts / setup.attention_dp) / setup.tp


def load_cost(num_bytes: int, num_tensors: int, setup: SyncSetup, generation: Cluster, share: float = 1.0) -> Cost:
    """Seconds until an engine has loaded the weights. share: part of them that each rank loads.

    Counts: in place n LOAD_S_PER_TENSOR, 2 B s / M, and k ROUND_TRIP_S or n REQUEST_S_PER_TENSOR; through a server
    n PICKLE_S_PER_TENSOR_AND_RANK for each of its ranks, and B / SERVER_BYTES_PER_S. Source: vLLM and SGLang
    `load_weights`.
    Assumes: ranks of an engine load their parts at the same time.

    >>> from rlplan.spec.hardware.catalogue import get_gpu
    >>> gpu = Cluster(get_gpu("h100", where=""), 1, 1)
    >>> setup = SyncSetup("nccl", 2, 1, 1, loader=Loader.PICKLED)
    >>> load_cost(49 * 10**8, 0, setup, gpu).seconds
    1.0
    """
    if setup.loader is Loader.PICKLED:
        pickled = num_tensors * setup.tp * setup.attention_dp * PICKLE_S_PER_TENSOR_AND_RANK
        return Cost({Resource.HOST: num_bytes / SERVER_BYTES_PER_S, Resource.LATENCY: pickled})
    trips = ceil_div(num_bytes, setup.bucket_bytes) * ROUND_TRIP_S if setup.bucket_bytes else 0.0
    if setup.requests_each_tensor:
        trips = num_tensors * REQUEST_S_PER_TENSOR
    copied = 2 * num_bytes * share / generation.reached_memory_bytes_per_s
    return Cost({Resource.LATENCY: num_tensors * LOAD_S_PER_TENSOR + trips, Resource.MEMORY: copied})


def _send(num_bytes: int, num_tensors: int, training: Cluster, generation: Cluster, *, is_packed: bool) -> Cost:
    """Broadcast from one training rank to all engine ranks; the ring enters each host once."""
    wire = find_sender_wire(training, generation)
    per_tensor_s = 0.0 if is_packed else num_tensors * SEND_S_PER_TENSOR
    return Cost({wire.resource: wire.seconds(num_bytes), Resource.LATENCY: per_tensor_s})


def _stage_masters(model: ModelSpec, setup: SyncSetup) -> Cost:
    """Copy a rank's offloaded masters to the GPU, before any tensor is gathered."""
    if not setup.stages_masters:
        return NOTHING
    num_bytes = model.num_parameters * setup.gathered_element_bytes / setup.num_training
    return Cost({Resource.HOST: num_bytes / STAGED_BYTES_PER_S})


def _server(setup: SyncSetup) -> Cost:
    return Cost({Resource.LATENCY: SERVER_S}) if setup.loader is Loader.PICKLED else NOTHING


def _through_disk(num_bytes: int, training: Cluster, generation: Cluster) -> Cost:
    """One rank writes a checkpoint, and each engine's host reads all of it."""
    reads = Cost({Resource.DISK: num_bytes / generation.node_efficiencies.disk_bytes_per_s.value})
    return write_cost(num_bytes, training) + reads + host_copy_cost(num_bytes, generation)


def write_cost(num_bytes: int, training: Cluster) -> Cost:
    """Seconds in which one rank copies gathered weights to host memory and writes them to files.

    Counts: B over WRITTEN_BYTES_PER_S, or over the host's disk where that is slower. Source: prime-rl v0.3.0
    trainer/weights.py (`gather_weights_on_master`, `save_state_dict`): tensor by tensor, and the other ranks wait.
    """
    rate = min(WRITTEN_BYTES_PER_S, training.node_efficiencies.disk_bytes_per_s.value)
    return Cost({Resource.DISK: num_bytes / rate})
