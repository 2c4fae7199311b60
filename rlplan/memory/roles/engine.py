"""Memory of a rollout engine rank on its GPU and its host, action by action, awake and asleep.

Asleep (vLLM's sleep mode) the KV cache is freed, and the weights move to the host (level 1) or are dropped (level 2).
Context, communicator, CUDA graphs and loaded kernels stay. An engine that never sleeps also keeps the allocator's cache
of its largest batch: vLLM empties that cache only in `sleep` (device_allocator/cumem.py).
Where the trainer generates by itself (transformers' `generate`), there is no engine process, no copy of the weights and
no KV cache pool. Source: TRL 1.16 trainer/grpo_trainer.py (`unwrap_model_for_generation`), transformers 5.19
cache_utils.py.

In: a model, the engine's settings, bytes of its KV cache. Out: bytes by kind.
Left out: the formulas (serving/), pipelines, draft models, images, and KV cache slots of rejected draft tokens.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil

from rlplan.dataflow.choice import EngineChoice
from rlplan.dataflow.schedule import Action
from rlplan.memory.ledger import RunPhase
from rlplan.memory.machine.host import pinned_bytes
from rlplan.memory.model.engine_base import find_engine_quantization, shared_base_bytes
from rlplan.memory.model.quantization import Quantization
from rlplan.memory.predict import Forecast
from rlplan.memory.roles.process import Bytes, add, pin_sizes, process_overheads, sync_staging
from rlplan.memory.serving import tensorrt_llm
from rlplan.memory.serving.kv import CachePool, build_cache_pool
from rlplan.memory.serving.peaks import (
    COMPILED_KERNELS,
    NON_TORCH_GROWTH,
    RUNNER_SEGMENTS,
    cuda_graph_bytes,
    expert_workspace_bytes,
    input_buffer_bytes,
    prefill_peak_bytes,
    sampler_peak_bytes,
)
from rlplan.memory.serving.versions import VllmVersion, find_version
from rlplan.memory.serving.weights import build_engine_layout, engine_weight_bytes, rotary_table_bytes
from rlplan.memory.weight_sync.adapters import EngineAdapters
from rlplan.spec.hardware.profile import GpuOverheads
from rlplan.spec.model import ModelSpec
from rlplan.spec.resolved import SettledJob, SettledRollout
from rlplan.units import ceil_div
from rlplan.vocabulary import ActionKind, MemoryKind, Placement


@dataclass(frozen=True)
class Incoming:
    """Buffers through which new weights arrive."""

    staging: int
    """Bytes of the weight sync bucket."""
    adapters: EngineAdapters | None = None
    """The adapters of an engine that receives only these; None where whole weights arrive."""


def find_incoming(job: SettledJob, model: ModelSpec, choice: EngineChoice) -> Incoming:
    """The weight sync buffers of an engine choice."""
    e, bucket, lora = job.rollout.dtype.num_bytes, job.placement.sync_bucket, job.training.lora
    if not choice.adapter_versions or lora is None:
        return Incoming(sync_staging(model, e, bucket, job.backend))
    adapters = EngineAdapters(lora, choice.adapter_versions, e)
    return Incoming(adapters.staging_bytes(model, bucket) if bucket else 0, adapters)


class EngineOnGpu(Forecast):
    """One rank of one engine. See `predict.Forecast`. kv_cache: bytes of KV cache per GPU."""

    def __init__(
        self,
        model: ModelSpec,
        rollout: SettledRollout,
        choice: EngineChoice,
        placement: Placement,
        overheads: GpuOverheads,
        incoming: Incoming,
        kv_cache: int = 0,
    ) -> None:
        self.model, self.rollout, self.choice, self.placement = model, rollout, choice, placement
        self.overheads, self.incoming, self.kv_cache = overheads, incoming, kv_cache

    def predict_resident(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Bytes on the GPU after the action."""
        awake = self._awake
        if action.kind is ActionKind.SLEEP_ENGINE:
            awake = {}
        elif self.choice.sleep_level and action.kind in (ActionKind.WAKE_WEIGHTS, ActionKind.SYNC_WEIGHTS):
            del awake[MemoryKind.KV_CACHE]
        if not self.choice.sleep_level:
            awake[MemoryKind.FRAGMENTATION] = self.activation_bytes
        return add(self.asleep, awake)

    def predict_peak(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Bytes on the GPU at the peak inside the action."""
        if action.kind is ActionKind.SLEEP_ENGINE:
            return add(self.asleep, self._awake)
        sizes = self.predict_resident(action, run_phase)
        if action.kind in (ActionKind.START_ENGINE, ActionKind.GENERATE, ActionKind.EVALUATE):
            sizes.pop(MemoryKind.FRAGMENTATION, None)  # the batch reuses the segments that the allocator cached
            sizes = add(sizes, {MemoryKind.ACTIVATIONS: self.activation_bytes})
            if action.kind is ActionKind.START_ENGINE and self.rollout.shares_base:
                sizes = self._while_compared(sizes)
        elif action.kind is ActionKind.SYNC_WEIGHTS and self.placement is Placement.DISAGGREGATED:
            # On shared devices the trainer's bucket is mapped, not copied.
            sizes = add(sizes, {MemoryKind.SYNC_STAGING: self.incoming.staging})
        return sizes

    @property
    def _awake(self) -> Bytes:
        """Bytes that sleep frees. Adapter slots belong to the weights' pool (vLLM's `load_model`)."""
        slots = {MemoryKind.SYNC_STAGING: self._slot_bytes} if self._slot_bytes else {}
        return {MemoryKind.WEIGHTS: self.weight_bytes, MemoryKind.KV_CACHE: self.kv_cache} | slots

    @cached_property
    def _slot_bytes(self) -> int:
        """Bytes of the adapter slots."""
        adapters = self.incoming.adapters
        return adapters.slot_bytes(self.model, self.choice.tp) if adapters else 0

    def _while_compared(self, started: Bytes) -> Bytes:
        """The peak of the start with a shared base: the engine loads its own weights, compares them and only then maps
        the base."""
        own_weights = own_weight_bytes(self.model, self.rollout, self.choice)
        compared = {**started, MemoryKind.WEIGHTS: own_weights, MemoryKind.KV_CACHE: 0, MemoryKind.ACTIVATIONS: 0}
        return max(started, compared, key=lambda sizes: sum(sizes.values()))

    def predict_host(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Bytes in the host's memory: adapters, and the weights and slots of an engine asleep at level 1."""
        adapters = self.incoming.adapters
        sizes = {MemoryKind.SYNC_STAGING: adapters.copy_bytes(self.model, pinned_bytes)} if adapters else {}
        if self.choice.sleep_level != 1 or action.kind is not ActionKind.SLEEP_ENGINE:
            return sizes
        slots = {MemoryKind.SYNC_STAGING: self._slot_bytes} if adapters else {}
        return add(sizes, pin_sizes({MemoryKind.WEIGHTS: self.weight_bytes} | slots))

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the rank's parameters and rotary table."""
        return held_weight_bytes(self.model, self.rollout, self.choice)

    @cached_property
    def activation_bytes(self) -> int:
        """Bytes in flight of the larger of prefill and sampler."""
        choice, num_tokens, e = self.choice, self.rollout.max_num_batched_tokens, self.rollout.dtype.num_bytes
        ep, dp = choice.expert_ranks, choice.attention_dp
        prefill = prefill_peak_bytes(self.model, choice.tp, num_tokens, e, ep=ep, attention_dp=dp)
        if self._is_tensorrt_llm:  # its dry run samples nothing
            return prefill
        return max(prefill, sampler_peak_bytes(self.version, self.model, ceil_div(num_tokens, dp), self._num_rows))

    @cached_property
    def version(self) -> VllmVersion:
        """The engine's release."""
        return find_version(self.rollout.engine_version)

    @cached_property
    def asleep(self) -> Bytes:
        """Bytes that sleep does not free: context, communicator, graphs, kernels, buffers of this release."""
        choice, num_tokens, e = self.choice, self.rollout.max_num_batched_tokens, self.rollout.dtype.num_bytes
        groups = (choice.attention_dp, choice.ranks) if choice.attention_dp > 1 else ()
        is_apart = self.placement is Placement.DISAGGREGATED
        sizes = process_overheads(self.overheads, choice.tp, in_transfer_group=is_apart, axes=groups)
        if self.rollout.shares_process:  # the trainer's row counts the one context
            sizes[MemoryKind.CONTEXT] = 0
        sizes[MemoryKind.CONTEXT] += NON_TORCH_GROWTH + RUNNER_SEGMENTS + self._compiled_kernels
        buffers = input_buffer_bytes(self.version, self.model, ceil_div(num_tokens, choice.attention_dp), e)
        if self.version.keeps_workspaces_asleep:
            buffers += expert_workspace_bytes(self.model, choice.tp, num_tokens, e, ep=choice.expert_ranks)
        kinds = {MemoryKind.ACTIVATIONS: buffers, MemoryKind.CUDA_GRAPHS: self._graph_bytes}
        if self._is_tensorrt_llm:  # its overhead contains context, workspaces and graphs
            sizes[MemoryKind.CONTEXT] = 0 if self.rollout.shares_process else tensorrt_llm.FIXED_OVERHEAD
            return sizes
        return sizes | {kind: size for kind, size in kinds.items() if size}

    @property
    def _is_tensorrt_llm(self) -> bool:
        return self.rollout.engine == tensorrt_llm.NAME

    @property
    def _compiled_kernels(self) -> int:
        """Bytes of kernels that Triton compiles: attention with heads of two widths, and experts."""
        return COMPILED_KERNELS if self.model.global_attention or self.model.experts else 0

    @cached_property
    def _graph_bytes(self) -> int:
        captures_twice = self.incoming.adapters is not None and self.version.captures_with_adapters(self.model)
        return cuda_graph_bytes(
            self.version,
            self.model.num_layers,
            self._num_rows,
            enforce_eager=not self.rollout.has_cuda_graphs,
            num_captures=2 if captures_twice else 1,
        )

    def kv_budget(self, total_bytes: int, share: float) -> int:
        """Bytes of KV cache on a GPU under a `gpu_memory_utilization` of `share`; 0 where nothing is left.

        Counts: vLLM's fraction of the total, without weights, the peak of its profile run, kernels, and CUDA graphs
        where this release subtracts them. Source: vLLM 0.32.0 gpu_worker.py (`determine_available_memory`).
        """
        if self._is_tensorrt_llm:
            occupied = (
                self.weight_bytes + self.activation_bytes + tensorrt_llm.overhead_bytes(total_bytes, self.choice.ranks)
            )
            return tensorrt_llm.kv_budget_bytes(total_bytes, occupied, share)
        left = ceil(total_bytes * share) - self.weight_bytes - self.activation_bytes - NON_TORCH_GROWTH
        left -= self._graph_bytes if self.version.reserves_graphs(self.model) else 0
        return max(0, left)

    @property
    def _num_rows(self) -> int:
        """Rows of logits in a rank's batch: one per sequence, and one more per draft token."""
        return self.choice.seqs_per_rank * (1 + self.rollout.speculative_tokens)

    @property
    def pool(self) -> CachePool:
        """The blocks of the rank's KV cache."""
        return build_rank_pool(self.model, self.rollout, self.choice.tp)


