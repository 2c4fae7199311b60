"""Copies that a rank on a GPU keeps on its host: states for checkpoints, and the weights as they were last sent.

In: a rank's forecast and the bytes of its copy. Out: the same forecast with the copy on the host.
Left out: what passes through the GPU (rank.py, engine.py), or through the host one tensor at a time.

Changes of weights (delta content) are found beside what was last sent, from the first weight sync on. rlplan's own
runtime keeps a copy of the whole policy on the rank that sends, and one on every rank of every engine.
Source: `rlplan.runtime.weight_sync`. verl's ranks pin a copy of their own shard each, and its engines write what comes
into their weights. Source: verl docs/advance/delta_weight_sync.md (FSDP; of Megatron's ranks assumed).
"""

from collections.abc import Mapping
from functools import lru_cache

from rlplan.dataflow.schedule import Action
from rlplan.memory.ledger import RunPhase
from rlplan.memory.machine.host import pinned_bytes
from rlplan.memory.predict import Forecast
from rlplan.memory.roles.engine import EngineOnGpu
from rlplan.memory.roles.exported import fsdp_settings
from rlplan.memory.roles.process import Bytes, add
from rlplan.memory.roles.trainer import TrainerOnGpu
from rlplan.memory.weight_sync.packets import plan_packets, shadow_bytes
from rlplan.spec.model import ModelSpec
from rlplan.spec.resolved import SettledJob
from rlplan.units import ceil_div
from rlplan.vocabulary import ActionKind, MemoryKind, Role

_BEFORE = (ActionKind.START_TRAINER, ActionKind.START_ENGINE)
"""Nothing was sent yet."""


class _WithCopy(Forecast):
    """A rank that keeps a copy in its host's memory, and on its GPU what it would hold without."""

    rank: Forecast

    def resident(self, action: Action, run_phase: RunPhase) -> Mapping[MemoryKind, int]:
        """The rank's own."""
        return self.rank.resident(action, run_phase)

    def peak(self, action: Action, run_phase: RunPhase) -> Mapping[MemoryKind, int]:
        """The rank's own."""
        return self.rank.peak(action, run_phase)


class StagedOnHost(_WithCopy):
    """A rank with the pinned copy of its states from which checkpoints are written, which is there all the time."""

    def __init__(self, rank: Forecast, saved_bytes: int) -> None:
        self.rank, self.staging = rank, pinned_bytes(saved_bytes)

    def on_host(self, action: Action, run_phase: RunPhase) -> Bytes:
        """The rank's own and the copy."""
        return add(self.rank.on_host(action, run_phase), {MemoryKind.CHECKPOINT_STAGING: self.staging})


class KeepsSentWeights(_WithCopy):
    """A rank with the weights as they were last sent. is_first: of ranks that are alike, one alone has the copy."""

    def __init__(self, rank: Forecast, num_bytes: int, *, is_first: bool = False) -> None:
        self.rank, self.num_bytes, self.is_first = rank, num_bytes, is_first

    def on_host(self, action: Action, run_phase: RunPhase) -> Bytes:
        """The rank's own, and the copy where every rank has one."""
        own = self.rank.on_host(action, run_phase)
        return dict(own) if self.is_first else add(own, self._copy(action))

    def on_host_of_first(self, action: Action, run_phase: RunPhase) -> Bytes:
        """The copy where one rank alone has it."""
        return self._copy(action) if self.is_first else {}

    def _copy(self, action: Action) -> Bytes:
        return {} if action.kind in _BEFORE else {MemoryKind.SYNC_STAGING: self.num_bytes}


def keeping_sent_weights(rank: Forecast, job: SettledJob) -> Forecast:
    """A rank of the policy's trainer or of an engine with the copy that it keeps, if any; another rank as it is."""
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
    """Bytes of rlplan's own copy, in the engine's element type, and of the packet that is coded or read beside it.

    Counts: P, each tensor on a cache line, and the largest packet, for changes are coded on the host and travel from
    GPU to GPU. Source: `rlplan.runtime.weight_sync.contents.delta`.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> model = find_model("meta-llama/Llama-3.1-8B")  # 2 x 8,030,261,248; a table of 128,256 x 4,096 goes by itself
    >>> sent_weights_bytes(model, 2, 1 << 29) - 2 * model.num_parameters == 2 * 128_256 * 4_096
    True
    """
    packets = plan_packets(model.parameters, element_bytes, bucket_bytes)
    return shadow_bytes(packets) + max(packet.bucket.num_bytes for packet in packets)


def sent_shard_bytes(trainer: TrainerOnGpu, element_bytes: int) -> int:
    """Bytes of the copy that a rank of another trainer keeps of its own part of the weights.

    Counts: under FSDP2 a rank's part of each tensor, pinned; under Megatron all that the fullest rank holds.
    Source: verl docs/advance/delta_weight_sync.md. Assumes: Megatron's ranks likewise, which verl has announced.
    """
    trained, training = trainer.trained, trainer.trained.training
    if trained.backend == "fsdp2":
        fsdp = fsdp_settings(training, trained.choice, trained.num_ranks)
        ranks = fsdp.num_ranks * fsdp.tp_size
        return sum(pinned_bytes(element_bytes * ceil_div(one.numel, ranks)) for one in trained.model.parameters)
    return max(one.fixed.share_bytes for one in trainer.ranks) // training.dtype.num_bytes * element_bytes
