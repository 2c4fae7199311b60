"""Memory of one rank of a trained role on its GPU and its host, action by action, for one pipeline stage.

In: a trained role (`TrainedRole`), a pipeline stage, its fixed states. Out: bytes by kind.
Left out: the formulas (trainers/zero.py, sharding.py, step_peak.py), the choice of the fullest stage (trainer.py).
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
from rlplan.memory.model.block_families import LayerCut, choose_layer_cut, cut_layers
from rlplan.memory.model.frozen import Frozen
from rlplan.memory.model.logits import ROWS_ON_GPU, RowsAtOnce
from rlplan.memory.predict import Forecast
from rlplan.memory.roles.exported import (
    build_fsdp_settings,
    build_fsdp_states,
    build_megatron_settings,
    build_megatron_states,
)
from rlplan.memory.roles.process import Bytes, add, pin_sizes, process_overheads, sync_staging
from rlplan.memory.roles.states import FixedStates, build_fixed_states, build_zero_settings
from rlplan.memory.trainers.micro_batch import (
    Place,
    gather_buffer_bytes,
    kept_layer_bytes,
    layer_bytes,
    score_peak_bytes,
)
from rlplan.memory.trainers.optimizers import keep_on_host
from rlplan.memory.trainers.shape import MicroBatchShape, Recompute, parse_recompute
from rlplan.memory.trainers.step_peak import RankState, find_passes_peak, find_update_peak, take_snapshots
from rlplan.memory.trainers.zero import States
from rlplan.memory.weight_sync.packets import gathered_part_bytes
from rlplan.spec.hardware.profile import GpuOverheads
from rlplan.spec.model import ModelSpec
from rlplan.spec.models.shards import split_training_stages
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
"""Actions after which only the weights are on the GPU, where the trainer offloads states outside of training."""
UPCASTING = (Loss.PLAIN, Loss.SHIFTED, Loss.PARALLEL, Loss.MEGATRON)
"""Losses that allocate fp32 logits beside those of the model."""
CAPPED = ("Gemma2ForCausalLM",)
"""Families with soft-capped logits, whose tanh saves them once more (transformers 5.19, `final_logit_softcapping`)."""


@dataclass(frozen=True)
class MicroBatchTokens:
    """Tokens of one micro-batch of a rank."""

    num_tokens: int
    """Prompt and response tokens."""
    num_head_tokens: int
    """Tokens whose logits are computed."""
    accumulates: bool
    """Whether gradients of an earlier micro-batch exist already."""
    num_micro_batches: int | None = None
    """Micro-batches of a mini-batch. None where unknown; a pipeline then counts as full."""
    num_pairs: int = 0
    """Squared lengths of its sequences, in total, where they need no mask for padding; otherwise 0."""


@dataclass(frozen=True)
class ScoringPass:
    """A forward-only pass that computes log-probs or values of finished rollouts."""

    role: Role
    micro_batch: MicroBatchTokens
    scored_words: ScoredWords | None
    """Vocabulary-wide tensors that the pass holds; None: those of the loss without gradient."""


@dataclass(frozen=True)
class TrainedRole:
    """A trained role: everything that its ranks have in common."""

    role: Role
    model: ModelSpec
    training: SettledTraining
    choice: TrainerChoice
    micro_batch: MicroBatchTokens
    num_ranks: int
    overheads: GpuOverheads
    sync_bucket: int
    in_transfer_group: bool = False
    """Whether the role sends weights to other devices."""
    backend: Backend = "deepspeed"
    offloads_states: bool = False
    """Whether only weights are on the GPU outside of training: gradients are dropped, states are on the host. Source:
    verl's `offload_megatron_optimizer` and `load_grad=False` after update_actor; NeMo-RL's `offload_before_refit`;
    slime's sleep."""
    never_offloaded: tuple[MemoryKind, ...] = ()
    """Kinds of memory that stay on the GPU while the role is offloaded."""
    frozen_adapters: tuple[LoraSpec, ...] = ()
    """Adapters of other roles that compute on the policy's base."""
    scoring: tuple["ScoringPass", ...] = ()
    """The scoring passes of the ranks, by role."""
    scored_words: ScoredWords | None = None
    """Vocabulary-wide tensors that a forward-only pass holds; None: those of the loss without gradient."""

    @property
    def lora(self) -> LoraSpec | None:
        """The adapters that are trained; only the policy has any."""
        return self.training.lora if self.role is Role.POLICY else None

    @cached_property
    def process_overheads(self) -> Bytes:
        """Bytes of CUDA context and communicators."""
        choice = self.choice
        axes = (choice.tp, choice.pp, choice.cp, choice.ep)
        return process_overheads(self.overheads, self.num_ranks, in_transfer_group=self.in_transfer_group, axes=axes)

    @property
    def layer_cut(self) -> LayerCut:
        """The cut of each layer over tensor parallel ranks. DeepSpeed's AutoTP has no sequence parallelism."""
        choice = self.choice
        return choose_layer_cut(
            choice.tp,
            choice.expert_tp,
            is_megatron=self.backend == "megatron",
            has_sequence_parallel=self.training.shares_rows(self.backend),
        )

    @property
    def has_fused_kernels(self) -> bool:
        """Whether norms, rotary embeddings and activation functions run as one fused kernel each."""
        return self.backend == "megatron" or self.training.kernels.is_compiled

    @property
    def recompute(self) -> tuple[Recompute, frozenset[str]]:
        """The recomputation policy, and the modules that are recomputed individually."""
        if not self.choice.gradient_checkpointing:
            return Recompute.NONE, frozenset()
        return parse_recompute(self.training.recomputed)

    @property
    def is_cut(self) -> bool:
        """Whether a rank holds only a part of the weights, so that a weight sync gathers them first."""
        choice = self.choice
        return self.num_ranks > 1 and (choice.zero_stage == 3 or choice.tp * choice.pp * choice.ep > 1)

    @property
    def loss(self) -> Loss:
        """The implementation of the loss: the job's, or torch's own where FSDP2 cuts the vocabulary.

        Source: torch 2.13 distributed/tensor/parallel/loss.py.
        """
        stated = self.training.loss
        is_torchs = self.backend == "fsdp2" and self.choice.tp > 1 and stated is not Loss.FUSED
        return Loss.PARALLEL if is_torchs else stated

    def find_fixed_states(self, stage: "PipelineStage") -> FixedStates:
        """The memory of a rank of a stage that does not depend on the tokens. Raises: SpecError."""
        model, role, lora, training, choice = self.model, self.role, self.lora, self.training, self.choice
        if self.backend == "megatron":
            return build_megatron_states(
                model, role, lora, build_megatron_settings(training, choice, self.num_ranks), stage.index
            )
        if self.backend == "fsdp2":
            return build_fsdp_states(model, role, lora, build_fsdp_settings(training, choice, self.num_ranks))
        settings = build_zero_settings(training, choice, self.num_ranks)
        return build_fixed_states(model, role, lora, settings, choice.tp, self.frozen_adapters)

    def build_shape(self, stage: "PipelineStage", fixed: FixedStates) -> MicroBatchShape:
        """The shape of one micro-batch on a rank of a stage.

        Counts: its layers as cut by `layer_cut`. DeepSpeed's AutoTP gathers the logits; FSDP2 and Megatron cut the
        vocabulary. Megatron's kernels are fused. Only the last stage has a head.
        Assumes: balanced routing: a rank's experts get as many rows as it has tokens times top_k.
        """
        training, choice, micro_batch, model = self.training, self.choice, self.micro_batch, self.model
        is_value = self.role in (Role.VALUE, Role.REWARD) or model.head_width == 1
        layers = stage.layers if choice.pp > 1 else None
        cut = self.layer_cut
        is_megatron = self.backend == "megatron"
        first, *more = cut_layers(model, layers, cut, is_fused=self.has_fused_kernels, has_own_modules=is_megatron)
        recompute, modules = self.recompute
        rows = training.kernels.logit_rows
        exported = self.backend != "deepspeed"
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
            loss=Loss.NONE if is_value or not stage.has_head else self.loss,
            offloads_activations=training.offloads_activations,
            frozen=self._describe_frozen(fixed),
            is_compiled=training.kernels.is_compiled,
            rows_at_once=RowsAtOnce(rows, rows) if rows else ROWS_ON_GPU,
            residual_bytes=self.lora.unquantized_bytes(0) if self.lora else 0,
            more=tuple(more),
            sequence_shards=cut.sequence_shards,
            gathers_again=cut.gathers_again,
            ulysses=choice.ulysses,
            has_context_parallel=choice.cp > 1,
            micro_batches_in_flight=stage.in_flight,
            softcaps_logits=model.architecture in CAPPED,
            selects_rows=not exported,
            dequantised=fixed.dequantised,
            scored_words=self.scored_words,
            num_pairs=0 if is_megatron or training.kernels.attention != "auto" else micro_batch.num_pairs,
        )

    def _describe_frozen(self, fixed: FixedStates) -> Frozen | None:
        """The adapters beside frozen weights. In fp32, or with dropout, each of them keeps a copy of its input."""
        lora, training = self.lora, self.training
        if lora is None:
            return None
        element_bytes = training.dtype.num_bytes
        return replace(
            fixed.find_adapters(element_bytes),
            adapter_bytes=4 if lora.dtype == "float32" else element_bytes,
            has_dropout=lora.dropout > 0,
            # torch.compile fuses an adapter's output, its scaled copy and the sum into one kernel.
            scales_outputs=not training.kernels.is_compiled,
        )