def held_weight_bytes(model: ModelSpec, rollout: SettledRollout, choice: EngineChoice) -> int:
    """Bytes of a rank's parameters and rotary table. With a shared base only table and padding are the engine's own."""
    if not rollout.shares_base:
        return own_weight_bytes(model, rollout, choice)
    e = rollout.dtype.num_bytes
    return rotary_table_bytes(model, e) + shared_base_bytes(model, e) - e * model.num_parameters


def own_weight_bytes(model: ModelSpec, rollout: SettledRollout, choice: EngineChoice) -> int:
    """Bytes of the parameters and rotary table of a rank with weights of its own."""
    cut = choice.tp, choice.expert_ranks, choice.attention_dp
    return loaded_bytes(model, cut, rollout.dtype.num_bytes, find_engine_quantization(rollout, choice.quantization))


def build_rank_pool(model: ModelSpec, rollout: SettledRollout, tp: int) -> CachePool:
    """The blocks of a rank's KV cache."""
    element_bytes = 1 if rollout.kv_dtype == "fp8" else rollout.dtype.num_bytes
    # The cache key has only the sizes: hashing a pydantic model for every candidate would cost more than the pool.
    block_size = tensorrt_llm.BLOCK if rollout.engine == tensorrt_llm.NAME else rollout.block_size
    return _build_pool(model, tp, element_bytes, block_size if model.latent_attention is None else None)


