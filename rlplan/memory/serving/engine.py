"""Memory of a vLLM engine on GPUs, by vLLM's own arithmetic: from `gpu_memory_utilization` to tokens of KV cache.

In: a ModelSpec, EngineSettings. Out: EngineMemory, the bytes of each use on the rank with the fewest blocks.
Left out: CPU engines (roles/cpu_engine.py), speculative decoding, LoRA slots, encoder caches, offloading connectors.

    KV cache = ceil(total * gpu_memory_utilization) - weights - max(prefill, sampler, encoder) - not torch's [- graphs]

Source: vLLM 0.32.0 v1/worker/gpu_worker.py `determine_available_memory` and v1/worker/utils.py `request_memory`.
"""

import math
from dataclasses import dataclass

from rlplan.errors import SpecError
from rlplan.memory.model.quantization import Quantization
from rlplan.memory.serving import tensorrt_llm
from rlplan.memory.serving.kv import CachePool, build_cache_pool
from rlplan.memory.serving.peaks import (
    cuda_graph_bytes,
    encoder_peak_bytes,
    non_torch_bytes,
    prefill_peak_bytes,
    sampler_peak_bytes,
)
from rlplan.memory.serving.versions import LATEST, BatchLimits, VllmVersion, find_default_limits
from rlplan.memory.serving.weights import build_engine_layout, engine_weight_bytes, rotary_table_bytes
from rlplan.spec.model import ModelSpec
from rlplan.spec.models.dimensions import Layout
from rlplan.spec.models.shards import split_layers
from rlplan.units import MIB, ceil_div, format_bytes

DEFAULT_UTILIZATION = {False: 0.9, True: 0.92}
"""Default `gpu_memory_utilization` before vLLM 0.21 (False) and since (True). Source: vLLM 0.11 and 0.32.0
config/cache.py."""
CONTEXT = 500 * MIB
COMMUNICATOR = 400 * MIB
"""Bytes of a process's CUDA context and NCCL buffers, for callers without a hardware profile. A100 and H100 measure
480 to 520 MiB for the context; NCCL 342 to 392 MiB per group (aiconfigurator's table)."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of an engine. None: vLLM's default for the version and the GPU."""

    total_bytes: int
    """Bytes of the GPU, as the driver reports."""
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    """Bytes of KV cache, which replace `gpu_memory_utilization`."""
    tp: int = 1
    pp: int = 1
    ep: int = 1
    attention_dp: int = 1
    """Data-parallel attention size. Its ranks share the limits of a batch."""
    context_ranks: int = 1
    """Decode context parallel size."""
    element_bytes: int = 2
    """Bytes of an unquantized weight."""
    kv_element_bytes: int = 2
    """Bytes of a cached key or value element."""
    quantization: Quantization | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    block_size: int | None = None
    enforce_eager: bool = False
    is_a100: bool = False
    has_lora: bool = False
    """Whether adapters are served, so that CUDA graphs may be captured twice (`VllmVersion.captures_with_adapters`)."""
    context_bytes: int = CONTEXT
    communicator_bytes: int = COMMUNICATOR
    version: VllmVersion = LATEST
    non_torch_bytes: int | None = None
    """Bytes outside of torch where a log states them."""
    is_tensorrt_llm: bool = False
    """Whether the engine is TensorRT-LLM, which takes its fraction of the free memory and has larger blocks."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes of one rank of an engine, by use."""

    requested: int
    """Bytes of the GPU times `gpu_memory_utilization`."""
    weights: int
    rope_table: int
    prefill_peak: int
    sampler_peak: int
    encoder_peak: int
    non_torch: int
    cuda_graphs: int
    kv_budget: int
    """Bytes that are left for the KV cache."""
    kv_cache: int
    """Bytes of KV cache in whole blocks."""
    num_blocks: int
    num_tokens: int
    """Tokens that vLLM's log states as the size of the KV cache."""
    block_size: int
    max_model_len: int
    limits: BatchLimits
    pool: CachePool
    in_flight: int = 0
    """Tokens of scheduled batches, which a sliding window holds in addition to its own."""

    @property
    def activation_peak(self) -> int:
        """Bytes at the peak of the profile run, without the weights."""
        return max(self.prefill_peak, self.sampler_peak, self.encoder_peak)

    @property
    def model_bytes(self) -> int:
        """Bytes that vLLM logs as `Model loading took`."""
        return self.weights + self.rope_table

    @property
    def max_concurrency(self) -> float:
        """Sequences of the largest length that the cache holds at once."""
        return self.num_blocks / self.pool.blocks_of_sequence(self.max_model_len, self.in_flight)


def predict_engine_memory(model: ModelSpec, settings: EngineSettings) -> EngineMemory:
    """Predict the memory of an engine's rank with the fewest blocks. Raises: SpecError where sizes do not divide.

    A budget below zero gives no blocks.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> settings = EngineSettings(80 << 30, gpu_memory_utilization=0.9, max_model_len=8192)
    >>> memory = predict_engine_memory(find_model("meta-llama/Llama-3.1-8B"), settings)
    >>> memory.weights, memory.rope_table, memory.pool.bytes_per_block
    (16060522496, 33554432, 2097152)
    >>> memory.kv_budget  # ceil(0.9 * 80 GiB) - model - 1024*128256*14 - 2*8192*4096 - 70 MiB - 102 * 32 * 300 KiB
    58233446400
    >>> memory.num_blocks, memory.num_tokens, memory.kv_cache == memory.num_blocks * 2097152
    (27767, 444272, True)
    """
    _check(settings)
    layout = build_engine_layout(settings.tp, settings.pp, settings.ep, settings.attention_dp)
    stages = [_predict_stage(model, settings, layout, stage) for stage in range(settings.pp)]
    return min(stages, key=lambda memory: memory.num_blocks)


