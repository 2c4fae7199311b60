"""What one rank of a trained role holds on its GPU and on its host, action by action, under DeepSpeed.

In: a model, how it is trained, tokens of a micro-batch. Out: bytes by kind. The formulas are in zero.py, sharding.py,
step_peak.py. Left out: pipelines; NVMe; what torch's allocator rounds (allocator.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from rlplan.dataflow.schedule import Action
from rlplan.memory.allocator import reserved_bytes
from rlplan.memory.block_families import blocks_of
from rlplan.memory.frozen import Frozen
from rlplan.memory.host import pinned_bytes
from rlplan.memory.ledger import Moment
from rlplan.memory.logits import Loss
from rlplan.memory.nvme import left_on_host, swap_buffer_bytes
from rlplan.memory.optimizers import Optimizer
from rlplan.memory.quantization import NF4_DOUBLE, Quantization, weight_bytes
from rlplan.memory.sharding import Sizes, held_by_zero, sizes_of
from rlplan.memory.step_peak import Held, Recompute, Work, kept_layer_bytes, layer_bytes, moments, score_peak_bytes
from rlplan.memory.transitions import plan_buckets, staging_bytes
from rlplan.memory.zero import States, ZeroSettings, ZeroStates
from rlplan.spec.budget import BudgetTraining, LoraSpec
from rlplan.spec.hardware import GpuOverheads
from rlplan.spec.model import Component, ModelSpec, Parameter
from rlplan.spec.models.adapters import lora_parameters, value_head_parameters
from rlplan.vocabulary import ActionKind, MemoryKind, Role

CAPPED = ("Gemma2ForCausalLM",)
"""Families whose logits pass a tanh, which saves them once more (transformers 5.19, `final_logit_softcapping`)."""
Bytes = dict[MemoryKind, int]


@dataclass(frozen=True)
class TrainerChoice:
    """What is chosen for a trained role. micro_batch: rollouts of a pass."""

    zero_stage: int
    recomputes: bool
    offloads_optimizer: bool
    offloads_parameters: bool
    micro_batch: int


@dataclass(frozen=True)
class Passes:
    """One micro-batch of a rank. num_tokens: prompt and response; num_head_tokens: those whose logits are taken.

    accumulates: gradients of an earlier micro-batch are there already.
    """

    num_tokens: int
    num_head_tokens: int
    accumulates: bool


class TrainerOnGpu:
    """One rank. See `memory.predict.Forecast`; `on_host` says what lies in the host's memory meanwhile."""

    def __init__(
        self,
        role: Role,
        model: ModelSpec,
        training: BudgetTraining,
        choice: TrainerChoice,
        passes: Passes,
        num_ranks: int,
        overheads: GpuOverheads,
        sync_bucket: int,
        *,
        in_transfer_group: bool = False,
    ) -> None:
        self.role, self.model, self.training, self.choice = role, model, training, choice
        self.passes, self.num_ranks, self.overheads, self.sync_bucket = passes, num_ranks, overheads, sync_bucket
        self.in_transfer_group = in_transfer_group
        self.lora = training.lora if role is Role.POLICY else None
        self.fixed = fixed_parts(model, role, self.lora, zero_settings(training, choice, num_ranks))

    def resident(self, action: Action, moment: Moment) -> Bytes:
        """Held on the GPU when the action has ended."""
        if action.kind is ActionKind.OFFLOAD_ROLE:
            return self._overheads()
        return self._with_overheads(dict(self._states(action, moment).device))

    def peak(self, action: Action, moment: Moment) -> Bytes:
        """Held on the GPU at the peak inside the action."""
        if action.kind is ActionKind.TRAIN_FORWARD_BACKWARD:
            held = self._with_overheads(self._largest_moment(moment))
            total = sum(held.values())
            held[MemoryKind.FRAGMENTATION] = reserved_bytes(total, layer_bytes(self.work)) - total
            return held
        if action.kind is ActionKind.OPTIMIZER_STEP:
            return self._with_overheads(self.moments["step"])
        held = self._with_overheads(dict(self.fixed.after_step.device))
        if action.kind is ActionKind.START_TRAINER:
            return self.resident(action, moment)
        if action.kind is ActionKind.SCORE:
            held[MemoryKind.LOGITS] = score_peak_bytes(self.work)
            held[MemoryKind.COMM_BUFFERS] = held.get(MemoryKind.COMM_BUFFERS, 0) + self.fixed.gathered
        elif action.kind is ActionKind.SYNC_WEIGHTS:
            gathered = self.staging if self.choice.zero_stage == 3 and self.num_ranks > 1 else 0
            held = add(held, {MemoryKind.SYNC_STAGING: self.staging, MemoryKind.COMM_BUFFERS: gathered})
        return held

    def on_host(self, action: Action, moment: Moment) -> Bytes:
        """Held in the host's memory for this rank: what ZeRO offloads, and everything while the role is parked.

        Counts: `offloaded_states`; while it starts the loaded weights, whole or (stage 3) a layer at a time; weights
        that are being written. Assumes: `pin_memory` is on.
        """
        held = self.fixed.offloaded
        if held and self.training.offload_device == "nvme":
            held = left_on_host(held, pinned_bytes(self.fixed.swap_buffers))
        if action.kind is ActionKind.START_TRAINER:
            held = add(held, {MemoryKind.SYNC_STAGING: self.fixed.loading})
        elif action.kind is ActionKind.TRAIN_FORWARD_BACKWARD and self.training.offloads_activations:
            held = add(held, {MemoryKind.ACTIVATIONS: pinned_bytes(_offloaded_activations(self.work))})
        elif action.kind is ActionKind.OFFLOAD_ROLE:
            held = add(held, pinned(self.fixed.after_step.device))
        elif action.kind is ActionKind.CHECKPOINT:
            held = add(held, {MemoryKind.SYNC_STAGING: self.fixed.share_bytes})
        return held

    @cached_property
    def work(self) -> Work:
        """What the rank computes in one micro-batch."""
        training, passes = self.training, self.passes
        is_value = self.role is Role.VALUE
        first, *more = blocks_of(self.model)
        return Work(
            first.block,
            first.num,
            1 if is_value else self.model.vocab_size,
            passes.num_tokens,
            passes.num_head_tokens,
            element_bytes=training.dtype.num_bytes,
            recompute=Recompute.FULL if self.choice.recomputes else Recompute.NONE,
            loss=Loss.NONE if is_value else Loss(training.logits),
            offloads_activations=training.offloads_activations,
            frozen=frozen_of(self.fixed.adapters) if self.lora else None,
            more=tuple(more),
            exchanges_heads=training.ulysses > 1,
            softcaps_logits=self.model.architecture in CAPPED,
        )

    @cached_property
    def held(self) -> Held:
        """What the rank holds whatever the tokens."""
        return replace(self.fixed.held, accumulates=self.passes.accumulates)

    @cached_property
    def moments(self) -> dict[str, Bytes]:
        """Bytes at the moments of a step. See `step_peak.moments`."""
        return moments(self.held, self.work)

    @property
    def staging(self) -> int:
        """Bytes of the bucket through which weights pass to the engine."""
        return sync_staging(self.model, self.training.dtype.num_bytes, self.sync_bucket)

    def _largest_moment(self, moment: Moment) -> Bytes:
        inside = [held for name, held in self.moments.items() if name != "step"]
        largest = max(inside, key=lambda held: sum(held.values()))
        late = MemoryKind.OPTIMIZER if moment == "first" else None
        return {kind: size for kind, size in largest.items() if kind is not late}

    def _states(self, action: Action, moment: Moment) -> States:
        if moment == "start" or (moment == "first" and action.kind is ActionKind.RELOAD_ROLE):
            return self.fixed.after_build
        if action.kind is ActionKind.TRAIN_FORWARD_BACKWARD:
            return self.fixed.after_backward
        return self.fixed.after_step

    def _with_overheads(self, held: Bytes) -> Bytes:
        return add(held, self._overheads())

    def _overheads(self) -> Bytes:
        return process_overheads(self.overheads, self.num_ranks, in_transfer_group=self.in_transfer_group)


