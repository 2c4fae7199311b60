"""What a trained role holds on its GPU and on its host, action by action, under any of the trainers.

In: a model, how it is trained and by whom, a choice, tokens of a micro-batch, ranks. Out: bytes by kind.
Left out: ranks that differ but by their pipeline stage (the fullest stands for all); what a rank holds (rank.py).
"""

from collections.abc import Callable

from rlplan.dataflow.schedule import Action
from rlplan.memory.ledger import Moment
from rlplan.memory.roles.gpu.exported import fsdp_parts, fsdp_settings, megatron_parts, megatron_settings
from rlplan.memory.roles.gpu.process import Bytes
from rlplan.memory.roles.gpu.rank import CAPPED, Passes, RankOnGpu, Stage, Trained, stages_of
from rlplan.memory.roles.gpu.states import FixedParts, fixed_parts, zero_settings
from rlplan.memory.trainers.step_peak import Held, Work

__all__ = ["CAPPED", "Passes", "TrainerOnGpu", "parts_of"]


class TrainerOnGpu:
    """One rank of a trained role; of a pipeline, at each action that of the fullest stage.

    See `predict_cpu.Forecast`; `on_host` says what lies in the host's memory meanwhile.
    """

    def __init__(self, trained: Trained) -> None:
        stages = stages_of(trained.model.num_layers, trained.choice.pp, trained.passes.num_micro_batches)
        self.trained = trained
        self.ranks = tuple(RankOnGpu(trained, stage, parts_of(trained, stage)) for stage in stages)

    def resident(self, action: Action, moment: Moment) -> Bytes:
        """Held on the GPU when the action has ended."""
        return self._fullest(lambda rank: rank.resident(action, moment))

    def peak(self, action: Action, moment: Moment) -> Bytes:
        """Held on the GPU at the peak inside the action."""
        return self._fullest(lambda rank: rank.peak(action, moment))

    def on_host(self, action: Action, moment: Moment) -> Bytes:
        """Held in the host's memory for a rank: what is offloaded, and everything while the role is parked."""
        return self._fullest(lambda rank: rank.on_host(action, moment))

    @property
    def fixed(self) -> FixedParts:
        """What the first stage holds whatever the tokens."""
        return self.ranks[0].fixed

    @property
    def work(self) -> Work:
        """What the first stage computes in one micro-batch."""
        return self.ranks[0].work

    @property
    def held(self) -> Held:
        """What the first stage holds whatever the tokens, as the passes see it."""
        return self.ranks[0].held

    @property
    def moments(self) -> dict[str, Bytes]:
        """Bytes at the moments of a step of the first stage."""
        return self.ranks[0].moments

    @property
    def staging(self) -> int:
        """Bytes of the bucket through which weights pass to the engine."""
        return self.ranks[0].staging

    def _fullest(self, held: Callable[[RankOnGpu], Bytes]) -> Bytes:
        if len(self.ranks) == 1:
            return held(self.ranks[0])
        return max(map(held, self.ranks), key=lambda sizes: sum(sizes.values()))


def parts_of(trained: Trained, stage: Stage) -> FixedParts:
    """What a rank of a stage holds whatever the tokens, by who trains it. Raises: SpecError."""
    model, role, training, choice = trained.model, trained.role, trained.training, trained.choice
    if trained.target == "megatron":
        megatron = megatron_settings(training, choice, trained.num_ranks)
        return megatron_parts(model, role, trained.lora, megatron, stage.index)
    if trained.target == "fsdp2":
        return fsdp_parts(model, role, trained.lora, fsdp_settings(training, choice, trained.num_ranks))
    return fixed_parts(model, role, trained.lora, zero_settings(training, choice, trained.num_ranks), choice.tp)
