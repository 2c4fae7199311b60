"""Memory of a trainer rank on a CPU host, action by action.

In: a job, its model and the rank. Out: bytes by kind.
Left out: the formulas (trainers/training.py, model/activations.py, trainers/backward.py).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from rlplan.dataflow.schedule import Action, RoleLayout
from rlplan.memory.ledger import RunPhase
from rlplan.memory.machine.machine import COMPILED_MATMUL_BYTES, CPU, set_slack
from rlplan.memory.model.block import FLOAT_BYTES
from rlplan.memory.model.engine_base import shared_base_bytes
from rlplan.memory.model.frozen import describe_adapters
from rlplan.memory.predict import Forecast
from rlplan.memory.roles.process import add
from rlplan.memory.roles.scorer import build_cpu_shape, pass_bytes
from rlplan.memory.trainers.checkpoints import saved_bytes
from rlplan.memory.trainers.micro_batch import Place
from rlplan.memory.trainers.shape import MicroBatchShape, Recompute
from rlplan.memory.trainers.sharding import build_zero_state
from rlplan.memory.trainers.step_peak import find_largest, find_passes_peak, take_snapshots
from rlplan.memory.trainers.training import build_role_rank, gathered_weight_bytes, merging_bytes
from rlplan.memory.weight_sync.packets import sync_staging_bytes
from rlplan.spec.hardware.profile import HardwareProfile
from rlplan.spec.model import ModelSpec
from rlplan.spec.resolved import ResolvedJob
from rlplan.units import ceil_div
from rlplan.vocabulary import ActionKind, MemoryKind, Role

STATE_KINDS = (MemoryKind.WEIGHTS, MemoryKind.MASTER_WEIGHTS, MemoryKind.GRADIENTS, MemoryKind.OPTIMIZER)

OFFLOADED_KINDS = (*STATE_KINDS, MemoryKind.COMM_BUFFERS)
"""Kinds that leave memory while a role is offloaded. Source: `rlplan.runtime.workers.trainer.trained_states`."""

AFTER_A_STEP = (
    *(ActionKind.OPTIMIZER_STEP, ActionKind.SYNC_WEIGHTS, ActionKind.CHECKPOINT),
    *(ActionKind.SAVE_WEIGHTS, ActionKind.SAVE_STATES, ActionKind.WRITE_STATES, ActionKind.OFFLOAD_ROLE),
)
"""Actions of the first step that follow its optimizer step, so that Adam's moments exist."""

HANDS_WEIGHTS_ON = (ActionKind.SYNC_WEIGHTS, ActionKind.SAVE_WEIGHTS, ActionKind.CHECKPOINT)
"""Actions that send or write whole weights. Adapters are merged into them, one weight at a time."""