@dataclass(frozen=True)
class PipelineStage:
    """A pipeline stage; without pipeline parallelism, the whole model."""

    index: int
    layers: range
    has_head: bool
    in_flight: int
    """Micro-batches whose activations the stage holds."""


def list_stages(
    model: ModelSpec,
    pp: int,
    num_micro_batches: int | None,
    role: Role = Role.POLICY,
    *,
    virtual_stages: int = 1,
) -> tuple[PipelineStage, ...]:
    """The stages that may be the fullest: the first, the last, the one with the most layers, the one with the most MoE
    layers.

    Counts: under one-forward-one-backward (1F1B) stage i holds min(m, p - i) micro-batches. Interleaved over v parts of
    a stage, it holds 2 (p - i - 1) + (v - 1) p + 1 parts, rounded up to whole micro-batches.
    Source: Narayanan et al. 2021 (Megatron-LM), section 2.2; Megatron-Core 0.14 pipeline_parallel/schedules.py
    (`get_pp_rank_microbatches`).

    >>> from rlplan.spec.models.catalogue import find_model
    >>> v3 = find_model("deepseek-ai/DeepSeek-V3")
    >>> [(stage.index, len(stage.layers), stage.in_flight) for stage in list_stages(v3, 16, 8)]
    [(0, 4, 8), (1, 4, 8), (15, 1, 1)]
    """
    layers = split_training_stages(model, pp, has_head=role not in (Role.VALUE, Role.REWARD))
    sparse = frozenset(model.experts.layers) if model.experts else frozenset()
    largest = max(range(pp), key=lambda stage: len(layers[stage]))
    fullest = max(range(pp), key=lambda stage: (len(sparse & frozenset(layers[stage])), len(layers[stage])))
    limit = pp if num_micro_batches is None else num_micro_batches
    return tuple(
        PipelineStage(index, layers[index], index == pp - 1, min(limit, _count_in_flight(pp, index, virtual_stages)))
        for index in sorted({0, largest, fullest, pp - 1})
    )


