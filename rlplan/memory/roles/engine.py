"""What one rank of the rollout engine holds on its GPU and on its host, action by action, awake and asleep.

In: a model, the engine's settings, bytes of its KV cache. Out: bytes by kind. The formulas are in serving_*.py.
Left out: pipelines, draft models, images, and the k slots of a sequence that are drafted into and not taken.

Asleep (vLLM's sleep mode) the KV cache is gone and the weights are on the host (level 1) or dropped (level 2); context,
communicator, CUDA graphs and what the driver keeps for kernels stay. An engine that never sleeps keeps what its
allocator has cached of its largest batch too: vLLM empties that cache in `sleep` only (device_allocator/cumem.py).
Where the trainer generates by itself (transformers' `generate`), there is no process, no copy of the weights and no
pool of a KV cache beside it. Source: TRL 1.16 trainer/grpo_trainer.py (`unwrap_model_for_generation`), transformers
5.19 cache_utils.py.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil

from rlplan.dataflow.choice import EngineChoice
from rlplan.dataflow.schedule import Action
from rlplan.memory.ledger import RunPhase
from rlplan.memory.machine.host import pinned_bytes
from rlplan.memory.model.engine_base import engine_quantization
from rlplan.memory.model.quantization import Quantization
from rlplan.memory.predict import Forecast
from rlplan.memory.roles.process import Bytes, add, pinned, process_overheads, sync_staging
from rlplan.memory.serving.kv import CachePool, cache_pool
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
from rlplan.memory.serving.shared_base import shared_base_bytes
from rlplan.memory.serving.tensors import rotary_table_bytes
from rlplan.memory.serving.versions import LATEST, VllmVersion, parse_version
from rlplan.memory.serving.weights import engine_layout, engine_weight_bytes
from rlplan.memory.weight_sync.adapters import EngineAdapters
from rlplan.spec.hardware.profile import GpuOverheads
from rlplan.spec.model import ModelSpec
from rlplan.spec.resolved import SettledJob, SettledRollout
from rlplan.units import ceil_div
from rlplan.vocabulary import ActionKind, MemoryKind, Placement


@dataclass(frozen=True)
class Incoming:
    """What new weights come through. staging: bytes of the bucket. adapters: of an engine that gets these alone."""

    staging: int
    adapters: EngineAdapters | None = None


def incoming(job: SettledJob, model: ModelSpec, choice: EngineChoice) -> Incoming:
    """The same of a choice."""
    e, bucket, lora = job.rollout.dtype.num_bytes, job.placement.sync_bucket, job.training.lora
    if not choice.adapter_versions or lora is None:
        return Incoming(sync_staging(model, e, bucket, job.backend))
    adapters = EngineAdapters(lora, choice.adapter_versions, e)
    return Incoming(adapters.staging_bytes(model, bucket) if bucket else 0, adapters)


class EngineOnGpu(Forecast):
    """One rank of one engine. See `predict.Forecast`.

    kv_cache: bytes a GPU.
    """

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

    def resident(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Held on the GPU when the action has ended."""
        awake = self._awake
        if action.kind is ActionKind.SLEEP_ENGINE:
            awake = {}
        elif self.choice.sleep_level and action.kind in (ActionKind.WAKE_WEIGHTS, ActionKind.SYNC_WEIGHTS):
            del awake[MemoryKind.KV_CACHE]
        if not self.choice.sleep_level:
            awake[MemoryKind.FRAGMENTATION] = self.activation_bytes
        return add(self.asleep, awake)

    def peak(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Held on the GPU at the peak inside the action."""
        if action.kind is ActionKind.SLEEP_ENGINE:
            return add(self.asleep, self._awake)
        held = self.resident(action, run_phase)
        if action.kind in (ActionKind.START_ENGINE, ActionKind.GENERATE, ActionKind.EVALUATE):
            held.pop(MemoryKind.FRAGMENTATION, None)
            held = add(held, {MemoryKind.ACTIVATIONS: self.activation_bytes})
            if action.kind is ActionKind.START_ENGINE and self.rollout.shares_base:
                held = self._while_compared(held)
        elif action.kind is ActionKind.SYNC_WEIGHTS and self.placement is Placement.DISAGGREGATED:
            # On shared devices the trainer's bucket is mapped, not copied.
            held = add(held, {MemoryKind.SYNC_STAGING: self.incoming.staging})
        return held

    @property
    def _awake(self) -> Bytes:
        """What comes and goes with sleep. Slots for adapters are made where weights are (vLLM's `load_model`)."""
        slots = {MemoryKind.SYNC_STAGING: self._slot_bytes} if self._slot_bytes else {}
        return {MemoryKind.WEIGHTS: self.weight_bytes, MemoryKind.KV_CACHE: self.kv_cache} | slots

    @cached_property
    def _slot_bytes(self) -> int:
        """Slots for adapters."""
        adapters = self.incoming.adapters
        return adapters.slot_bytes(self.model, self.choice.tp) if adapters else 0

    def _while_compared(self, started: Bytes) -> Bytes:
        """The larger of what has started and weights of its own, which are there until each was found in the base."""
        own = own_weight_bytes(self.model, self.rollout, self.choice)
        compared = {**started, MemoryKind.WEIGHTS: own, MemoryKind.KV_CACHE: 0, MemoryKind.ACTIVATIONS: 0}
        return max(started, compared, key=lambda held: sum(held.values()))

    def on_host(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Held in the host's memory: adapters, and the weights and slots of an engine that sleeps at level 1."""
        adapters = self.incoming.adapters
        held = {MemoryKind.SYNC_STAGING: adapters.copy_bytes(self.model, pinned_bytes)} if adapters else {}
        if self.choice.sleep_level != 1 or action.kind is not ActionKind.SLEEP_ENGINE:
            return held
        slots = {MemoryKind.SYNC_STAGING: self._slot_bytes} if adapters else {}
        return add(held, pinned({MemoryKind.WEIGHTS: self.weight_bytes} | slots))

    @cached_property
    def weight_bytes(self) -> int:
        """Parameters and rotary table of the rank."""
        return held_weight_bytes(self.model, self.rollout, self.choice)

    @cached_property
    def activation_bytes(self) -> int:
        """Prefill or sampler, whichever is larger."""
        choice, num_tokens, e = self.choice, self.rollout.max_num_batched_tokens, self.rollout.dtype.num_bytes
        ep, dp = choice.expert_ranks, choice.attention_dp
        prefill = prefill_peak_bytes(self.model, choice.tp, num_tokens, e, ep=ep, attention_dp=dp)
        return max(prefill, sampler_peak_bytes(self.version, self.model, ceil_div(num_tokens, dp), self._num_rows))

    @cached_property
    def version(self) -> VllmVersion:
        """The engine's release."""
        stated = self.rollout.engine_version
        return LATEST if stated is None else parse_version(stated)

    @cached_property
    def asleep(self) -> Bytes:
        """What stays whatever the engine does: context, communicator, graphs, kernels, buffers of this release."""
        choice, num_tokens, e = self.choice, self.rollout.max_num_batched_tokens, self.rollout.dtype.num_bytes
        groups = (choice.attention_dp, choice.ranks) if choice.attention_dp > 1 else ()
        is_apart = self.placement is Placement.DISAGGREGATED
        held = process_overheads(self.overheads, choice.tp, in_transfer_group=is_apart, axes=groups)
        if self.rollout.shares_process:
            held[MemoryKind.CONTEXT] = 0
        held[MemoryKind.CONTEXT] += NON_TORCH_GROWTH + RUNNER_SEGMENTS + self._compiled_kernels
        buffers = input_buffer_bytes(self.version, self.model, ceil_div(num_tokens, choice.attention_dp), e)
        if self.version.keeps_workspaces_asleep:
            buffers += expert_workspace_bytes(self.model, choice.tp, num_tokens, e, ep=choice.expert_ranks)
        kept = {MemoryKind.ACTIVATIONS: buffers, MemoryKind.CUDA_GRAPHS: self._graph_bytes}
        return held | {kind: size for kind, size in kept.items() if size}

    @property
    def _compiled_kernels(self) -> int:
        """Kernels that Triton compiles: of attention for heads of two widths, and of experts."""
        return COMPILED_KERNELS if self.model.global_attention or self.model.experts else 0

    @cached_property
    def _graph_bytes(self) -> int:
        has_two = self.incoming.adapters is not None and self.version.captures_with_adapters(self.model)
        return cuda_graph_bytes(
            self.version,
            self.model.num_layers,
            self._num_rows,
            enforce_eager=not self.rollout.has_cuda_graphs,
            num_captures=2 if has_two else 1,
        )

    def kv_budget(self, total_bytes: int, share: float) -> int:
        """Bytes of KV cache under a `gpu_memory_utilization` on a GPU of so many bytes, and 0 where nothing is left.

        Counts: vLLM's fraction of the total, without weights, the peak of its profile run, kernels, and graphs where
        this release takes them out of it. Source: vLLM 0.32.0 gpu_worker.py (`determine_available_memory`).
        """
        left = ceil(total_bytes * share) - self.weight_bytes - self.activation_bytes - NON_TORCH_GROWTH
        left -= self._graph_bytes if self.version.reserves_graphs(self.model) else 0
        return max(0, left)

    @property
    def _num_rows(self) -> int:
        """Rows of logits of a rank's batch: a sequence has one for each drafted token beside its own."""
        return self.choice.seqs_per_rank * (1 + self.rollout.speculative_tokens)

    @property
    def pool(self) -> CachePool:
        """How its KV cache is cut into blocks."""
        return engine_pool(self.model, self.rollout, self.choice.tp)


def held_weight_bytes(model: ModelSpec, rollout: SettledRollout, choice: EngineChoice) -> int:
    """Parameters and rotary table of a rank; of a base that the trainer holds, the table and the padding."""
    if not rollout.shares_base:
        return own_weight_bytes(model, rollout, choice)
    e = rollout.dtype.num_bytes
    return rotary_table_bytes(model, e) + shared_base_bytes(model, e) - e * model.num_parameters


def own_weight_bytes(model: ModelSpec, rollout: SettledRollout, choice: EngineChoice) -> int:
    """Parameters and rotary table of a rank with weights of its own."""
    cut = choice.tp, choice.expert_ranks, choice.attention_dp
    return loaded_bytes(model, cut, rollout.dtype.num_bytes, engine_quantization(rollout, choice.quantization))


def engine_pool(model: ModelSpec, rollout: SettledRollout, tp: int) -> CachePool:
    """How the KV cache of a rank is cut into blocks."""
    element_bytes = 1 if rollout.kv_dtype == "fp8" else rollout.dtype.num_bytes
    return _pool(model, tp, element_bytes, rollout.block_size if model.latent_attention is None else None)


@lru_cache(maxsize=256)
def _pool(model: ModelSpec, tp: int, element_bytes: int, block_size: int | None) -> CachePool:
    return cache_pool(model, tp=tp, element_bytes=element_bytes, block_size=block_size)


@lru_cache(maxsize=256)
def loaded_bytes(model: ModelSpec, cut: tuple[int, int, int], element_bytes: int, scheme: Quantization | None) -> int:
    """Bytes of a rank's parameters, quantised or not, and its rotary table. Raises: SpecError.

    cut: tp, ranks over which whole experts are spread (1 where each is cut over tp), groups that attend by themselves.
    """
    tp, ep, attention_dp = cut
    parameters = engine_weight_bytes(model, engine_layout(tp, ep=ep, attention_dp=attention_dp), element_bytes, scheme)
    return parameters + rotary_table_bytes(model, element_bytes)


def engine_class(job: SettledJob, num_training: int) -> type[EngineOnGpu]:
    """What generates: an engine, or the trainer, which gathers weights that lie in parts on its GPUs or on the host."""
    if not job.rollout.generates_in_trainer:
        return EngineOnGpu
    is_cut = num_training > 1 and (job.backend == "fsdp2" or job.training.zero_stage == 3)
    return GatheredGeneration if is_cut or job.training.offloads_parameters is True else GenerationInTrainer


class GenerationInTrainer(EngineOnGpu):
    """Generation of one rank."""

    gathers = False

    def resident(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Held on the GPU when the action has ended."""
        return {}

    def peak(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Held on the GPU at the peak inside the action."""
        if action.kind not in (ActionKind.GENERATE, ActionKind.EVALUATE):
            return {}
        held = {MemoryKind.KV_CACHE: self.kv_cache, MemoryKind.ACTIVATIONS: self.activation_bytes}
        return held | ({MemoryKind.WEIGHTS: self.weight_bytes} if self.gathers else {})

    def on_host(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Nothing."""
        return {}


class GatheredGeneration(GenerationInTrainer):
    """The same of sharded weights, which each rank gathers whole for it (`ds3_gather_for_generation`)."""

    gathers = True
