"""Memory of a rollout engine rank on a CPU host, action by action.

vLLM's CPU backend repacks linear weights for oneDNN, so a start and a weight sync peak while both forms exist.

In: a job and its model. Out: bytes by kind.
Left out: the formulas (serving/generation.py, weight_sync/packets.py).
"""

from dataclasses import replace
from functools import cached_property

from rlplan.dataflow.schedule import Action
from rlplan.memory.ledger import RunPhase
from rlplan.memory.machine.machine import set_slack
from rlplan.memory.model.engine_base import (
    find_engine_quantization,
    find_loaded_form,
    list_packed_tensors,
    repacking_bytes,
)
from rlplan.memory.model.quantization import Quantization
from rlplan.memory.predict import Forecast
from rlplan.memory.serving.generation import (
    build_host_pool,
    compiled_kernel_bytes,
    count_batch_sizes,
    engine_activation_bytes,
    engine_parameter_bytes,
    expert_bytes,
    largest_linear_bytes,
    mapped_checkpoint_bytes,
    packed_weight_bytes,
    sampler_bytes,
    unpacked_remainder_bytes,
)
from rlplan.memory.weight_sync.adapters import find_engine_adapters
from rlplan.memory.weight_sync.packets import sync_staging_bytes
from rlplan.spec.hardware.profile import HardwareProfile
from rlplan.spec.model import ModelSpec, Parameter
from rlplan.spec.models.catalogue import find_model_path
from rlplan.spec.resolved import ResolvedJob
from rlplan.vocabulary import ActionKind, MemoryKind


