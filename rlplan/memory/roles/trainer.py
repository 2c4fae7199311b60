"""What a trained role holds on its GPU and on its host, action by action, under any of the trainers.

In: a model, how it is trained and by whom, a choice, tokens of a micro-batch, ranks. Out: bytes by kind.
Left out: ranks that differ but by their pipeline stage (the fullest stands for all); what a rank holds (rank.py).
"""

from collections.abc import Callable

from rlplan.dataflow.schedule import Action
from rlplan.memory.ledger import RunPhase
from rlplan.memory.predict import Forecast
from rlplan.memory.roles.exported import fsdp_parts, fsdp_settings, megatron_parts, megatron_settings
from rlplan.memory.roles.process import Bytes
from rlplan.memory.roles.rank import PipelineStage, RankOnGpu, TrainedRole, stages_of
from rlplan.memory.roles.states import FixedStates, fixed_states, zero_settings


class TrainerOnGpu(Forecast):
    """One rank of a trained role; of a pipeline, at each action that of the fullest stage.

    See `predict.Forecast`; `on_host` says what lies in the host's memory at the same time.
    """

    def __init__(self, trained: TrainedRole) -> None:
        stages = stages_of(
            trained.model,
            trained.choice.pp,
            trained.micro_batch.num_micro_batches,
            trained.role,
            virtual_stages=trained.training.virtual_stages,
        )
        self.trained = trained
        self.ranks = tuple(RankOnGpu(trained, stage, parts_of(trained, stage)) for stage in stages)

    def resident(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Held on the GPU when the action has ended."""
        return self._fullest(lambda rank: rank.resident(action, run_phase))

    def peak(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Held on the GPU at the peak inside the action."""
        return self._fullest(lambda rank: rank.peak(action, run_phase))

    def on_host(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Held in the host's memory for a rank: what is offloaded, and everything while the role is offloaded."""
        return self._fullest(lambda rank: rank.on_host(action, run_phase))

    @property
    def moved_bytes(self) -> int:
        """Bytes that go to the host and come back with the role, of the first stage."""
        return sum(self.ranks[0].moved.values())

    def _fullest(self, held: Callable[[RankOnGpu], Bytes]) -> Bytes:
        if len(self.ranks) == 1:
            return held(self.ranks[0])
        return max(map(held, self.ranks), key=lambda sizes: sum(sizes.values()))


def parts_of(trained: TrainedRole, stage: PipelineStage) -> FixedStates:
    """What a rank of a stage holds whatever the tokens, by who trains it. Raises: SpecError."""
    model, role, training, choice = trained.model, trained.role, trained.training, trained.choice
    if trained.backend == "megatron":
        megatron = megatron_settings(training, choice, trained.num_ranks)
        return megatron_parts(model, role, trained.lora, megatron, stage.index)
    if trained.backend == "fsdp2":
        return fsdp_parts(model, role, trained.lora, fsdp_settings(training, choice, trained.num_ranks))
    settings = zero_settings(training, choice, trained.num_ranks)
    return fixed_states(model, role, trained.lora, settings, choice.tp, trained.frozen_adapters)
