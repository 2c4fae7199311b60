"""Memory of a rank of a frozen role (reference, reward model), action by action, on a CPU host or on a GPU.

Under DeepSpeed each rank has the whole model, or ZeRO-3 shards that are gathered layer by layer. Under FSDP2 weights
are shards too. Under Megatron they are cut like the policy's, and the fullest stage represents all.

In: a model, the ranks that share it, tokens of a pass. Out: bytes by kind.
Left out: tensor parallelism under DeepSpeed on GPUs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Literal

from rlplan.dataflow.choice import TrainerChoice
from rlplan.dataflow.schedule import Action
from rlplan.frameworks.profile import ScoredWords
from rlplan.memory.ledger import RunPhase
from rlplan.memory.machine.overheads import set_slack
from rlplan.memory.model.block import FLOAT_BYTES
from rlplan.memory.model.block_families import cut_layers
from rlplan.memory.model.layer_cut import LayerCut
from rlplan.memory.model.logits import rows_on_cpu
from rlplan.memory.predict import Forecast
from rlplan.memory.roles.process import Bytes, add, pin_sizes, process_overheads
from rlplan.memory.roles.rank import MicroBatchTokens, PipelineStage, TrainedRole, list_stages
from rlplan.memory.roles.states import replace_head
from rlplan.memory.trainers.micro_batch import score_peak_bytes
from rlplan.memory.trainers.shape import MicroBatchShape
from rlplan.memory.trainers.training import build_frozen_states
from rlplan.memory.trainers.zero import ZeroSettings, ZeroStates
from rlplan.spec.hardware.profile import GpuOverheads, HardwareProfile
from rlplan.spec.model import ModelSpec
from rlplan.spec.resolved import ResolvedJob, SettledTraining
from rlplan.units import ceil_div
from rlplan.vocabulary import ActionKind, Backend, Dtype, Loss, MemoryKind, Role


def pass_bytes(job: ResolvedJob, shape: MicroBatchShape, num_processes: int, ulysses: int = 1) -> int:
    """Bytes that a forward pass over the largest micro-batch of a process's rollouts adds.

    shape: the process's model. num_processes: processes that run passes of their own. ulysses: ranks that share each
    pass.
    """
    share = ceil_div(job.workload.num_rollouts_per_step, num_processes) * job.workload.max_seq_len
    num_tokens = ceil_div(min(share, job.max_tokens_per_micro_batch), ulysses)
    return score_peak_bytes(replace(shape, num_tokens=num_tokens, num_head_tokens=num_tokens))


def build_whole_shape(model: ModelSpec, head_width: int, tp: int = 1) -> MicroBatchShape:
    """The shape of a pass over a whole model, without tokens. tp: tensor parallel size."""
    first, *more = cut_layers(model, None, LayerCut(tp, tp))
    return MicroBatchShape(first.block, first.num, head_width, 0, 0, more=tuple(more))


def build_cpu_shape(model: ModelSpec, element_bytes: int, tp: int = 1) -> MicroBatchShape:
    """The shape of a pass that rlplan's runtime runs on a CPU host, without tokens."""
    return replace(
        build_whole_shape(model, model.head_width, tp),
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
        """shares: whether the processes shard the weights (ZeRO-3); otherwise each has all of them."""
        self.job, self.model, self.profile, self.num_processes = job, model, profile, num_processes
        self.states = build_frozen_states(job.training, model, num_processes) if shares else None

    def predict_resident(self, action: Action, run_phase: RunPhase) -> dict[MemoryKind, int]:
        """Bytes after the action. An offloaded scorer holds no weights."""
        imports = self.profile.process_overheads
        # Scorers that are spread over devices import DeepSpeed, as trainers do.
        libraries = imports.policy_trainer if self.job.placement.spreads_scoring else imports.scorer
        sizes = {
            MemoryKind.PROCESS: libraries.value,
            MemoryKind.FRAGMENTATION: self.profile.process_slack.scorer.value,
        }
        if action.kind is not ActionKind.OFFLOAD_ROLE:
            sizes[MemoryKind.WEIGHTS] = self._weight_bytes
        return sizes

    @property
    def _weight_bytes(self) -> int:
        if self.states is not None:
            return self.states.weight_bytes()
        return self.job.training.dtype.num_bytes * self.model.num_parameters

    @property
    def _largest_numel(self) -> int:
        return max(tensor.numel for tensor in self.model.parameters)

    def predict_peak(self, action: Action, run_phase: RunPhase) -> dict[MemoryKind, int]:
        """Bytes at the process's peak inside the action."""
        sizes = self.predict_resident(action, run_phase) | {MemoryKind.WEIGHTS: self._weight_bytes}
        if action.kind is ActionKind.SCORE:
            shape = build_cpu_shape(self.model, self.job.training.dtype.num_bytes)
            sizes[MemoryKind.LOGITS] = pass_bytes(self.job, shape, self.num_processes)
            if self.states is not None:
                sizes[MemoryKind.COMM_BUFFERS] = self.states.gathered_bytes(self._largest_numel)
        elif action.kind is ActionKind.START_SCORER and self.states is not None:
            # Tensors are loaded one by one: as read from the file (at most fp32), and whole before they are sharded.
            sizes[MemoryKind.COMM_BUFFERS] = (self.job.training.dtype.num_bytes + FLOAT_BYTES) * self._largest_numel
        set_slack(sizes, self.profile.process_slack.scorer)
        return sizes


@lru_cache(maxsize=256)
def measure_frozen_states(model: ModelSpec, settings: ZeroSettings, *, has_head: bool) -> tuple[int, int]:
    """(bytes of the rank's weights, bytes of weights gathered at a time) of a frozen model."""
    parameters = replace_head(model.parameters, Role.REFERENCE if has_head else Role.REWARD, model.hidden_size)
    states = ZeroStates(settings, (), frozen=parameters)
    return states.weight_bytes(), states.gathered_bytes(model.num_parameters // model.num_layers)


@dataclass(frozen=True)
class FrozenShare:
    """Memory of one rank of a frozen role."""

    weights: int
    """Bytes of the rank's weights."""
    gathered: int
    """Bytes of weights that a pass gathers at a time."""
    shape: Callable[[], MicroBatchShape]
    """Builds the rank's micro-batch shape, which is needed only for a pass."""

    @cached_property
    def pass_bytes(self) -> int:
        """Activations and logits of one pass without gradients."""
        return score_peak_bytes(self.shape())


@dataclass(frozen=True)
class FrozenRole:
    """A frozen role: everything that its ranks have in common."""

    role: Role
    model: ModelSpec
    element_bytes: int
    loss: Loss
    micro_batch: MicroBatchTokens
    num_ranks: int
    overheads: GpuOverheads
    is_sharded: bool
    """Whether the weights are sharded over all ranks."""
    backend: Backend = "deepspeed"
    cut: TrainerChoice | None = None
    """The policy's parallel sizes, which a frozen role shares under FSDP2 and Megatron."""
    kept_bytes: int = 0
    """Bytes of a stored weight; 0: those of a weight in the passes."""
    scored_words: ScoredWords | None = None
    """Vocabulary-wide tensors that a forward-only pass holds; None: those of the loss without gradient."""


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

    def predict_resident(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Bytes on the GPU after the action."""
        sizes = self._overheads()
        if action.kind is not ActionKind.OFFLOAD_ROLE:
            sizes[MemoryKind.WEIGHTS] = self.weights
        return sizes

    def predict_peak(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Bytes on the GPU at the peak inside the action."""
        sizes = self._overheads() | {MemoryKind.WEIGHTS: self.weights}
        if action.kind is not ActionKind.SCORE:
            return sizes
        fullest = max(self.shares, key=lambda share: share.weights + share.gathered + share.pass_bytes)
        sizes[MemoryKind.WEIGHTS] = fullest.weights
        return add(sizes, {MemoryKind.COMM_BUFFERS: fullest.gathered, MemoryKind.LOGITS: fullest.pass_bytes})

    def predict_host(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Bytes in the host's memory: the weights while they are loaded, and while the role is offloaded."""
        if action.kind is ActionKind.START_SCORER:
            return {MemoryKind.SYNC_STAGING: self.weights if self.num_ranks == 1 else self.largest_layer}
        offloaded = action.kind is ActionKind.OFFLOAD_ROLE
        return pin_sizes({MemoryKind.WEIGHTS: self.weights}) if offloaded else {}

    @cached_property
    def weights(self) -> int:
        """Bytes of the weights on the fullest rank."""
        return max(share.weights for share in self.shares)

    @cached_property
    def shares(self) -> tuple[FrozenShare, ...]:
        """One rank of each pipeline stage that may be the fullest."""
        if self.backend == "deepspeed" or self.cut is None:
            settings = ZeroSettings(
                stage=3 if self.num_ranks > 1 else 0, num_ranks=self.num_ranks, weight_bytes=self.kept_bytes
            )
            return (
                FrozenShare(*measure_frozen_states(self.model, settings, has_head=self.has_head), self._whole_shape),
            )
        trained = self._build_trained_role(self.cut)
        return tuple(self._build_share(trained, stage) for stage in list_stages(self.model, self.cut.pp, 1, self.role))

    def _build_share(self, trained: TrainedRole, stage: PipelineStage) -> FrozenShare:
        """A rank under FSDP2 (shards in the passes' type) or Megatron, counted by `exported`."""
        fixed = trained.find_fixed_states(stage)
        weights = fixed.rank_state.resident[MemoryKind.WEIGHTS]
        return FrozenShare(weights, fixed.gathered, partial(trained.build_shape, stage, fixed))

    def _build_trained_role(self, cut: TrainerChoice) -> TrainedRole:
        """The role as a trained one in its own type, whose weights and passes equal the frozen one's."""
        logits = "plain" if self.loss is Loss.NONE else self.loss.value  # ignored where there is no vocabulary
        dtype, stored_dtype = _find_dtype(self.element_bytes), _find_dtype(self.kept_bytes)
        training = SettledTraining.model_validate({"dtype": dtype, "master_dtype": stored_dtype, "logits": logits})
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
            build_whole_shape(self.model, self.model.vocab_size if self.has_head else 1),
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


def _find_dtype(num_bytes: int) -> Literal[Dtype.FLOAT32, Dtype.BFLOAT16]:
    return Dtype.FLOAT32 if num_bytes == Dtype.FLOAT32.num_bytes else Dtype.BFLOAT16
