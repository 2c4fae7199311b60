"""What one rank of a trained role holds on its GPU and on its host, action by action, under DeepSpeed.

In: a model, how it is trained, tokens of a micro-batch. Out: bytes by kind. The formulas are in zero.py, sharding.py,
step_peak.py. The states are in states.py.
Left out: pipelines.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from rlplan.dataflow.schedule import Action
from rlplan.memory.allocator import reserved_bytes
from rlplan.memory.block_families import blocks_of
from rlplan.memory.gpu.process import Bytes, add, pinned, process_overheads, sync_staging
from rlplan.memory.gpu.states import TrainerChoice, fixed_parts, frozen_of, zero_settings
from rlplan.memory.host import pinned_bytes
from rlplan.memory.ledger import Moment
from rlplan.memory.logits import Loss
from rlplan.memory.nvme import left_on_host
from rlplan.memory.step_peak import Held, Recompute, Work, kept_layer_bytes, layer_bytes, moments, score_peak_bytes
from rlplan.memory.zero import States
from rlplan.spec.budget import BudgetTraining
from rlplan.spec.hardware import GpuOverheads
from rlplan.spec.model import ModelSpec
from rlplan.vocabulary import ActionKind, MemoryKind, Role

CAPPED = ("Gemma2ForCausalLM",)
"""Families whose logits pass a tanh, which saves them once more (transformers 5.19, `final_logit_softcapping`)."""


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


def _offloaded_activations(work: Work) -> int:
    """What recomputation (or nothing) keeps of the layers, which lies on the host instead."""
    kept = replace(work, offloads_activations=False)
    return sum(kind.num_layers * kept_layer_bytes(kind) for kind in kept.kinds)