@dataclass(frozen=True)
class FixedParts:
    """What does not depend on the tokens. gathered: weights at most at a time.

    share_bytes: the rank's own weights. swap_buffers: of NVMe offload. offloaded: what ZeRO keeps on the host.
    loading: on the host while weights are loaded.
    """

    adapters: tuple[Parameter, ...]
    after_build: States
    after_backward: States
    after_step: States
    held: Held
    gathered: int
    share_bytes: int
    swap_buffers: int
    offloaded: Bytes
    loading: int


@lru_cache(maxsize=1024)
def fixed_parts(model: ModelSpec, role: Role, lora: LoraSpec | None, settings: ZeroSettings) -> FixedParts:
    """States of a rank, counted once for all token counts."""
    parameters, adapters, sizes = _trained(model, role, lora, settings.weight_bytes)
    states = ZeroStates(settings, adapters or parameters, frozen=parameters if adapters else ())
    saved = _quantized_saving(parameters, settings.weight_bytes) if lora and lora.base == "nf4" else 0
    held = held_by_zero(states, sizes)
    return FixedParts(
        adapters,
        _lighter(states.after_build(), saved),
        _lighter(states.after_backward(), saved),
        _lighter(states.after_step(), saved),
        replace(held, resident=_lighter(States(held.resident), saved).device),
        states.gathered_bytes(sizes.layer_weights),
        settings.weight_bytes * states.partition_numel,
        swap_buffer_bytes(
            min(settings.sub_group_size, states.partition_numel),
            swaps_parameters=settings.offloads_parameters,
            element_bytes=settings.weight_bytes,
        ),
        offloaded_states(states),
        settings.weight_bytes
        * (max(sizes.layer_weights, sizes.table) if settings.stage == 3 else model.num_parameters),
    )


