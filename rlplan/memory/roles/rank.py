"""What one rank of a trained role holds on its GPU and on its host, action by action: of a pipeline, one stage of it.

In: a trained role (`TrainedRole`), a pipeline stage, its fixed parts. Out: bytes by kind. The formulas are in zero.py,
sharding.py, step_peak.py. Left out: which stage is the fullest (trainer.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from rlplan.dataflow.choice import TrainerChoice
from rlplan.dataflow.schedule import Action
from rlplan.frameworks.profile import ScoredWords
from rlplan.memory.ledger import RunPhase
from rlplan.memory.machine.host import pinned_bytes
from rlplan.memory.machine.machine import reserved_bytes
from rlplan.memory.model.block_families import cut_layers
from rlplan.memory.model.frozen import Frozen
from rlplan.memory.model.layer_cut import LayerCut, layer_cut
from rlplan.memory.model.logits import ROWS_ON_GPU, RowsAtOnce
from rlplan.memory.predict import Forecast
from rlplan.memory.roles.process import Bytes, add, pinned, process_overheads, sync_staging
from rlplan.memory.roles.states import FixedStates
from rlplan.memory.trainers.micro_batch import (
    Place,
    gather_buffer_bytes,
    kept_layer_bytes,
    layer_bytes,
    score_peak_bytes,
)
from rlplan.memory.trainers.nvme import left_on_host
from rlplan.memory.trainers.shape import MicroBatchShape, Recompute, recompute_named
from rlplan.memory.trainers.step_peak import RankState, passes_peak, snapshots, update_peak
from rlplan.memory.trainers.zero import States
from rlplan.memory.weight_sync.resharding import gathered_parts
from rlplan.spec.hardware.profile import GpuOverheads
from rlplan.spec.model import ModelSpec
from rlplan.spec.models.shards import trained_stages
from rlplan.spec.parts.training import LoraSpec
from rlplan.spec.resolved import SettledTraining
from rlplan.units import ceil_div
from rlplan.vocabulary import ActionKind, Backend, Loss, MemoryKind, Role

_STATES = (MemoryKind.MASTER_WEIGHTS, MemoryKind.OPTIMIZER)
_WITHOUT_STATES = (
    *(ActionKind.RELOAD_ROLE, ActionKind.SCORE, ActionKind.OPTIMIZER_STEP, ActionKind.SYNC_WEIGHTS),
    *(ActionKind.OFFLOAD_ROLE, ActionKind.SAVE_WEIGHTS, ActionKind.CHECKPOINT),
    *(ActionKind.SAVE_STATES, ActionKind.WRITE_STATES),
)
"""Actions after which the weights alone are there, where states are put away."""
UPCASTING = (Loss.PLAIN, Loss.SHIFTED, Loss.PARALLEL, Loss.MEGATRON)
"""Losses that make fp32 logits beside those of the model."""
CAPPED = ("Gemma2ForCausalLM",)
"""Families whose logits pass a tanh, which saves them once more (transformers 5.19, `final_logit_softcapping`)."""


@dataclass(frozen=True)
class MicroBatchTokens:
    """One micro-batch of a rank. num_tokens: prompt and response; num_head_tokens: those whose logits are taken.

    accumulates: gradients of an earlier micro-batch are there already. num_micro_batches: of a mini-batch; None where
    that is not known, and a pipeline is taken to be full.
    """

    num_tokens: int
    num_head_tokens: int
    accumulates: bool
    num_micro_batches: int | None = None


@dataclass(frozen=True)
class ScoringPass:
    """A pass without gradient that takes log-probs or values of finished rollouts."""

    role: Role
    micro_batch: MicroBatchTokens
    scored_words: ScoredWords | None
    """What it holds of the vocabulary; None where it holds what the loss does without gradient."""


@dataclass(frozen=True)
class TrainedRole:
    """A trained role, as all its ranks have it in common. in_transfer_group: it hands weights to other devices."""

    role: Role
    model: ModelSpec
    training: SettledTraining
    choice: TrainerChoice
    micro_batch: MicroBatchTokens
    num_ranks: int
    overheads: GpuOverheads
    sync_bucket: int
    in_transfer_group: bool = False
    backend: Backend = "deepspeed"
    puts_states_away: bool = False
    """Outside of training only its weights are there: gradients are dropped, states lie on the host. Source: verl's
    `offload_megatron_optimizer` and `load_grad=False` after update_actor; NeMo-RL's `offload_before_refit`; slime's
    sleep."""
    frozen_adapters: tuple[LoraSpec, ...] = ()
    """Of roles that compute with them on the policy's base."""
    scoring: tuple["ScoringPass", ...] = ()
    """The scoring passes that its ranks make, by role."""
    scored_words: ScoredWords | None = None
    """What a pass without gradient holds of the vocabulary; None where it holds what the loss does."""

    @property
    def lora(self) -> LoraSpec | None:
        """Adapters, which only the policy has."""
        return self.training.lora if self.role is Role.POLICY else None

    @cached_property
    def process_overheads(self) -> Bytes:
        """Context and communicators."""
        choice = self.choice
        axes = (choice.tp, choice.pp, choice.cp, choice.ep)
        return process_overheads(self.overheads, self.num_ranks, in_transfer_group=self.in_transfer_group, axes=axes)

    @property
    def layer_cut(self) -> LayerCut:
        """How tensor parallel ranks share each of its layers. DeepSpeed's AutoTP shares no rows."""
        choice = self.choice
        return layer_cut(
            choice.tp,
            choice.expert_tp,
            is_megatron=self.backend == "megatron",
            has_sequence_parallel=self.training.shares_rows(self.backend),
        )

    @property
    def has_fused_kernels(self) -> bool:
        """Whether norms, rotary positions and activations are one kernel each."""
        return self.backend == "megatron" or self.training.kernels.is_compiled

    @property
    def recompute(self) -> tuple[Recompute, frozenset[str]]:
        """What the backward pass computes anew: a policy, and modules that are recomputed alone."""
        if not self.choice.gradient_checkpointing:
            return Recompute.NONE, frozenset()
        return recompute_named(self.training.recomputed)

    @property
    def is_cut(self) -> bool:
        """Whether a rank lacks a part of the weights, which is gathered before it is handed over."""
        choice = self.choice
        return self.num_ranks > 1 and (choice.zero_stage == 3 or choice.tp * choice.pp * choice.ep > 1)


