"""What a value trainer rank holds, action by action: a policy trainer rank without a vocabulary, and it scores too.

In: a job, the value model and the rank. Out: bytes by kind.
"""

from rlplan.dataflow.schedule import Action
from rlplan.memory.ledger import RunPhase
from rlplan.memory.roles.cpu.trainer import TrainerForecast
from rlplan.vocabulary import MemoryKind


class ValueForecast(TrainerForecast):
    """One data-parallel rank. See `predict.Forecast`."""

    def resident(self, action: Action, run_phase: RunPhase) -> dict[MemoryKind, int]:
        """Held when the action has ended: nothing of a weight sync."""
        held = super().resident(action, run_phase)
        held.pop(MemoryKind.SYNC_STAGING, None)
        return held