def choose_limits(model: ModelSpec, settings: EngineSettings) -> BatchLimits:
    """The batch limits of an engine: those of its settings, otherwise vLLM's defaults times data-parallel ranks."""
    length = settings.max_model_len or model.max_position_embeddings
    usual = find_default_limits(
        settings.version,
        settings.total_bytes,
        length,
        is_a100=settings.is_a100,
    )
    return BatchLimits(
        settings.max_num_seqs or settings.attention_dp * usual.max_num_seqs,
        settings.max_num_batched_tokens or settings.attention_dp * usual.max_num_batched_tokens,
    )


def build_engine_pool(model: ModelSpec, settings: EngineSettings, layers: range | None = None) -> CachePool:
    """The blocks of a rank's KV cache."""
    return build_cache_pool(
        model,
        tp=settings.tp,
        element_bytes=settings.kv_element_bytes,
        block_size=settings.block_size or (tensorrt_llm.BLOCK if settings.is_tensorrt_llm else None),
        context_ranks=settings.context_ranks,
        layers=layers,
        splits_groups=settings.version.splits_cache_groups,
    )


def _predict_stage(model: ModelSpec, settings: EngineSettings, layout: Layout, stage: int) -> EngineMemory:
    version, limits, dp = settings.version, choose_limits(model, settings), settings.attention_dp
    is_trt = settings.is_tensorrt_llm
    rank_limits = BatchLimits(ceil_div(limits.max_num_seqs, dp), ceil_div(limits.max_num_batched_tokens, dp))
    length = settings.max_model_len or model.max_position_embeddings
    is_first, is_last = stage == 0, stage == settings.pp - 1  # the first stage encodes images, the last one samples
    share = settings.gpu_memory_utilization
    if share is None:
        share = tensorrt_llm.FREE_FRACTION if is_trt else DEFAULT_UTILIZATION[version.counts_cuda_graphs]
    weights = engine_weight_bytes(model, layout, settings.element_bytes, settings.quantization, stage)
    rope = rotary_table_bytes(model, settings.element_bytes)
    e, num_tokens, ep = settings.element_bytes, limits.max_num_batched_tokens, settings.ep
    prefill = prefill_peak_bytes(model, settings.tp, num_tokens, e, ep=ep, attention_dp=dp)
    sampler = (
        sampler_peak_bytes(version, model, rank_limits.max_num_batched_tokens, rank_limits.max_num_seqs)
        if is_last and not is_trt
        else 0
    )
    encoder = encoder_peak_bytes(model, rank_limits.max_num_batched_tokens) if is_first else 0
    non_torch = settings.non_torch_bytes
    if non_torch is None and is_trt:
        non_torch = tensorrt_llm.overhead_bytes(settings.total_bytes, settings.tp * dp)
    elif non_torch is None:
        non_torch = non_torch_bytes(version, settings.tp * dp, settings.context_bytes, settings.communicator_bytes)
    layers = split_layers(model.num_layers, settings.pp)[stage]
    captures = 2 if settings.has_lora and version.captures_with_adapters(model) else 1
    is_eager = settings.enforce_eager or is_trt  # TensorRT-LLM's graphs are part of its overhead
    graphs = cuda_graph_bytes(
        version, len(layers), rank_limits.max_num_seqs, enforce_eager=is_eager, num_captures=captures
    )
    budget = settings.kv_cache_memory_bytes
    occupied = weights + rope + max(prefill, sampler, encoder) + non_torch
    requested = math.ceil(settings.total_bytes * share)
    if is_trt:
        requested = occupied + tensorrt_llm.kv_budget_bytes(settings.total_bytes, occupied, share)
    if budget is None:
        budget = requested - occupied - (graphs if version.reserves_graphs(model) else 0)
    pool = build_engine_pool(model, settings, layers)
    blocks = pool.num_blocks(budget)
    in_flight = limits.max_num_batched_tokens * version.num_batches_in_flight
    logs_capacity = version.counts_group_capacity
    return EngineMemory(
        requested=requested,
        weights=weights,
        rope_table=rope,
        prefill_peak=prefill,
        sampler_peak=sampler,
        encoder_peak=encoder,
        non_torch=non_torch,
        cuda_graphs=graphs,
        kv_budget=max(budget, 0),
        kv_cache=blocks * pool.bytes_per_block,
        num_blocks=blocks,
        num_tokens=pool.num_tokens(blocks, length, in_flight) if logs_capacity else pool.num_table_tokens(blocks),
        block_size=pool.block_size,
        max_model_len=length,
        limits=limits,
        pool=pool,
        in_flight=in_flight,
    )


def _check(settings: EngineSettings) -> None:
    share = settings.gpu_memory_utilization
    if share is not None and not 0 < share <= 1:
        raise SpecError(
            f"gpu_memory_utilization is {share}",
            where="gpu_memory_utilization",
            rule="a fraction of the GPU's total, above 0 and at most 1",
            way_out="use a fraction such as 0.9",
        )
    if settings.total_bytes <= 0:
        raise SpecError(
            f"the GPU has {format_bytes(settings.total_bytes)}",
            where="total_bytes",
            rule="above 0",
            way_out="use the total that the driver reports",
        )