@lru_cache(maxsize=256)
def _build_pool(model: ModelSpec, tp: int, element_bytes: int, block_size: int | None) -> CachePool:
    return build_cache_pool(model, tp=tp, element_bytes=element_bytes, block_size=block_size)


@lru_cache(maxsize=256)
def loaded_bytes(model: ModelSpec, cut: tuple[int, int, int], element_bytes: int, scheme: Quantization | None) -> int:
    """Bytes of a rank's parameters, quantized or not, and its rotary table. Raises: SpecError.

    cut: tensor parallel size, expert parallel size (1 where each expert is cut over tp), data-parallel attention size.
    """
    tp, ep, attention_dp = cut
    parameters = engine_weight_bytes(
        model, build_engine_layout(tp, ep=ep, attention_dp=attention_dp), element_bytes, scheme
    )
    return parameters + rotary_table_bytes(model, element_bytes)


def choose_engine_class(job: SettledJob, num_training: int) -> type[EngineOnGpu]:
    """The forecast for generation: an engine, or the trainer, which first gathers weights that are sharded."""
    if not job.rollout.generates_in_trainer:
        return EngineOnGpu
    is_cut = num_training > 1 and (job.backend == "fsdp2" or job.training.zero_stage == 3)
    return GatheredGeneration if is_cut or job.training.offloads_parameters is True else GenerationInTrainer


class GenerationInTrainer(EngineOnGpu):
    """Generation by one trainer rank, which adds memory only while it generates."""

    gathers = False

    def predict_resident(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Empty: generation leaves nothing on the GPU."""
        return {}

    def predict_peak(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Bytes on the GPU at the peak inside the action."""
        if action.kind not in (ActionKind.GENERATE, ActionKind.EVALUATE):
            return {}
        sizes = {MemoryKind.KV_CACHE: self.kv_cache, MemoryKind.ACTIVATIONS: self.activation_bytes}
        return sizes | ({MemoryKind.WEIGHTS: self.weight_bytes} if self.gathers else {})

    def predict_host(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Empty: generation uses no host memory."""
        return {}


class GatheredGeneration(GenerationInTrainer):
    """Generation with sharded weights: each rank gathers all of them for it (`ds3_gather_for_generation`)."""

    gathers = True
