"""What a value trainer rank holds, action by action: a policy trainer rank without a vocabulary, and it scores too.

In: a job, the value model and the rank. Out: bytes by kind.
"""

from rlplan.dataflow.schedule import Action
from rlplan.memory.activations import forward_working_bytes
from rlplan.memory.forecast_trainer import TrainerForecast
from rlplan.memory.ledger import Moment
from rlplan.memory.logits import largest_micro_batch
from rlplan.memory.overheads import slack_bytes
from rlplan.units import ceil_div
from rlplan.vocabulary import ActionKind, MemoryKind


class ValueForecast(TrainerForecast):
    """One data-parallel rank. See `memory.predict.Forecast`."""

    def resident(self, action: Action, moment: Moment) -> dict[MemoryKind, int]:
        """Held when the action has ended: nothing of a weight sync."""
        held = super().resident(action, moment)
        held.pop(MemoryKind.SYNC_STAGING, None)
        return held

    def peak(self, action: Action, moment: Moment) -> dict[MemoryKind, int]:
        """Held at the moment of the process's peak inside the action."""
        if action.kind is not ActionKind.SCORE:
            return super().peak(action, moment)
        held = self.resident(action, moment)
        workload = self.job.workload
        share = ceil_div(workload.num_rollouts_per_step, self.num_ranks)
        num_tokens = largest_micro_batch(share * workload.max_seq_len, self.job.max_tokens_per_micro_batch)
        held[MemoryKind.ACTIVATIONS] = forward_working_bytes(self.model, num_tokens)
        tensors = sum(held.values()) - held[MemoryKind.PROCESS] - held[MemoryKind.FRAGMENTATION]
        held[MemoryKind.FRAGMENTATION] = slack_bytes(self.profile.process_slack.policy_trainer, tensors)
        return held