@dataclass(frozen=True)
class PipelineStage:
    """A pipeline stage; of a model that is not cut, all of it. in_flight: micro-batches whose activations it holds."""

    index: int
    layers: range
    has_head: bool
    in_flight: int


def stages_of(
    model: ModelSpec,
    pp: int,
    num_micro_batches: int | None,
    role: Role = Role.POLICY,
    *,
    virtual_stages: int = 1,
) -> tuple[PipelineStage, ...]:
    """The stages of which one is the fullest: the first, the first of those with the most layers, that with the most
    layers of experts, the last.

    Counts: with one forward, one backward pass (1F1B) stage i holds min(m, p - i) micro-batches; interleaved over v
    parts of a stage 2 (p - i - 1) + (v - 1) p + 1 parts, rounded up to whole micro-batches.
    Source: Narayanan et al. 2021 (Megatron-LM), section 2.2; Megatron-Core 0.14 pipeline_parallel/schedules.py
    (`get_pp_rank_microbatches`).

    >>> from rlplan.spec.models.catalogue import find_model
    >>> v3 = find_model("deepseek-ai/DeepSeek-V3")
    >>> [(stage.index, len(stage.layers), stage.in_flight) for stage in stages_of(v3, 16, 8)]
    [(0, 4, 8), (1, 4, 8), (15, 1, 1)]
    """
    layers = trained_stages(model, pp, has_head=role not in (Role.VALUE, Role.REWARD))
    sparse = frozenset(model.experts.layers) if model.experts else frozenset()
    largest = max(range(pp), key=lambda stage: len(layers[stage]))
    fullest = max(range(pp), key=lambda stage: (len(sparse & frozenset(layers[stage])), len(layers[stage])))
    most = pp if num_micro_batches is None else num_micro_batches
    return tuple(
        PipelineStage(index, layers[index], index == pp - 1, min(most, _in_flight(pp, index, virtual_stages)))
        for index in sorted({0, largest, fullest, pp - 1})
    )