class TrainerForecast(Forecast):
    """One data-parallel rank. See `predict.Forecast`."""

    has_arena: bool = True
    """Whether weights are sent through shared memory; otherwise they are written to files."""

    stages_states: bool = False
    """Whether a checkpoint copies the states before writing them. The copy's memory is allocated at the start."""

    def __init__(
        self, job: ResolvedJob, model: ModelSpec, profile: HardwareProfile, layout: RoleLayout, rank: int
    ) -> None:
        self.job, self.model, self.profile, self.rank = job, model, profile, rank
        self.layout = layout
        cut, shard = (layout.tp, layout.zero_stage, layout.num_shards), rank // layout.tp
        self.trained = build_role_rank(job, layout.role, model, cut, shard, training=job.training)
        if job.rollout.shares_base and layout.role is Role.POLICY:
            # The trainer holds the engine's layout of the base, with its padding, and other roles' adapters on it.
            e = job.training.dtype.num_bytes
            adapter_bytes = e * sum(tensor.numel for tensor in job.frozen_adapter_parameters(model))
            base = shared_base_bytes(model, e) + adapter_bytes
            self.trained = replace(self.trained, states=replace(self.trained.states, frozen_bytes=base))
        self.states = self.trained.states
        accumulates = self._share * job.workload.max_seq_len > job.max_tokens_per_micro_batch
        self.rank_state = replace(build_zero_state(self.states, CPU, reduces_in_step=True), accumulates=accumulates)

    def predict_resident(self, action: Action, run_phase: RunPhase) -> dict[MemoryKind, int]:
        """Bytes after the action."""
        sizes = self._sum_states(action, run_phase)
        if action.kind is ActionKind.OFFLOAD_ROLE:
            sizes = {kind: size for kind, size in sizes.items() if kind not in OFFLOADED_KINDS}
        if action.kind is ActionKind.TRAIN_FORWARD_BACKWARD:
            sizes[MemoryKind.GRADIENTS] = self._accumulated
            # From the second micro-batch on, ZeRO-3 keeps small tensors gathered.
            sizes[MemoryKind.WEIGHTS] = max(
                sizes[MemoryKind.WEIGHTS], self.states.weight_bytes(has_stepped=self.rank_state.accumulates)
            )
        if not (run_phase == "start" and action.kind is ActionKind.START_TRAINER):
            sizes[MemoryKind.SYNC_STAGING] = self._staging
        if self.stages_states:
            sizes[MemoryKind.CHECKPOINT_STAGING] = saved_bytes(self.states)
        return sizes

    def predict_peak(self, action: Action, run_phase: RunPhase) -> dict[MemoryKind, int]:
        """Bytes at the process's peak inside the action."""
        sizes = self.predict_resident(action, run_phase)
        if action.kind is ActionKind.START_TRAINER:
            sizes[MemoryKind.COMM_BUFFERS] = self._loading_bytes(sizes)
        elif action.kind is ActionKind.TRAIN_FORWARD_BACKWARD:
            sizes[MemoryKind.GRADIENTS] = self._sum_states(action, run_phase).get(MemoryKind.GRADIENTS, 0)
            is_first = not self._has_stepped(action, run_phase)
            sizes = find_passes_peak(take_snapshots(self.rank_state, self.shape, resident=sizes, is_first=is_first))
        elif action.kind is ActionKind.SCORE:
            sizes[MemoryKind.LOGITS] = pass_bytes(self.job, self.shape, self.layout.dp, self.job.training.ulysses)
        elif action.kind in (ActionKind.CHECKPOINT, ActionKind.SAVE_WEIGHTS) and self.rank == 0:
            # Every tensor is copied out of the flat buffer before it is written.
            sizes[MemoryKind.WEIGHTS] += self.trained.element_bytes * self.model.num_parameters
        elif action.kind is ActionKind.OFFLOAD_ROLE:
            sizes |= self._sum_states(action, run_phase)
        elif action.kind is ActionKind.OPTIMIZER_STEP:
            sizes = self._update_peak(sizes, is_first=run_phase == "first" and not action.mini_batch)
        if action.kind in HANDS_WEIGHTS_ON and not self.rank and self._merges(action):
            sizes[MemoryKind.WEIGHTS] += merging_bytes(self.trained)
        if action.kind in HANDS_WEIGHTS_ON and self.layout.tp > 1:
            sizes = add(sizes, {MemoryKind.COMM_BUFFERS: gathered_weight_bytes(self.trained)})
        set_slack(sizes, self.profile.process_slack.policy_trainer, self._compiled_bytes)
        return sizes

    @property
    def _accumulated(self) -> int:
        """Bytes of gradients between backward and step."""
        if self.states.settings.offloads_optimizer:
            states = self.states.after_backward()
            return states.device.get(MemoryKind.GRADIENTS, 0) + states.host.get(MemoryKind.GRADIENTS, 0)
        return self.states.backward_gradient_bytes()

    @property
    def _has_late_moments(self) -> bool:
        """Whether Adam's moments appear in the first step. Some DeepSpeed optimizers step once while they are built."""
        return MemoryKind.OPTIMIZER not in self.states.after_build().device

    @property
    def _share(self) -> int:
        """Rollouts that the rank trains on per mini-batch."""
        return self.job.count_trained(self.layout.dp)

    @cached_property
    def shape(self) -> MicroBatchShape:
        """The rank's largest micro-batch. Under Ulysses it is the rank's part, whose tokens may all be of responses."""
        job, workload, training = self.job, self.job.workload, self.job.training
        pass_tokens = min(self._share * workload.max_seq_len, job.max_tokens_per_micro_batch)
        num_tokens = ceil_div(pass_tokens, training.ulysses)
        adapters, e = self.trained.adapters, self.trained.element_bytes
        return replace(
            build_cpu_shape(self.model, e, self.layout.tp),
            num_tokens=num_tokens,
            num_head_tokens=min(self._share * workload.max_response_len, num_tokens),
            recompute=Recompute.FULL if training.gradient_checkpointing else Recompute.NONE,
            frozen=describe_adapters(adapters, e) if adapters else None,
            ulysses=training.ulysses,
            has_entropy_gradient=bool(job.algorithm.entropy_coef or job.algorithm.teacher_top_k),
            dequantised=self.trained.dequantised,
        )

    @property
    def _compiled_bytes(self) -> int:
        """Bytes of matmuls that oneDNN compiled, which stay in the process."""
        return COMPILED_MATMUL_BYTES if self.trained.element_bytes < FLOAT_BYTES else 0

    def _update_peak(self, resident: Mapping[MemoryKind, int], *, is_first: bool) -> dict[MemoryKind, int]:
        """The largest moment of the optimizer's step. In the first step Adam's moments appear after the reduction."""
        by_place = take_snapshots(self.rank_state, self.shape, resident=resident)
        late = MemoryKind.OPTIMIZER if is_first and self._has_late_moments else None
        before = {kind: size for kind, size in by_place.get(Place.REDUCE, {}).items() if kind is not late}
        return find_largest((before, by_place[Place.STEP]))

    def _loading_bytes(self, resident: Mapping[MemoryKind, int]) -> int:
        """Bytes beside the states while the DeepSpeed engine is built: the larger of loading and building.

        Loading: the fp32 pages of the start checkpoint are mapped while they are copied, cast or quantized to 4 bits.
        Building: stages 1 and 2 flatten the loaded parameters before the master weights exist, and then hold an empty
        fp32 gradient of the partition. Stage 3 cuts the parameters and joins the parts in one buffer. Stage 0 in 16
        bits takes an empty optimizer step with fp32 gradients and a 16-bit copy.
        """
        states, e = self.states, self.trained.element_bytes
        settled = sum(resident.get(kind, 0) for kind in STATE_KINDS)
        loaded = e * states.num_trainable
        numel_in_file = sum(parameter.numel for parameter in self.model.parameters)
        copied = e * numel_in_file
        if self.trained.dequantised and e == FLOAT_BYTES:  # quantized straight from the file's pages, without a copy
            copied = resident[MemoryKind.WEIGHTS]
        loading = copied + FLOAT_BYTES * numel_in_file - settled
        building = {
            0: loaded + FLOAT_BYTES * states.num_trainable if e < FLOAT_BYTES else 0,
            3: max(loaded - states.master_bytes(), e * states.partition_numel),
        }.get(states.settings.stage, max(loaded - states.master_bytes(), FLOAT_BYTES * states.partition_numel))
        return max(0, loading, building)

    def _sum_states(self, action: Action, run_phase: RunPhase) -> dict[MemoryKind, int]:
        """The states between passes, with libraries and slack. On a CPU the device's memory is the host's."""
        states = self.states.after_step() if self._has_stepped(action, run_phase) else self.states.after_build()
        sizes = add(states.device, states.host)
        if self.states.settings.stage == 3:
            sizes[MemoryKind.COMM_BUFFERS] = 0 if run_phase == "start" else self.rank_state.kept_bucket
        return sizes | {
            MemoryKind.PROCESS: self._imports,
            MemoryKind.FRAGMENTATION: self.profile.process_slack.policy_trainer.value + self._compiled_bytes,
        }

    def _merges(self, action: Action) -> bool:
        """Whether the action merges adapters into weights. A weight sync of adapters alone does not."""
        is_sync = action.kind is ActionKind.SYNC_WEIGHTS
        return bool(self.trained.adapters) and not (is_sync and self.job.placement.sync_content == "adapter")

    @property
    def _imports(self) -> int:
        """Bytes of the libraries, with PEFT where adapters are trained."""
        overheads = self.profile.process_overheads
        # PEFT imports bitsandbytes, so an 8-bit optimizer takes as much as adapters.
        has_peft = bool(self.trained.adapters) or self.job.training.optimizer != "adamw"
        return overheads.policy_trainer.value + (overheads.adapters.value if has_peft and overheads.adapters else 0)

    def _has_stepped(self, action: Action, run_phase: RunPhase) -> bool:
        """Whether an optimizer step precedes the end of the action, so that Adam's moments exist."""
        if run_phase == "start":
            return False
        if run_phase != "first":
            return True
        return action.kind in AFTER_A_STEP or bool(action.mini_batch)

    @cached_property
    def _staging(self) -> int:
        """Bytes for sending weights: on the first rank, or on every rank where each sends to its own engine."""
        sends = not self.rank or self.job.placement.sync_senders == "each"
        return sync_staging_bytes(self.job, self.model) if sends and self.has_arena else 0


class ValueForecast(TrainerForecast):
    """A trainer rank that sends no weights: of a value model, or of a policy without an engine."""

    def predict_resident(self, action: Action, run_phase: RunPhase) -> dict[MemoryKind, int]:
        """Bytes after the action, without weight sync staging."""
        sizes = super().predict_resident(action, run_phase)
        sizes.pop(MemoryKind.SYNC_STAGING, None)
        return sizes
