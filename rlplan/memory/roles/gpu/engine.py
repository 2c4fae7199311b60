"""What one rank of the rollout engine holds on its GPU and on its host, action by action, awake and asleep.

In: a model, the engine's settings, bytes of its KV cache. Out: bytes by kind. The formulas are in serving_*.py.
Left out: pipelines, draft models, images, and the k slots of a sequence that are drafted into and not taken.

Asleep (vLLM's sleep mode) the KV cache is gone and the weights are on the host (level 1) or dropped (level 2); context,
communicator, CUDA graphs and what the driver keeps for kernels stay. An engine that never sleeps keeps what its
allocator has cached of its largest batch too: vLLM empties that cache in `sleep` only (device_allocator/cumem.py).
"""

from functools import cached_property, lru_cache

from rlplan.dataflow.choice import EngineChoice
from rlplan.dataflow.schedule import Action
from rlplan.memory.ledger import RunPhase
from rlplan.memory.model.quantized_checkpoints import quantization_by_word
from rlplan.memory.predict import Forecast
from rlplan.memory.roles.gpu.process import Bytes, add, pinned, process_overheads
from rlplan.memory.serving.kv import CachePool, cache_pool
from rlplan.memory.serving.peaks import NON_TORCH_GROWTH, cuda_graph_bytes, prefill_peak_bytes, sampler_peak_bytes
from rlplan.memory.serving.shared_base import shared_base_bytes
from rlplan.memory.serving.tensors import rotary_table_bytes
from rlplan.memory.serving.versions import LATEST
from rlplan.memory.serving.weights import engine_layout, engine_weight_bytes
from rlplan.spec.hardware.profile import GpuOverheads
from rlplan.spec.model import ModelSpec
from rlplan.spec.resolved import SettledRollout
from rlplan.units import ceil_div
from rlplan.vocabulary import ActionKind, MemoryKind, Placement


class EngineOnGpu(Forecast):
    """One rank of one engine. See `predict.Forecast`.

    staging: bytes of the bucket through which weights arrive. kv_cache: bytes a GPU.
    """

    def __init__(
        self,
        model: ModelSpec,
        rollout: SettledRollout,
        choice: EngineChoice,
        placement: Placement,
        overheads: GpuOverheads,
        staging: int,
        kv_cache: int = 0,
    ) -> None:
        self.model, self.rollout, self.choice, self.placement = model, rollout, choice, placement
        self.overheads, self.staging, self.kv_cache = overheads, staging, kv_cache

    def resident(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Held on the GPU when the action has ended."""
        awake = {MemoryKind.WEIGHTS: self.weight_bytes, MemoryKind.KV_CACHE: self.kv_cache}
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
            return add(self.asleep, {MemoryKind.WEIGHTS: self.weight_bytes, MemoryKind.KV_CACHE: self.kv_cache})
        held = self.resident(action, run_phase)
        if action.kind in (ActionKind.START_ENGINE, ActionKind.GENERATE, ActionKind.EVALUATE):
            held.pop(MemoryKind.FRAGMENTATION, None)
            held = add(held, {MemoryKind.ACTIVATIONS: self.activation_bytes})
            if action.kind is ActionKind.START_ENGINE and self.rollout.shares_base:
                held = self._while_compared(held)
        elif action.kind is ActionKind.SYNC_WEIGHTS and self.placement is Placement.DISAGGREGATED:
            held[MemoryKind.SYNC_STAGING] = self.staging  # on shared devices the trainer's bucket is mapped, not copied
        return held

    def _while_compared(self, started: Bytes) -> Bytes:
        """The larger of what has started and weights of its own, which are there until each was found in the base."""
        compared = {**started, MemoryKind.WEIGHTS: self._own_bytes, MemoryKind.KV_CACHE: 0, MemoryKind.ACTIVATIONS: 0}
        return max(started, compared, key=lambda held: sum(held.values()))

    def on_host(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Held in the host's memory: the weights of an engine that sleeps at level 1."""
        sleeps = self.choice.sleep_level == 1 and action.kind is ActionKind.SLEEP_ENGINE
        return pinned({MemoryKind.WEIGHTS: self.weight_bytes}) if sleeps else {}

    @cached_property
    def weight_bytes(self) -> int:
        """Parameters and rotary table of the rank; of a base that the trainer holds, the table and the padding."""
        e = self.rollout.dtype.num_bytes
        if not self.rollout.shares_base:
            return self._own_bytes
        return rotary_table_bytes(self.model, e) + shared_base_bytes(self.model, e) - e * self.model.num_parameters

    @property
    def _own_bytes(self) -> int:
        choice, e = self.choice, self.rollout.dtype.num_bytes
        cut = choice.tp, choice.expert_ranks, choice.attention_dp
        return loaded_bytes(self.model, cut, e, choice.quantization or "")

    @cached_property
    def activation_bytes(self) -> int:
        """Prefill or sampler, whichever is larger."""
        choice, num_tokens, e = self.choice, self.rollout.max_num_batched_tokens, self.rollout.dtype.num_bytes
        ep, dp = choice.expert_ranks, choice.attention_dp
        prefill = prefill_peak_bytes(self.model, choice.tp, num_tokens, e, ep=ep, attention_dp=dp)
        return max(prefill, sampler_peak_bytes(LATEST, self.model, ceil_div(num_tokens, dp), self._num_rows))

    @cached_property
    def asleep(self) -> Bytes:
        """What stays whatever the engine does: context, communicator, graphs, kernels."""
        graphs = cuda_graph_bytes(LATEST, self._num_rows, enforce_eager=not self.rollout.has_cuda_graphs)
        choice = self.choice
        groups = (choice.attention_dp, choice.ranks) if choice.attention_dp > 1 else ()
        is_apart = self.placement is Placement.DISAGGREGATED
        held = process_overheads(self.overheads, choice.tp, in_transfer_group=is_apart, axes=groups)
        held[MemoryKind.CONTEXT] += NON_TORCH_GROWTH
        return held | ({MemoryKind.CUDA_GRAPHS: graphs} if graphs else {})

    @property
    def _num_rows(self) -> int:
        """Rows of logits of a rank's batch: a sequence has one for each drafted token beside its own."""
        return self.choice.seqs_per_rank * (1 + self.rollout.speculative_tokens)

    @cached_property
    def pool(self) -> CachePool:
        """How its KV cache is cut into blocks."""
        rollout = self.rollout
        element_bytes = 1 if rollout.kv_dtype == "fp8" else rollout.dtype.num_bytes
        size = rollout.block_size if self.model.latent_attention is None else None
        return _pool(self.model, self.choice.tp, element_bytes, size)


@lru_cache(maxsize=256)
def _pool(model: ModelSpec, tp: int, element_bytes: int, block_size: int | None) -> CachePool:
    return cache_pool(model, tp=tp, element_bytes=element_bytes, block_size=block_size)


@lru_cache(maxsize=256)
def loaded_bytes(model: ModelSpec, cut: tuple[int, int, int], element_bytes: int, quantization: str) -> int:
    """Bytes of a rank's parameters, quantised by a format's name or not, and its rotary table. Raises: SpecError.

    cut: tp, ranks over which whole experts are spread (1 where each is cut over tp), groups that attend by themselves.
    """
    scheme = quantization_by_word(quantization, where="rollout.quantization")
    tp, ep, attention_dp = cut
    parameters = engine_weight_bytes(model, engine_layout(tp, ep=ep, attention_dp=attention_dp), element_bytes, scheme)
    return parameters + rotary_table_bytes(model, element_bytes)
