"""What one rank of a frozen role (reference, reward model) holds, action by action, on a CPU host or on a GPU.

In: a model, how many ranks share it and how, tokens of a pass. Out: bytes by kind.
Left out: tensor parallelism under DeepSpeed on GPUs; there weights are whole, or ZeRO-3 shards, gathered layer by
layer. Under FSDP2 they are shards too; under Megatron they are cut like the policy's, and the fullest stage stands for
all.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Literal

from rlplan.dataflow.choice import TrainerChoice
from rlplan.dataflow.schedule import Action
from rlplan.frameworks.profile import ScoredWords
from rlplan.memory.ledger import RunPhase
from rlplan.memory.machine.overheads import slack_bytes
from rlplan.memory.model.block_families import cut_layers
from rlplan.memory.model.layer_cut import LayerCut
from rlplan.memory.model.logits import FLOAT_BYTES, rows_on_cpu
from rlplan.memory.predict import Forecast
from rlplan.memory.roles.process import Bytes, add, pinned, process_overheads
from rlplan.memory.roles.rank import MicroBatchTokens, PipelineStage, TrainedRole, shape_of, stages_of
from rlplan.memory.roles.states import with_role_head
from rlplan.memory.roles.trainer import parts_of
from rlplan.memory.trainers.micro_batch import score_peak_bytes
from rlplan.memory.trainers.shape import MicroBatchShape
from rlplan.memory.trainers.training import frozen_states
from rlplan.memory.trainers.zero import ZeroSettings, ZeroStates
from rlplan.spec.hardware.profile import GpuOverheads, HardwareProfile
from rlplan.spec.model import ModelSpec
from rlplan.spec.resolved import ResolvedJob, SettledTraining
from rlplan.units import ceil_div
from rlplan.vocabulary import ActionKind, Backend, Dtype, Loss, MemoryKind, Role


def pass_bytes(job: ResolvedJob, shape: MicroBatchShape, num_processes: int, ulysses: int = 1) -> int:
    """Bytes that a forward pass over the largest pack of a process's rollouts adds. shape: of its model.

    num_processes: that have passes of their own. ulysses: ranks that share the tokens of each.
    """
    share = ceil_div(job.workload.num_rollouts_per_step, num_processes) * job.workload.max_seq_len
    num_tokens = ceil_div(min(share, job.max_tokens_per_micro_batch), ulysses)
    return score_peak_bytes(replace(shape, num_tokens=num_tokens, num_head_tokens=num_tokens))


def whole_shape(model: ModelSpec, head_width: int, tp: int = 1) -> MicroBatchShape:
    """What a process computes of a whole model, without tokens. tp: ranks that have a part of each layer."""
    first, *more = cut_layers(model, None, LayerCut(tp, tp))
    return MicroBatchShape(first.block, first.num, head_width, 0, 0, more=tuple(more))


def shape_on_cpu(model: ModelSpec, element_bytes: int, tp: int = 1) -> MicroBatchShape:
    """What the runtime computes of a model on a CPU host, without tokens."""
    return replace(
        whole_shape(model, model.head_width, tp),
        element_bytes=element_bytes,
        loss=Loss.BY_ROWS,
        rows_at_once=rows_on_cpu(element_bytes),
        selects_rows=True,
    )


class ScorerForecast(Forecast):
    """One scorer process of a CPU host. See `predict.Forecast`."""

    def __init__(
        self, job: ResolvedJob, model: ModelSpec, profile: HardwareProfile, num_processes: int, *, shares: bool = False
    ) -> None:
        """shares: whether the processes share the weights (ZeRO-3) instead of having all of them each."""
        self.job, self.model, self.profile, self.num_processes = job, model, profile, num_processes
        self.states = frozen_states(job.training, model, num_processes) if shares else None

    def resident(self, action: Action, run_phase: RunPhase) -> dict[MemoryKind, int]:
        """Held when the action has ended: once it is offloaded, no model."""
        imports = self.profile.process_overheads
        held = {
            # spread over devices, scorers have DeepSpeed too, as a trainer has
            MemoryKind.PROCESS: (
                imports.policy_trainer if self.job.placement.spreads_scoring else imports.scorer
            ).value,
            MemoryKind.FRAGMENTATION: self.profile.process_slack.scorer.value,
        }
        if action.kind is not ActionKind.OFFLOAD_ROLE:
            held[MemoryKind.WEIGHTS] = self._weight_bytes
        return held

    @property
    def _weight_bytes(self) -> int:
        if self.states is not None:
            return self.states.weight_bytes()
        return self.job.training.dtype.num_bytes * self.model.num_parameters

    def peak(self, action: Action, run_phase: RunPhase) -> dict[MemoryKind, int]:
        """Held at the moment of the process's peak inside the action."""
        held = self.resident(action, run_phase) | {MemoryKind.WEIGHTS: self._weight_bytes}
        if action.kind is ActionKind.SCORE:
            shape = shape_on_cpu(self.model, self.job.training.dtype.num_bytes)
            held[MemoryKind.LOGITS] = pass_bytes(self.job, shape, self.num_processes)
            if self.states is not None:
                layer = max(tensor.numel for tensor in self.states.frozen)
                held[MemoryKind.COMM_BUFFERS] = self.states.gathered_bytes(layer)
        elif action.kind is ActionKind.START_SCORER and self.states is not None:
            # one tensor at a time: as it is read, fp32 at most, and whole on its way to the shares
            largest = max(tensor.numel for tensor in self.states.frozen)
            held[MemoryKind.COMM_BUFFERS] = (self.job.training.dtype.num_bytes + FLOAT_BYTES) * largest
        tensors = sum(held.values()) - held[MemoryKind.PROCESS] - held[MemoryKind.FRAGMENTATION]
        held[MemoryKind.FRAGMENTATION] = slack_bytes(self.profile.process_slack.scorer, tensors)
        return held