def _in_flight(pp: int, index: int, virtual_stages: int) -> int:
    """Micro-batches whose activations a stage holds in the middle of a full pipeline."""
    if virtual_stages == 1 or pp == 1:
        return pp - index
    return ceil_div(2 * (pp - index - 1) + (virtual_stages - 1) * pp + 1, virtual_stages)


def shape_of(trained: TrainedRole, stage: PipelineStage, fixed: FixedStates) -> MicroBatchShape:
    """What a rank of a stage computes in one micro-batch.

    Counts: its layers as `TrainedRole.layer_cut` has them. DeepSpeed's AutoTP gathers the logits; FSDP2 and Megatron
    share the vocabulary. Megatron's kernels are fused. Only the last stage has a head.
    Assumes: routing that is balanced: as many rows for a rank's experts as it has tokens times top_k.
    """
    training, choice, micro_batch, model = trained.training, trained.choice, trained.micro_batch, trained.model
    is_value = trained.role in (Role.VALUE, Role.REWARD) or model.head_width == 1
    layers = stage.layers if choice.pp > 1 else None
    cut = trained.layer_cut
    is_megatron = trained.backend == "megatron"
    first, *more = cut_layers(model, layers, cut, is_fused=trained.has_fused_kernels, has_own_modules=is_megatron)
    recompute, modules = trained.recompute
    rows = training.kernels.logit_rows
    exported = trained.backend != "deepspeed"
    vocabulary = ceil_div(model.vocab_size, choice.tp) if exported else model.vocab_size
    return MicroBatchShape(
        first.block,
        first.num,
        1 if is_value else vocabulary,
        micro_batch.num_tokens,
        micro_batch.num_head_tokens if stage.has_head else 0,
        element_bytes=training.dtype.num_bytes,
        recompute=recompute,
        modules=modules,
        loss=Loss.NONE if is_value or not stage.has_head else loss_of(trained),
        offloads_activations=training.offloads_activations,
        frozen=_frozen_of(trained.lora, fixed, training) if trained.lora else None,
        is_compiled=training.kernels.is_compiled,
        rows_at_once=RowsAtOnce(rows, rows) if rows else ROWS_ON_GPU,
        residual_bytes=trained.lora.unquantized_bytes(0) if trained.lora else 0,
        more=tuple(more),
        sequence_shards=cut.sequence_shards,
        gathers_again=cut.gathers_again,
        ulysses=choice.ulysses,
        passes_keys_on=choice.cp > 1,
        micro_batches_in_flight=stage.in_flight,
        softcaps_logits=model.architecture in CAPPED,
        selects_rows=trained.backend == "deepspeed",
        dequantised=fixed.dequantised,
        scored_words=trained.scored_words,
    )


def _frozen_of(lora: LoraSpec, fixed: FixedStates, training: SettledTraining) -> Frozen:
    """What adapters keep beside a layer's frozen weights: in fp32, or behind dropout, each a copy of its input.

    A compiler makes one kernel of an adapter's output, its scaled copy and the sum.
    """
    element_bytes = training.dtype.num_bytes
    return replace(
        fixed.frozen(element_bytes),
        adapter_bytes=4 if lora.dtype == "float32" else element_bytes,
        has_dropout=lora.dropout > 0,
        scales_outputs=not training.kernels.is_compiled,
    )


def loss_of(trained: TrainedRole) -> Loss:
    """How the loss is taken: as the job says; of a vocabulary that FSDP2 has cut as torch takes it.

    Source: torch 2.13 distributed/tensor/parallel/loss.py.
    """
    stated = trained.training.loss
    is_torchs = trained.backend == "fsdp2" and trained.choice.tp > 1 and stated is not Loss.FUSED
    return Loss.PARALLEL if is_torchs else stated