def _quantized_saving(parameters: tuple[Parameter, ...], element_bytes: int) -> int:
    """Bytes that a frozen base of 4-bit normal floats (double quantisation) saves, but for one dequantised matrix."""
    whole = element_bytes * sum(parameter.numel for parameter in parameters)
    largest = element_bytes * max(parameter.numel for parameter in parameters if parameter.is_linear)
    return whole - weight_bytes(parameters, element_bytes, Quantization(NF4_DOUBLE)) - largest


def _lighter(states: States, saved: int) -> States:
    """The same with lighter weights."""
    if not saved:
        return states
    return States({**states.device, MemoryKind.WEIGHTS: states.device[MemoryKind.WEIGHTS] - saved}, states.host)


@lru_cache(maxsize=64)
def _trained(
    model: ModelSpec, role: Role, lora: LoraSpec | None, element_bytes: int
) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...], Sizes]:
    """The model's parameters, the adapters beside them, and their sizes."""
    parameters = value_head_parameters(model) if role is Role.VALUE else model.parameters
    adapters = lora_parameters(model, lora.rank, lora.targets) if lora else ()
    sizes = sizes_of(
        parameters,
        model.num_layers,
        is_tied=model.has_tied_embeddings,
        adapters=adapters,
        frozen_bytes=element_bytes * model.num_parameters if adapters else 0,
    )
    return parameters, adapters, sizes


@lru_cache(maxsize=64)
def sync_staging(model: ModelSpec, element_bytes: int, bucket_bytes: int) -> int:
    """Bytes of the bucket through which weights pass from the trainer to the engine."""
    return staging_bytes(plan_buckets(model.parameters, element_bytes, bucket_bytes))


def add(one: Bytes, other: Bytes) -> Bytes:
    """The sum of two, kind by kind."""
    return {kind: one.get(kind, 0) + other.get(kind, 0) for kind in (*one, *(k for k in other if k not in one))}