@lru_cache(maxsize=256)
def frozen_states_of(model: ModelSpec, settings: ZeroSettings, *, has_head: bool) -> tuple[int, int]:
    """(bytes of the rank's weights, of gathered weights at most at a time) of a frozen model."""
    parameters = with_role_head(model.parameters, Role.REFERENCE if has_head else Role.REWARD, model.hidden_size)
    states = ZeroStates(settings, (), frozen=parameters)
    return states.weight_bytes(), states.gathered_bytes(model.num_parameters // model.num_layers)


@dataclass(frozen=True)
class FrozenShare:
    """What one rank of a frozen role holds and does. gathered: weights at most at a time, in a pass. asked: its
    micro-batch shape.
    """

    weights: int
    gathered: int
    asked: Callable[[], MicroBatchShape]

    @cached_property
    def pass_bytes(self) -> int:
        """Activations and logits of one pass without gradients."""
        return score_peak_bytes(self.asked())


@dataclass(frozen=True)
class FrozenRole:
    """A frozen role, as all its ranks have it in common."""

    role: Role
    model: ModelSpec
    element_bytes: int
    loss: Loss
    micro_batch: MicroBatchTokens
    num_ranks: int
    overheads: GpuOverheads
    is_sharded: bool
    """Whether the weights are cut over all ranks."""
    backend: Backend = "deepspeed"
    cut: TrainerChoice | None = None
    """How the policy is cut, which a frozen role follows where another trainer than rlplan's runs it."""
    kept_bytes: int = 0
    """Of a weight as it is kept; 0: as passes have it."""
    scored_words: ScoredWords | None = None
    """What a pass holds of the vocabulary; None where it holds what the loss does without gradient."""


class ScorerOnGpu(Forecast):
    """One rank. See `predict.Forecast`."""

    def __init__(self, frozen: FrozenRole) -> None:
        self.role, self.model, self.overheads = frozen.role, frozen.model, frozen.overheads
        self.num_ranks = frozen.num_ranks if frozen.is_sharded or frozen.backend != "deepspeed" else 1
        self.has_head = frozen.role is Role.REFERENCE
        self.element_bytes, self.loss, self.micro_batch = (
            frozen.element_bytes,
            frozen.loss if self.has_head else Loss.NONE,
            frozen.micro_batch,
        )
        self.backend, self.cut, self.scored_words = frozen.backend, frozen.cut, frozen.scored_words
        self.kept_bytes = frozen.kept_bytes or frozen.element_bytes
        self.largest_layer = self.kept_bytes * (frozen.model.num_parameters // frozen.model.num_layers)

    def resident(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Held on the GPU when the action has ended."""
        held = self._overheads()
        if action.kind is not ActionKind.OFFLOAD_ROLE:
            held[MemoryKind.WEIGHTS] = self.weights
        return held

    def peak(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Held on the GPU at the peak inside the action."""
        held = self._overheads() | {MemoryKind.WEIGHTS: self.weights}
        if action.kind is not ActionKind.SCORE:
            return held
        most = max(self.shares, key=lambda share: share.weights + share.gathered + share.pass_bytes)
        held[MemoryKind.WEIGHTS] = most.weights
        return add(held, {MemoryKind.COMM_BUFFERS: most.gathered, MemoryKind.LOGITS: most.pass_bytes})

    def on_host(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Held in the host's memory: the weights while the role is offloaded, and while they are loaded."""
        if action.kind is ActionKind.START_SCORER:
            return {MemoryKind.SYNC_STAGING: self.weights if self.num_ranks == 1 else self.largest_layer}
        offloaded = action.kind is ActionKind.OFFLOAD_ROLE
        return pinned({MemoryKind.WEIGHTS: self.weights}) if offloaded else {}

    @cached_property
    def weights(self) -> int:
        """Bytes of the weights on the fullest rank."""
        return max(share.weights for share in self.shares)

    @cached_property
    def shares(self) -> tuple[FrozenShare, ...]:
        """What a rank holds: of a pipeline, one of each stage that may be the fullest."""
        if self.backend == "deepspeed" or self.cut is None:
            settings = ZeroSettings(
                stage=3 if self.num_ranks > 1 else 0, num_ranks=self.num_ranks, weight_bytes=self.kept_bytes
            )
            return (FrozenShare(*frozen_states_of(self.model, settings, has_head=self.has_head), self._whole_shape),)
        trained = self._trained(self.cut)
        return tuple(self._exported(trained, stage) for stage in stages_of(self.model, self.cut.pp, 1, self.role))

    def _exported(self, trained: TrainedRole, stage: PipelineStage) -> FrozenShare:
        """The weights of a rank of FSDP2 (shards in the passes' type) or Megatron, as `exported` counts them."""
        parts = parts_of(trained, stage)
        weights = parts.rank_state.resident[MemoryKind.WEIGHTS]
        return FrozenShare(weights, parts.gathered, partial(shape_of, trained, stage, parts))

    def _trained(self, cut: TrainerChoice) -> TrainedRole:
        """The role as if it were trained in its own type: what a frozen one holds is that without states."""
        logits = "plain" if self.loss is Loss.NONE else self.loss.value  # of no use where there is no vocabulary
        dtype, kept = _type_of(self.element_bytes), _type_of(self.kept_bytes)
        training = SettledTraining.model_validate({"dtype": dtype, "master_dtype": kept, "logits": logits})
        stays = replace(cut, offloads_optimizer=False, offloads_parameters=False)
        return TrainedRole(
            self.role,
            self.model,
            training,
            stays,
            self.micro_batch,
            self.num_ranks,
            self.overheads,
            1,
            backend=self.backend,
            scored_words=self.scored_words,
        )

    def _whole_shape(self) -> MicroBatchShape:
        return replace(
            whole_shape(self.model, self.model.vocab_size if self.has_head else 1),
            num_tokens=self.micro_batch.num_tokens,
            num_head_tokens=self.micro_batch.num_head_tokens,
            element_bytes=self.element_bytes,
            loss=self.loss,
            scored_words=self.scored_words,
        )

    def _overheads(self) -> Bytes:
        cut = self.cut if self.backend != "deepspeed" else None
        axes = (cut.tp, cut.pp, cut.cp, cut.ep) if cut is not None else ()
        return process_overheads(self.overheads, self.num_ranks, axes=axes)


def _type_of(num_bytes: int) -> Literal[Dtype.FLOAT32, Dtype.BFLOAT16]:
    return Dtype.FLOAT32 if num_bytes == Dtype.FLOAT32.num_bytes else Dtype.BFLOAT16