def _count_in_flight(pp: int, index: int, virtual_stages: int) -> int:
    """Micro-batches whose activations a stage holds in the middle of a full pipeline."""
    if virtual_stages == 1 or pp == 1:
        return pp - index
    return ceil_div(2 * (pp - index - 1) + (virtual_stages - 1) * pp + 1, virtual_stages)


class RankOnGpu(Forecast):
    """One rank of a pipeline stage. See `predict.Forecast`."""

    def __init__(self, trained: TrainedRole, stage: PipelineStage, fixed: FixedStates) -> None:
        self.trained, self.stage, self.fixed = trained, stage, fixed

    def predict_resident(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Bytes on the GPU after the action."""
        sizes = self._find_states(action, run_phase).device
        if action.kind is ActionKind.OFFLOAD_ROLE:
            sizes = {kind: size for kind, size in sizes.items() if kind in self.trained.never_offloaded}
        return self._add_overheads(sizes, run_phase)

    def predict_peak(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Bytes on the GPU at the peak inside the action."""
        if action.kind is ActionKind.TRAIN_FORWARD_BACKWARD:
            return self._add_overheads(self._largest_snapshot(run_phase), run_phase)
        if action.kind is ActionKind.OPTIMIZER_STEP:
            return self._add_overheads(find_update_peak(self.rank_state, self.shape), run_phase)
        if action.kind is ActionKind.START_TRAINER:
            return self.predict_resident(action, run_phase)
        sizes = self._add_overheads(self._waiting.device, run_phase)
        if action.kind is ActionKind.SCORE:
            sizes[MemoryKind.LOGITS] = score_peak_bytes(self._scoring_shape(action.role))
            sizes[MemoryKind.COMM_BUFFERS] = sizes.get(MemoryKind.COMM_BUFFERS, 0) + self.fixed.gathered
        elif action.kind is ActionKind.SYNC_WEIGHTS:
            sync = {MemoryKind.SYNC_STAGING: self.staging, MemoryKind.COMM_BUFFERS: self.gathered_for_sync}
            sizes = add(sizes, sync)
        return sizes

    def predict_host(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Bytes of this rank in the host's memory: offloaded states, and all states while the role is offloaded.

        Counts: `FixedStates.offloaded`; at the start the loaded weights, whole or (cut) a layer at a time; weights that
        are being written. Assumes: `pin_memory` is on.
        """
        training, sizes = self.trained.training, self.fixed.offloaded
        if sizes and training.offload_device == "nvme":
            sizes = keep_on_host(sizes, pinned_bytes(self.fixed.swap_buffers))
        if action.kind is ActionKind.START_TRAINER:
            sizes = add(sizes, {MemoryKind.SYNC_STAGING: self.fixed.loading})
        elif action.kind is ActionKind.TRAIN_FORWARD_BACKWARD and self._offloads_activations:
            sizes = add(sizes, {MemoryKind.ACTIVATIONS: pinned_bytes(_offloaded_activations(self.shape))})
        elif action.kind is ActionKind.OFFLOAD_ROLE:
            sizes = add(sizes, pin_sizes(self.moved))
        elif self.trained.offloads_states and action.kind in _WITHOUT_STATES:
            sizes = add(sizes, pin_sizes({kind: size for kind, size in self.moved.items() if kind in _STATES}))
        elif action.kind is ActionKind.CHECKPOINT:
            sizes = add(sizes, {MemoryKind.SYNC_STAGING: self.fixed.share_bytes})
        return sizes

    @property
    def _offloads_activations(self) -> bool:
        """Whether checkpointed activations are on the host. A choice `without_passes` has no checkpointing."""
        return self.trained.training.offloads_activations and self.trained.choice.gradient_checkpointing

    @cached_property
    def shape(self) -> MicroBatchShape:
        """The shape of one micro-batch."""
        return self.trained.build_shape(self.stage, self.fixed)

    def _scoring_shape(self, role: Role) -> MicroBatchShape:
        """The shape of one scoring pass of a role."""
        for scoring in self.trained.scoring:
            if scoring.role is role:
                trained = replace(self.trained, micro_batch=scoring.micro_batch, scored_words=scoring.scored_words)
                return trained.build_shape(self.stage, self.fixed)
        return self.shape

    @cached_property
    def rank_state(self) -> RankState:
        """The rank's memory that does not depend on the tokens."""
        return replace(self.fixed.rank_state, accumulates=self.trained.micro_batch.accumulates)

    @cached_property
    def snapshots(self) -> dict[Place, Bytes]:
        """Memory snapshots of a step. See `step_peak.take_snapshots`."""
        return take_snapshots(self.rank_state, self.shape)

    @property
    def staging(self) -> int:
        """Bytes of the weight sync bucket."""
        trained = self.trained
        return sync_staging(trained.model, trained.training.dtype.num_bytes, trained.sync_bucket, trained.backend)

    @property
    def gathered_for_sync(self) -> int:
        """Bytes of other ranks' parts of the weights in the bucket. FSDP2 casts only after gathering."""
        trained, training = self.trained, self.trained.training
        if not trained.is_cut or trained.backend == "deepspeed" or not trained.sync_bucket:
            return self.staging if trained.is_cut else 0
        stored_bytes = training.stored_dtype(trained.backend).num_bytes
        return gathered_part_bytes(trained.model, trained.backend, stored_bytes, trained.choice.ep)

    @property
    def moved(self) -> Bytes:
        """Bytes that move to the host and back when the role is offloaded. Dropped gradients are not copied."""
        kept = (*self.trained.never_offloaded, *[MemoryKind.GRADIENTS] * self.trained.offloads_states)
        return {kind: size for kind, size in self.fixed.after_step.device.items() if kind not in kept}

    def _largest_snapshot(self, run_phase: RunPhase) -> Bytes:
        # The passes of the first step run before Adam's moments exist.
        late = MemoryKind.OPTIMIZER if run_phase == "first" else None
        return {kind: size for kind, size in self._reserved_peak.items() if kind is not late}

    @cached_property
    def _reserved_peak(self) -> Bytes:
        """The largest snapshot of the passes, including memory that torch reserves beyond its tensors."""
        return find_passes_peak({place: self._add_gaps(place, sizes) for place, sizes in self.snapshots.items()})

    @cached_property
    def _pools(self) -> dict[Place, int]:
        """Bytes that other streams' memory pools keep beyond what is in use: FSDP2's gathers and reductions."""
        state = self.fixed.reserved_state
        if state is None:
            return {}
        reserved = take_snapshots(replace(state, accumulates=True), self.shape)
        in_use = {place: sum(sizes.values()) for place, sizes in self.snapshots.items()}
        return {place: max(0, sum(reserved[place].values()) - size) for place, size in in_use.items()}

    def _add_gaps(self, place: Place, sizes: Mapping[MemoryKind, int]) -> Bytes:
        """Add the gaps in torch's segments to a snapshot.

        Counts: at the loss one layer and the upcast logits (`reserved_bytes`); elsewhere half of the widest tensor of a
        layer, because between none and all of a request's size is already free in the segments; pools of other streams.
        """
        total = sum(sizes.values()) + self._pools.get(place, 0)
        gaps = self._widest_tensor // 2
        if place is Place.LOSS:
            gaps = reserved_bytes(total, max(map(layer_bytes, self.shape.kinds)), self._uncast_logits) - total
        return add(sizes, {MemoryKind.FRAGMENTATION: gaps + self._pools.get(place, 0)})

    @property
    def _uncast_logits(self) -> int:
        """Bytes of the logits in the model's type, which the loss frees after upcasting them."""
        shape = self.shape
        return shape.element_bytes * shape.num_head_tokens * shape.vocab_size if shape.loss in UPCASTING else 0

    @cached_property
    def _widest_tensor(self) -> int:
        """Bytes of the widest tensor of a layer: in the MLP, of the experts' rows, or an adapter's input copy."""
        shape, block = self.shape, self.shape.block
        element_bytes = shape.element_bytes
        if block.experts is not None:
            width = block.experts.top_k * max(2 * block.experts.width, block.hidden)
        else:
            width = block.intermediate
            if shape.frozen is not None and shape.frozen.adapts_down:
                element_bytes = max(element_bytes, shape.frozen.adapter_bytes)
        return element_bytes * shape.num_tokens * width

    def _find_states(self, action: Action, run_phase: RunPhase) -> States:
        if self.trained.offloads_states and action.kind in _WITHOUT_STATES:
            return self._waiting
        if run_phase == "start" or (run_phase == "first" and action.kind is ActionKind.RELOAD_ROLE):
            return self.fixed.after_build
        if action.kind is ActionKind.TRAIN_FORWARD_BACKWARD:
            return self.fixed.after_backward
        return self.fixed.after_step

    @cached_property
    def _waiting(self) -> States:
        """Memory outside of training: all states, or only the weights."""
        if not self.trained.offloads_states:
            return self.fixed.after_step
        return States({kind: size for kind, size in self.moved.items() if kind not in _STATES})

    def _add_overheads(self, sizes: Mapping[MemoryKind, int], run_phase: RunPhase) -> Bytes:
        buffer = gather_buffer_bytes(self.shape) if run_phase != "start" else 0
        return add(add(sizes, self.trained.process_overheads), {MemoryKind.COMM_BUFFERS: buffer} if buffer else {})


def _offloaded_activations(shape: MicroBatchShape) -> int:
    """Bytes of saved activations on the host: those that would stay on the GPU without offloading."""
    on_gpu = replace(shape, offloads_activations=False)
    return sum(kind.num_layers * kept_layer_bytes(kind) for kind in on_gpu.kinds) * shape.micro_batches_in_flight
