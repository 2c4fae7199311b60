"""What a rank of a trained role holds on a CPU host, action by action.

In: a job, its model and the rank. Out: bytes by kind. The formulas are in training.py, activations.py and backward.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from rlplan.dataflow.layouts import RoleLayout
from rlplan.dataflow.schedule import Action
from rlplan.memory.ledger import RunPhase
from rlplan.memory.machine.machine import CPU
from rlplan.memory.machine.overheads import COMPILED_MATMUL_BYTES, slack_bytes
from rlplan.memory.model.frozen import frozen_of
from rlplan.memory.model.logits import FLOAT_BYTES
from rlplan.memory.predict import Forecast
from rlplan.memory.roles.process import add
from rlplan.memory.roles.scorer import pass_bytes, shape_on_cpu
from rlplan.memory.serving.shared_base import shared_base_bytes
from rlplan.memory.trainers.checkpoints import saved_bytes
from rlplan.memory.trainers.micro_batch import Place
from rlplan.memory.trainers.shape import MicroBatchShape, Recompute
from rlplan.memory.trainers.sharding import rank_state_under_zero
from rlplan.memory.trainers.step_peak import largest_of, passes_peak, snapshots
from rlplan.memory.trainers.training import merging_bytes, put_together_bytes, rank_of_role
from rlplan.memory.weight_sync.packets import sync_staging_bytes
from rlplan.spec.hardware.profile import HardwareProfile
from rlplan.spec.model import ModelSpec
from rlplan.spec.resolved import ResolvedJob
from rlplan.units import ceil_div
from rlplan.vocabulary import ActionKind, MemoryKind, Role

STATE_KINDS = (MemoryKind.WEIGHTS, MemoryKind.MASTER_WEIGHTS, MemoryKind.GRADIENTS, MemoryKind.OPTIMIZER)

OFFLOADED_KINDS = (*STATE_KINDS, MemoryKind.COMM_BUFFERS)
"""What leaves memory while a role is offloaded. Source: `rlplan.runtime.workers.trainer.trained_states`."""

AFTER_A_STEP = (
    *(ActionKind.OPTIMIZER_STEP, ActionKind.SYNC_WEIGHTS, ActionKind.CHECKPOINT),
    *(ActionKind.SAVE_WEIGHTS, ActionKind.SAVE_STATES, ActionKind.WRITE_STATES, ActionKind.OFFLOAD_ROLE),
)
"""What the first step does after its optimizer step."""

HANDS_WEIGHTS_ON = (ActionKind.SYNC_WEIGHTS, ActionKind.SAVE_WEIGHTS, ActionKind.CHECKPOINT)
"""Actions in which adapters are merged into the weights, one after the other."""


class TrainerForecast(Forecast):
    """One data-parallel rank. See `predict.Forecast`."""

    has_arena: bool = True
    """Whether weights go out through shared memory; otherwise they are written to files."""

    stages_states: bool = False
    """Whether states are copied before they are written as a checkpoint. The copy's memory is there from the start."""

    def __init__(
        self, job: ResolvedJob, model: ModelSpec, profile: HardwareProfile, layout: RoleLayout, rank: int
    ) -> None:
        self.job, self.model, self.profile, self.rank = job, model, profile, rank
        self.layout = layout
        cut, shard = (layout.tp, layout.zero_stage, layout.num_shards), rank // layout.tp
        self.trained = rank_of_role(job, layout.role, model, cut, shard, training=job.training)
        if job.rollout.shares_base and layout.role is Role.POLICY:
            e = job.training.dtype.num_bytes
            beside = e * sum(tensor.numel for tensor in job.frozen_adapter_parameters(model))
            base = shared_base_bytes(model, e) + beside
            self.trained = replace(self.trained, states=replace(self.trained.states, frozen_bytes=base))
        self.states = self.trained.states
        accumulates = self._share * job.workload.max_seq_len > job.max_tokens_per_micro_batch
        self.rank_state = replace(
            rank_state_under_zero(self.states, CPU, reduces_in_step=True), accumulates=accumulates
        )

    def resident(self, action: Action, run_phase: RunPhase) -> dict[MemoryKind, int]:
        """Held when the action has ended."""
        held = self._base(action, run_phase)
        if action.kind is ActionKind.OFFLOAD_ROLE:
            held = {kind: size for kind, size in held.items() if kind not in OFFLOADED_KINDS}
        if action.kind is ActionKind.TRAIN_FORWARD_BACKWARD:
            held[MemoryKind.GRADIENTS] = self._accumulated
            # Small tensors that ZeRO-3 keeps whole stay so from the second micro-batch on.
            held[MemoryKind.WEIGHTS] = max(
                held[MemoryKind.WEIGHTS], self.states.weight_bytes(has_stepped=self.rank_state.accumulates)
            )
        if not (run_phase == "start" and action.kind is ActionKind.START_TRAINER):
            held[MemoryKind.SYNC_STAGING] = self._staging
        if self.stages_states:
            held[MemoryKind.CHECKPOINT_STAGING] = saved_bytes(self.states)
        return held

    def peak(self, action: Action, run_phase: RunPhase) -> dict[MemoryKind, int]:
        """Held at the moment of the process's peak inside the action."""
        held = self.resident(action, run_phase)
        if action.kind is ActionKind.START_TRAINER:
            held[MemoryKind.COMM_BUFFERS] = self._loading(held)
        elif action.kind is ActionKind.TRAIN_FORWARD_BACKWARD:
            held[MemoryKind.GRADIENTS] = self._base(action, run_phase).get(MemoryKind.GRADIENTS, 0)
            is_first = not self._has_stepped(action, run_phase)
            held = passes_peak(snapshots(self.rank_state, self.shape, resident=held, is_first=is_first))
        elif action.kind is ActionKind.SCORE:
            held[MemoryKind.LOGITS] = pass_bytes(self.job, self.shape, self.layout.dp, self.job.training.ulysses)
        elif action.kind in (ActionKind.CHECKPOINT, ActionKind.SAVE_WEIGHTS) and self.rank == 0:
            # Every tensor is copied out of the flat buffer before it is written.
            held[MemoryKind.WEIGHTS] += self.trained.element_bytes * self.model.num_parameters
        elif action.kind is ActionKind.OFFLOAD_ROLE:
            held |= self._base(action, run_phase)
        elif action.kind is ActionKind.OPTIMIZER_STEP:
            held = self._update_peak(held, is_first=run_phase == "first" and not action.mini_batch)
        if action.kind in HANDS_WEIGHTS_ON and not self.rank and self._merges(action):
            held[MemoryKind.WEIGHTS] += merging_bytes(self.trained)
        if action.kind in HANDS_WEIGHTS_ON and self.layout.tp > 1:
            held[MemoryKind.COMM_BUFFERS] = held.get(MemoryKind.COMM_BUFFERS, 0) + put_together_bytes(self.trained)
        tensors = sum(held.values()) - held[MemoryKind.PROCESS] - held[MemoryKind.FRAGMENTATION]
        held[MemoryKind.FRAGMENTATION] = (
            slack_bytes(self.profile.process_slack.policy_trainer, tensors) + self._compiled
        )
        return held

    @property
    def _accumulated(self) -> int:
        """Bytes of gradients between backward and step."""
        if self.states.settings.offloads_optimizer:
            states = self.states.after_backward()
            return states.device.get(MemoryKind.GRADIENTS, 0) + states.host.get(MemoryKind.GRADIENTS, 0)
        return self.states.backward_gradient_bytes()

    @property
    def _has_late_moments(self) -> bool:
        """Adam's moments appear in the first step, except where the engine makes an empty one while it is built."""
        return MemoryKind.OPTIMIZER not in self.states.after_build().device

    @property
    def _share(self) -> int:
        """Rollouts that the rank trains on in a mini-batch."""
        return self.job.num_trained_by(self.layout.dp)

    @cached_property
    def shape(self) -> MicroBatchShape:
        """The rank's largest micro-batch: of a pass that several ranks share it has a part of the tokens, in which all
        may be of responses.
        """
        job, workload, training = self.job, self.job.workload, self.job.training
        whole = min(self._share * workload.max_seq_len, job.max_tokens_per_micro_batch)
        num_tokens = ceil_div(whole, training.ulysses)
        adapters, e = self.trained.adapters, self.trained.element_bytes
        return replace(
            shape_on_cpu(self.model, e, self.layout.tp),
            num_tokens=num_tokens,
            num_head_tokens=min(self._share * workload.max_response_len, num_tokens),
            recompute=Recompute.FULL if training.gradient_checkpointing else Recompute.NONE,
            frozen=frozen_of(adapters, e) if adapters else None,
            ulysses=training.ulysses,
            has_entropy_gradient=bool(job.algorithm.entropy_coef),
            dequantised=self.trained.dequantised,
        )

    @property
    def _compiled(self) -> int:
        """Code of matmuls, which stays."""
        return COMPILED_MATMUL_BYTES if self.trained.element_bytes < FLOAT_BYTES else 0

    def _update_peak(self, held: Mapping[MemoryKind, int], *, is_first: bool) -> dict[MemoryKind, int]:
        """The largest moment of the optimizer's step, in the first of which Adam's moments appear late."""
        found = snapshots(self.rank_state, self.shape, resident=held)
        late = MemoryKind.OPTIMIZER if is_first and self._has_late_moments else None
        before = {kind: size for kind, size in found.get(Place.REDUCE, {}).items() if kind is not late}
        return largest_of((before, found[Place.STEP]))

    def _loading(self, held: Mapping[MemoryKind, int]) -> int:
        """Bytes beside the engine's states while it is built.

        Loading: the start checkpoint's pages, fp32, are mapped while they are copied, cast or put into 4 bits.
        Building: stages 1 and 2 flatten the loaded parameters before the master weights exist, and then hold an empty
        fp32 gradient of the partition; stage 3 cuts them and joins the parts in one buffer; stage 0 in 16 bits makes an
        empty step, with fp32 gradients, beside a copy.
        """
        states, e = self.states, self.trained.element_bytes
        there = sum(held.get(kind, 0) for kind in STATE_KINDS)
        loaded = e * states.num_trainable
        numel_in_file = sum(parameter.numel for parameter in self.model.parameters)
        copied = e * numel_in_file
        if self.trained.dequantised and e == FLOAT_BYTES:  # made from the pages of the file, without a copy
            copied = held[MemoryKind.WEIGHTS]
        loading = copied + FLOAT_BYTES * numel_in_file - there
        building = {
            0: loaded + FLOAT_BYTES * states.num_trainable if e < FLOAT_BYTES else 0,
            3: max(loaded - states.master_bytes(), e * states.partition_numel),
        }.get(states.settings.stage, max(loaded - states.master_bytes(), FLOAT_BYTES * states.partition_numel))
        return max(0, loading, building)

    def _base(self, action: Action, run_phase: RunPhase) -> dict[MemoryKind, int]:
        """The states as they lie between passes, on the device and on the host, which are one on a CPU."""
        states = self.states.after_step() if self._has_stepped(action, run_phase) else self.states.after_build()
        held = add(states.device, states.host)
        if self.states.settings.stage == 3:
            held[MemoryKind.COMM_BUFFERS] = 0 if run_phase == "start" else self.rank_state.kept_bucket
        return held | {
            MemoryKind.PROCESS: self._imports,
            MemoryKind.FRAGMENTATION: self.profile.process_slack.policy_trainer.value + self._compiled,
        }

    def _merges(self, action: Action) -> bool:
        """Whether adapters are merged into weights in the action: not where the engine takes them as they are."""
        is_sync = action.kind is ActionKind.SYNC_WEIGHTS
        return bool(self.trained.adapters) and not (is_sync and self.job.placement.sync_content == "adapter")

    @property
    def _imports(self) -> int:
        """Bytes of the libraries, PEFT among them where adapters are trained."""
        overheads = self.profile.process_overheads
        imports_more = (
            bool(self.trained.adapters) or self.job.training.optimizer != "adamw"
        )  # PEFT has bitsandbytes too
        more = overheads.adapters.value if imports_more and overheads.adapters else 0
        return overheads.policy_trainer.value + more

    def _has_stepped(self, action: Action, run_phase: RunPhase) -> bool:
        """Adam's moments appear in the first optimizer step."""
        if run_phase == "start":
            return False
        if run_phase != "first":
            return True
        return action.kind in AFTER_A_STEP or bool(action.mini_batch)

    @cached_property
    def _staging(self) -> int:
        """The first rank alone sends, or each to the engine on its device."""
        sends = not self.rank or self.job.placement.sync_senders == "each"
        return sync_staging_bytes(self.job, self.model) if sends and self.has_arena else 0


class ValueForecast(TrainerForecast):
    """A trainer rank that hands nothing over: of a value model, or of a policy that nothing is generated with."""

    def resident(self, action: Action, run_phase: RunPhase) -> dict[MemoryKind, int]:
        """Held when the action has ended: nothing of a weight sync."""
        held = super().resident(action, run_phase)
        held.pop(MemoryKind.SYNC_STAGING, None)
        return held