def offloaded_states(states: ZeroStates) -> Bytes:
    """What ZeRO keeps on the host, as memory is taken: pinned tensors in powers of two, others as they are.

    Counts: pinned are gradients and, in stages 1 and 2, master weights and the 16-bit copy; in stage 3 the 16-bit
    gradients are one tensor, the fp32 ones a tensor a sub-group. Moments (and stage 3's master weights) are pageable.
    Source: DeepSpeed 0.19.8, stage_1_and_2.py and stage3.py (`pin_memory`), ops/adam/cpu_adam.py.
    """
    settings, host = states.settings, states.after_step().host
    pageable = {MemoryKind.OPTIMIZER} | ({MemoryKind.MASTER_WEIGHTS} if settings.stage == 3 else set())
    held = {kind: size if kind in pageable else pinned_bytes(size) for kind, size in host.items()}
    if settings.stage == 3 and MemoryKind.GRADIENTS in held:
        whole, rest = divmod(states.partition_numel, settings.sub_group_size)
        groups = whole * pinned_bytes(settings.master_bytes * settings.sub_group_size)
        groups += pinned_bytes(settings.master_bytes * rest)
        held[MemoryKind.GRADIENTS] = groups + pinned_bytes(settings.gradient_bytes * states.partition_numel)
    return held


def _offloaded_activations(work: Work) -> int:
    """What recomputation (or nothing) keeps of the layers, which lies on the host instead."""
    kept = replace(work, offloads_activations=False)
    return sum(kind.num_layers * kept_layer_bytes(kind) for kind in kept.kinds)


def pinned(sizes: Mapping[MemoryKind, int]) -> Bytes:
    """What tensors take in pinned memory, one flat tensor a kind."""
    return {kind: pinned_bytes(size) for kind, size in sizes.items()}


def process_overheads(overheads: GpuOverheads, num_ranks: int, *, in_transfer_group: bool = False) -> Bytes:
    """A CUDA context, and a communicator where a process has peers.

    in_transfer_group: one more, of the trainer's first rank and all engines, which weights pass through.
    """
    held = {MemoryKind.CONTEXT: overheads.context.value}
    pair = overheads.communicator_of_two if num_ranks == 2 else overheads.communicator_of_many
    groups = pair.value * (num_ranks > 1) + overheads.communicator_of_many.value * in_transfer_group
    return held | ({MemoryKind.COMM_BUFFERS: groups} if groups else {})


def zero_settings(training: BudgetTraining, choice: TrainerChoice, num_ranks: int) -> ZeroSettings:
    """DeepSpeed's settings for a choice."""
    element_bytes = training.dtype.num_bytes
    return ZeroSettings(
        stage=choice.zero_stage,
        num_ranks=num_ranks,
        weight_bytes=element_bytes,
        gradient_bytes=element_bytes,
        master_bytes=training.master_dtype.num_bytes,
        moment_bytes=training.master_dtype.num_bytes,
        optimizer=Optimizer(training.optimizer),
        reduce_bucket_size=training.reduce_bucket_size,
        allgather_bucket_size=training.reduce_bucket_size,
        offloads_optimizer=choice.offloads_optimizer,
        offloads_parameters=choice.offloads_parameters,
    )


def frozen_of(adapters: tuple[Parameter, ...]) -> Frozen:
    """What is trained beside a layer's frozen weights, from the names of its adapters."""
    names = {adapter.name.split(".lora_")[0].rpartition(".")[2]: adapter.component for adapter in adapters}
    last = {name for name in names if name.startswith(_LAST_OF_A_BLOCK)}
    attention = {name for name, component in names.items() if component is Component.ATTENTION}
    return Frozen(
        attention_inputs=len(attention - last),
        adapts_output=bool(attention & last),
        mlp_inputs=len(set(names) - attention - last),
        adapts_down=bool(last - attention),
        adapter_bytes=2,
    )


_LAST_OF_A_BLOCK = ("o_proj", "out_proj", "dense", "c_proj", "wo", "down_proj", "fc2", "fc_out")
"""Projections that end attention or the MLP, in the names of transformers 5.19."""
