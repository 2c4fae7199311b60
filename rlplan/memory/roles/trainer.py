"""Memory of a trained role on its GPUs and its host, action by action, under any trainer, and its copies on the host:
states staged for checkpoints, and the weights that were sent last.

A delta weight sync compares the weights with those sent last, from the first sync on. rlplan's own runtime keeps a copy
of the whole policy on the sending rank, and one on every rank of every engine. Source: `rlplan.runtime.weight_sync`.
Each rank of verl pins a copy of its own shard, and verl's engines write deltas directly into their weights. Source:
verl docs/advance/delta_weight_sync.md (FSDP; assumed for Megatron's ranks).

In: a trained role, the bytes of its copies. Out: bytes by kind. Left out: memory of one rank (rank.py); ranks of a
stage that differ; host buffers that hold one tensor at a time.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache

from rlplan.dataflow.schedule import Action
from rlplan.memory.ledger import RunPhase
from rlplan.memory.machine.host import pinned_bytes
from rlplan.memory.predict import Forecast
from rlplan.memory.roles.engine import EngineOnGpu
from rlplan.memory.roles.exported import build_fsdp_settings
from rlplan.memory.roles.process import Bytes, add
from rlplan.memory.roles.rank import RankOnGpu, TrainedRole, list_stages
from rlplan.memory.weight_sync.packets import plan_packets, shadow_bytes
from rlplan.spec.model import ModelSpec
from rlplan.spec.resolved import SettledJob
from rlplan.units import ceil_div
from rlplan.vocabulary import ActionKind, MemoryKind, Role


class TrainerOnGpu(Forecast):
    """One rank of a trained role: in a pipeline, the rank of the stage that is the fullest at each action."""

    def __init__(self, trained: TrainedRole) -> None:
        stages = list_stages(
            trained.model,
            trained.choice.pp,
            trained.micro_batch.num_micro_batches,
            trained.role,
            virtual_stages=trained.training.virtual_stages,
        )
        self.trained = trained
        self.ranks = tuple(RankOnGpu(trained, stage, trained.find_fixed_states(stage)) for stage in stages)

    def predict_resident(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Bytes on the GPU after the action."""
        return self._find_fullest(lambda rank: rank.predict_resident(action, run_phase))

    def predict_peak(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Bytes on the GPU at the peak inside the action."""
        return self._find_fullest(lambda rank: rank.predict_peak(action, run_phase))

    def predict_host(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Bytes of one rank in the host's memory: offloaded states, and all states while the role is offloaded."""
        return self._find_fullest(lambda rank: rank.predict_host(action, run_phase))

    @property
    def moved_bytes(self) -> int:
        """Bytes of the first stage that move to the host and back when the role is offloaded."""
        return sum(self.ranks[0].moved.values())

    def _find_fullest(self, predict: Callable[[RankOnGpu], Bytes]) -> Bytes:
        if len(self.ranks) == 1:  # a search asks millions of times
            return predict(self.ranks[0])
        return max(map(predict, self.ranks), key=lambda sizes: sum(sizes.values()))


_BEFORE = (ActionKind.START_TRAINER, ActionKind.START_ENGINE)
"""Actions before the first weight sync."""


class _WithCopy(Forecast):
    """A rank with an additional copy in its host's memory, and unchanged GPU memory."""

    rank: Forecast

    def predict_resident(self, action: Action, run_phase: RunPhase) -> Mapping[MemoryKind, int]:
        """The rank's own forecast."""
        return self.rank.predict_resident(action, run_phase)

    def predict_peak(self, action: Action, run_phase: RunPhase) -> Mapping[MemoryKind, int]:
        """The rank's own forecast."""
        return self.rank.predict_peak(action, run_phase)


class StagedOnHost(_WithCopy):
    """A rank with the pinned copy of its states from which checkpoints are written, allocated for the whole run."""

    def __init__(self, rank: Forecast, saved_bytes: int) -> None:
        self.rank, self.staging = rank, pinned_bytes(saved_bytes)

    def predict_host(self, action: Action, run_phase: RunPhase) -> Bytes:
        """The rank's own host memory, and the copy."""
        return add(self.rank.predict_host(action, run_phase), {MemoryKind.CHECKPOINT_STAGING: self.staging})


class KeepsSentWeights(_WithCopy):
    """A rank with a copy of the weights sent last. is_first: only the first of several equal ranks has the copy."""

    def __init__(self, rank: Forecast, num_bytes: int, *, is_first: bool = False) -> None:
        self.rank, self.num_bytes, self.is_first = rank, num_bytes, is_first

    def predict_host(self, action: Action, run_phase: RunPhase) -> Bytes:
        """The rank's own host memory, and the copy where every rank has one."""
        on_rank = self.rank.predict_host(action, run_phase)
        return dict(on_rank) if self.is_first else add(on_rank, self._copy(action))

    def predict_first_host(self, action: Action, run_phase: RunPhase) -> Bytes:
        """The copy where only the first rank has one."""
        return self._copy(action) if self.is_first else {}

    def _copy(self, action: Action) -> Bytes:
        return {} if action.kind in _BEFORE else {MemoryKind.SYNC_STAGING: self.num_bytes}


def add_sent_weights(rank: Forecast, job: SettledJob) -> Forecast:
    """Add the copy that a delta weight sync needs to a rank of the policy's trainer or an engine, if it keeps one."""
    # A rank may already be wrapped with its checkpoint copy; the kind of copy depends on the rank inside.
    trainer = rank.rank if isinstance(rank, StagedOnHost) else rank
    element_bytes, is_own = job.rollout.dtype.num_bytes, job.is_for_rlplan
    if isinstance(trainer, EngineOnGpu) and is_own:
        return KeepsSentWeights(rank, sent_weights_bytes(trainer.model, element_bytes, job.placement.sync_bucket))
    if not isinstance(trainer, TrainerOnGpu) or trainer.trained.role is not Role.POLICY:
        return rank
    if not is_own:
        return KeepsSentWeights(rank, sent_shard_bytes(trainer, element_bytes))
    size = sent_weights_bytes(trainer.trained.model, element_bytes, job.placement.sync_bucket)
    return KeepsSentWeights(rank, size, is_first=True)


@lru_cache(maxsize=64)
def sent_weights_bytes(model: ModelSpec, element_bytes: int, bucket_bytes: int) -> int:
    """Bytes of rlplan's own copy in the engine's element type, and of the packet that is encoded or decoded beside it.

    Counts: P, each tensor on a cache line, and the largest packet, because deltas are encoded on the host and travel
    from GPU to GPU. Source: `rlplan.runtime.weight_sync.contents.delta`.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> model = find_model("meta-llama/Llama-3.1-8B")  # 2 x 8,030,261,248; a table of 128,256 x 4,096 goes by itself
    >>> sent_weights_bytes(model, 2, 1 << 29) - 2 * model.num_parameters == 2 * 128_256 * 4_096
    True
    """
    packets = plan_packets(model.parameters, element_bytes, bucket_bytes)
    return shadow_bytes(packets) + max(packet.bucket.num_bytes for packet in packets)


def sent_shard_bytes(trainer: TrainerOnGpu, element_bytes: int) -> int:
    """Bytes of the copy that a verl rank keeps of its own part of the weights.

    Counts: under FSDP2 a rank's part of each tensor, pinned; under Megatron all weights of the fullest rank.
    Source: verl docs/advance/delta_weight_sync.md. Assumes: Megatron's ranks do the same, as verl has announced.
    """
    trained, training = trainer.trained, trainer.trained.training
    if trained.backend == "fsdp2":
        fsdp = build_fsdp_settings(training, trained.choice, trained.num_ranks)
        ranks = fsdp.num_ranks * fsdp.tp_size
        return sum(pinned_bytes(element_bytes * ceil_div(tensor.numel, ranks)) for tensor in trained.model.parameters)
    return max(rank.fixed.share_bytes for rank in trainer.ranks) // training.dtype.num_bytes * element_bytes