class RankOnGpu(Forecast):
    """One rank. See `predict.Forecast`; `on_host` says what lies in the host's memory at the same time."""

    def __init__(self, trained: TrainedRole, stage: PipelineStage, fixed: FixedStates) -> None:
        self.trained, self.stage, self.fixed = trained, stage, fixed

    def resident(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Held on the GPU when the action has ended."""
        held = {} if action.kind is ActionKind.OFFLOAD_ROLE else self._states(action, run_phase).device
        return self._with_overheads(held, run_phase)

    def peak(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Held on the GPU at the peak inside the action."""
        if action.kind is ActionKind.TRAIN_FORWARD_BACKWARD:
            return self._with_overheads(self._largest_snapshot(run_phase), run_phase)
        if action.kind is ActionKind.OPTIMIZER_STEP:
            return self._with_overheads(update_peak(self.rank_state, self.shape), run_phase)
        if action.kind is ActionKind.START_TRAINER:
            return self.resident(action, run_phase)
        held = self._with_overheads(self._waiting.device, run_phase)
        if action.kind is ActionKind.SCORE:
            held[MemoryKind.LOGITS] = score_peak_bytes(self._scoring_shape(action.role))
            held[MemoryKind.COMM_BUFFERS] = held.get(MemoryKind.COMM_BUFFERS, 0) + self.fixed.gathered
        elif action.kind is ActionKind.SYNC_WEIGHTS:
            held = add(held, {MemoryKind.SYNC_STAGING: self.staging, MemoryKind.COMM_BUFFERS: self.gathered_for_sync})
        return held

    def on_host(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Held in the host's memory for this rank: what is offloaded, and everything while the role is offloaded.

        Counts: `FixedStates.offloaded`; while it starts the loaded weights, whole or (cut) a layer at a time; weights
        that are being written. Assumes: `pin_memory` is on.
        """
        training, held = self.trained.training, self.fixed.offloaded
        if held and training.offload_device == "nvme":
            held = left_on_host(held, pinned_bytes(self.fixed.swap_buffers))
        if action.kind is ActionKind.START_TRAINER:
            held = add(held, {MemoryKind.SYNC_STAGING: self.fixed.loading})
        elif action.kind is ActionKind.TRAIN_FORWARD_BACKWARD and self._offloads_activations:
            held = add(held, {MemoryKind.ACTIVATIONS: pinned_bytes(_offloaded_activations(self.shape))})
        elif action.kind is ActionKind.OFFLOAD_ROLE:
            held = add(held, pinned(self.moved))
        elif self.trained.puts_states_away and action.kind in _WITHOUT_STATES:
            held = add(held, pinned({kind: size for kind, size in self.moved.items() if kind in _STATES}))
        elif action.kind is ActionKind.CHECKPOINT:
            held = add(held, {MemoryKind.SYNC_STAGING: self.fixed.share_bytes})
        return held

    @property
    def _offloads_activations(self) -> bool:
        """Whether what gradient checkpointing keeps lies on the host; a choice that stands for all keeps none."""
        return self.trained.training.offloads_activations and self.trained.choice.gradient_checkpointing

    @cached_property
    def shape(self) -> MicroBatchShape:
        """What the rank computes in one micro-batch."""
        return shape_of(self.trained, self.stage, self.fixed)

    def _scoring_shape(self, role: Role) -> MicroBatchShape:
        """What the rank computes in one scoring pass of a role."""
        for asked in self.trained.scoring:
            if asked.role is role:
                scoring = replace(self.trained, micro_batch=asked.micro_batch, scored_words=asked.scored_words)
                return shape_of(scoring, self.stage, self.fixed)
        return self.shape

    @cached_property
    def rank_state(self) -> RankState:
        """What the rank holds whatever the tokens."""
        return replace(self.fixed.rank_state, accumulates=self.trained.micro_batch.accumulates)

    @cached_property
    def snapshots(self) -> dict[Place, Bytes]:
        """Memory snapshots of a step. See `step_peak.snapshots`."""
        return snapshots(self.rank_state, self.shape)

    @property
    def staging(self) -> int:
        """Bytes of the bucket through which weights pass to the engine."""
        trained = self.trained
        return sync_staging(trained.model, trained.training.dtype.num_bytes, trained.sync_bucket, trained.backend)

    @property
    def gathered_for_sync(self) -> int:
        """Bytes of other ranks' parts of what is in the bucket. FSDP2 gathers master weights, and casts them then."""
        trained, training = self.trained, self.trained.training
        if not trained.is_cut or trained.backend == "deepspeed" or not trained.sync_bucket:
            return self.staging if trained.is_cut else 0
        kept = training.stored_dtype(trained.backend).num_bytes
        return gathered_parts(trained.model, trained.backend, kept, trained.choice.ep)

    @property
    def moved(self) -> Bytes:
        """What goes to the host and comes back with the role. Gradients that are dropped are not copied."""
        dropped = MemoryKind.GRADIENTS if self.trained.puts_states_away else None
        return {kind: size for kind, size in self.fixed.after_step.device.items() if kind is not dropped}

    def _largest_snapshot(self, run_phase: RunPhase) -> Bytes:
        late = MemoryKind.OPTIMIZER if run_phase == "first" else None
        return {kind: size for kind, size in self._reserved_peak.items() if kind is not late}

    @cached_property
    def _reserved_peak(self) -> Bytes:
        """The largest snapshot of the passes with what torch has reserved beyond it."""
        return passes_peak({place: self._with_gaps(place, held) for place, held in self.snapshots.items()})

    @cached_property
    def _pools(self) -> dict[Place, int]:
        """Bytes that pools of other streams keep beyond what is in use: FSDP2's gathers and reductions."""
        state = self.fixed.reserved_state
        if state is None:
            return {}
        kept = snapshots(replace(state, accumulates=True), self.shape)
        return {place: max(0, sum(kept[place].values()) - sum(held.values())) for place, held in self.snapshots.items()}

    def _with_gaps(self, place: Place, held: Mapping[MemoryKind, int]) -> Bytes:
        """A snapshot with what torch's segments have beyond its tensors.

        Counts: at the loss one layer and the logits that are upcast (`reserved_bytes`); elsewhere half of the widest
        tensor of a layer, for what a request finds free in the segments lies between nothing and all of it; pools of
        other streams.
        """
        total = sum(held.values()) + self._pools.get(place, 0)
        gaps = self._widest_tensor // 2
        if place is Place.LOSS:
            gaps = reserved_bytes(total, max(map(layer_bytes, self.shape.kinds)), self._uncast_logits) - total
        return add(held, {MemoryKind.FRAGMENTATION: gaps + self._pools.get(place, 0)})

    @property
    def _uncast_logits(self) -> int:
        """Bytes of the logits in the model's type that the loss upcasts and lets go."""
        shape = self.shape
        return shape.element_bytes * shape.num_head_tokens * shape.vocab_size if shape.loss in UPCASTING else 0

    @cached_property
    def _widest_tensor(self) -> int:
        """Bytes of the widest tensor of a layer: the MLP's, experts' rows, or an adapter's copy of its input."""
        shape, block = self.shape, self.shape.block
        element_bytes = shape.element_bytes
        if block.experts is not None:
            width = block.experts.top_k * max(2 * block.experts.width, block.hidden)
        else:
            width = block.intermediate
            if shape.frozen is not None and shape.frozen.adapts_down:
                element_bytes = max(element_bytes, shape.frozen.adapter_bytes)
        return element_bytes * shape.num_tokens * width

    def _states(self, action: Action, run_phase: RunPhase) -> States:
        if self.trained.puts_states_away and action.kind in _WITHOUT_STATES:
            return self._waiting
        if run_phase == "start" or (run_phase == "first" and action.kind is ActionKind.RELOAD_ROLE):
            return self.fixed.after_build
        if action.kind is ActionKind.TRAIN_FORWARD_BACKWARD:
            return self.fixed.after_backward
        return self.fixed.after_step

    @cached_property
    def _waiting(self) -> States:
        """Held outside of training: everything, or the weights alone."""
        if not self.trained.puts_states_away:
            return self.fixed.after_step
        return States({kind: size for kind, size in self.moved.items() if kind not in _STATES})

    def _with_overheads(self, held: Mapping[MemoryKind, int], run_phase: RunPhase) -> Bytes:
        kept = gather_buffer_bytes(self.shape) if run_phase != "start" else 0
        return add(add(held, self.trained.process_overheads), {MemoryKind.COMM_BUFFERS: kept} if kept else {})


def _offloaded_activations(shape: MicroBatchShape) -> int:
    """What recomputation (or nothing) keeps of the layers, which lies on the host instead."""
    kept = replace(shape, offloads_activations=False)
    return sum(kind.num_layers * kept_layer_bytes(kind) for kind in kept.kinds) * shape.micro_batches_in_flight
