"""Memory of a trained role on its GPUs and its host, action by action, under any trainer.

In: a trained role. Out: bytes by kind. Left out: memory of one rank (rank.py); ranks of a stage that differ.
"""

from collections.abc import Callable

from rlplan.dataflow.schedule import Action
from rlplan.memory.ledger import RunPhase
from rlplan.memory.predict import Forecast
from rlplan.memory.roles.process import Bytes
from rlplan.memory.roles.rank import RankOnGpu, TrainedRole, list_stages


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