class EngineForecast(Forecast):
    """One rank of an engine. See `predict.Forecast`."""

    def __init__(self, job: ResolvedJob, model: ModelSpec, profile: HardwareProfile, *, has_arena: bool = True) -> None:
        """has_arena: whether weights arrive through shared memory; otherwise the engine restarts with them."""
        self.job, self.model, self.profile, self.has_arena = job, model, profile, has_arena
        self.element_bytes, self.tp = job.rollout.dtype.num_bytes, job.rollout.tp

    def predict_resident(self, action: Action, run_phase: RunPhase) -> dict[MemoryKind, int]:
        """Bytes after the action. A stopped engine keeps its libraries and compiled kernels."""
        if action.kind is ActionKind.STOP_ENGINE:
            return self._overheads(action, run_phase)
        sizes = {**self._settled, **self._overheads(action, run_phase)}
        if staging := self._sync_bytes(action):
            sizes[MemoryKind.SYNC_STAGING] = staging
        return sizes

    def _sync_bytes(self, action: Action) -> int:
        """The arena, adapter slots and the adapters' copies; right after the start only the slots."""
        slots, copies = self._adapter_bytes
        if action.kind is ActionKind.START_ENGINE or not self.has_arena:
            return slots
        return slots + copies + self._staging_bytes

    def predict_loaded(self, action: Action) -> dict[MemoryKind, int]:
        """Bytes of every parameter as loaded, before the start repacks it."""
        if action.kind is not ActionKind.START_ENGINE:
            return {}
        return {MemoryKind.WEIGHTS: self._loaded_bytes}

    def predict_peak(self, action: Action, run_phase: RunPhase) -> dict[MemoryKind, int]:
        """Bytes at the process's peak inside the action."""
        # The peak of a stop is the moment before it, when the engine is as it was after generating.
        stops = action.kind is ActionKind.STOP_ENGINE
        sizes = self.predict_resident(replace(action, kind=ActionKind.GENERATE) if stops else action, run_phase)
        largest, (widening, narrowing) = self._largest_bytes, self._expert_bytes
        if action.kind is ActionKind.START_ENGINE:
            loading, largest = self._loaded_bytes, max(largest, widening)
            settled = sizes[MemoryKind.WEIGHTS] + sizes[MemoryKind.PACKED_WEIGHTS] + sizes[MemoryKind.KV_CACHE]
            # All parameters as loaded exist together with the file's pages, or later with the first pack. The KV cache
            # is allocated last. With a shared base only the parameter that is being compared exists twice.
            temporary = max(largest, self._mapped_bytes)
            if loading + temporary > settled:
                sizes |= {MemoryKind.WEIGHTS: loading, MemoryKind.PACKED_WEIGHTS: temporary, MemoryKind.KV_CACHE: 0}
        elif action.kind is ActionKind.SYNC_WEIGHTS and not self.job.rollout.shares_base:
            # The reload materialises a weight (for experts those of a layer) and packs it before it frees the old pack.
            fresh = max((largest, largest), (widening + narrowing, widening), key=sum)
            sizes[MemoryKind.WEIGHTS] += fresh[0]
            sizes[MemoryKind.PACKED_WEIGHTS] += fresh[1]
        elif action.kind in (ActionKind.GENERATE, ActionKind.EVALUATE):
            rollout = self.job.rollout
            sizes[MemoryKind.ACTIVATIONS] = engine_activation_bytes(self.model, rollout.max_num_batched_tokens)
            sizes[MemoryKind.LOGITS] = sampler_bytes(
                self.model.vocab_size, rollout.max_num_seqs, rollout.speculative_tokens
            )
        set_slack(sizes, self.profile.process_slack.rollout_engine, self._compiled_bytes(action, run_phase))
        return sizes

    # The following sums run over every tensor of the model and are needed for every action, so they are cached.

    @cached_property
    def _settled(self) -> dict[MemoryKind, int]:
        model, element_bytes, tp, rollout = self.model, self.element_bytes, self.tp, self.job.rollout
        pool = build_host_pool(model, rollout)
        cache = pool.num_blocks(rollout.kv_cache_memory) * pool.bytes_per_block  # whole blocks
        if rollout.shares_base:  # the trainer's row counts the shared memory (model/engine_base.py)
            return {MemoryKind.WEIGHTS: 0, MemoryKind.PACKED_WEIGHTS: 0, MemoryKind.KV_CACHE: cache}
        scheme, in_4_bits = self._scheme, self._in_4_bits
        packing, names = self.profile.weight_packing, frozenset(tensor.name for tensor in in_4_bits)
        quantized = sum(scheme.form.num_bytes(tensor.shape) for tensor in in_4_bits) if scheme is not None else 0
        return {
            MemoryKind.WEIGHTS: unpacked_remainder_bytes(model, element_bytes, tp) + quantized,
            MemoryKind.PACKED_WEIGHTS: packed_weight_bytes(model, element_bytes, packing, tp, names),
            MemoryKind.KV_CACHE: cache,
        }

    @cached_property
    def _loaded_bytes(self) -> int:
        if self.job.rollout.shares_base:
            return 0
        plain = engine_parameter_bytes(self.model, self.element_bytes, self.tp)
        if self._scheme is None:
            return plain
        form = find_loaded_form(self._scheme)
        return plain + sum(
            form.num_bytes(tensor.shape) - tensor.numel * self.element_bytes for tensor in self._in_4_bits
        )

    @cached_property
    def _scheme(self) -> Quantization | None:
        return find_engine_quantization(self.job.rollout, None)

    @property
    def _in_4_bits(self) -> tuple[Parameter, ...]:
        return list_packed_tensors(self.model, self._scheme)

    @cached_property
    def _largest_bytes(self) -> int:
        names = [tensor.name for tensor in self._in_4_bits]
        plain = largest_linear_bytes(self.model, self.element_bytes, self.tp, names)
        return max(plain, repacking_bytes(self.model, self._scheme))

    @cached_property
    def _mapped_bytes(self) -> int:
        """Bytes of the mapped checkpoint file while it is loaded. The trainer's row counts that of a shared base."""
        job = self.job
        if job.rollout.shares_base:
            return 0
        folder = find_model_path(job.rollout.base_path or job.policy.path)
        is_drawn = job.rollout.base_path is None and job.policy.init == "random"
        return mapped_checkpoint_bytes(folder, self.model, is_drawn=is_drawn)

    @cached_property
    def _expert_bytes(self) -> tuple[int, int]:
        return expert_bytes(self.model, self.element_bytes, self.tp)

    @cached_property
    def _staging_bytes(self) -> int:
        return sync_staging_bytes(self.job, self.model)

    @cached_property
    def _adapter_bytes(self) -> tuple[int, int]:
        adapters = find_engine_adapters(self.job)
        return (adapters.slot_bytes(self.model, self.tp), adapters.copy_bytes(self.model)) if adapters else (0, 0)

    @cached_property
    def _kernel_bytes(self) -> int:
        packing = self.profile.weight_packing
        return compiled_kernel_bytes(self.model, packing, count_batch_sizes(self.job), self.tp)

    def _overheads(self, action: Action, run_phase: RunPhase) -> dict[MemoryKind, int]:
        return {
            MemoryKind.PROCESS: self.profile.process_overheads.rollout_engine.value,
            MemoryKind.FRAGMENTATION: self.profile.process_slack.rollout_engine.value
            + self._compiled_bytes(action, run_phase),
        }

    def _compiled_bytes(self, action: Action, run_phase: RunPhase) -> int:
        """Bytes of compiled kernels. They stay in the process from the first generation on, even after a stop.

        Speculative decoding adds Numba, which is loaded when the engine starts.
        """
        speculative_decoding = self.profile.process_slack.speculative_decoding
        numba = speculative_decoding.value if speculative_decoding and self.job.rollout.speculative_tokens else 0
        if action.kind is ActionKind.START_ENGINE and run_phase == "start":
            return numba
        return numba + self._kernel_bytes
