"""What a policy trainer rank holds, action by action.

In: a job, its model and the rank. Out: bytes by kind. The formulas are in training.py, activations.py and backward.py.
"""

from functools import cached_property

from rlplan.dataflow.schedule import Action
from rlplan.memory.backward import MicroBatch, forward_backward_peak
from rlplan.memory.ledger import Moment
from rlplan.memory.logits import largest_micro_batch, num_micro_batches
from rlplan.memory.overheads import slack_bytes
from rlplan.memory.params import parameter_bytes
from rlplan.memory.training import FLOAT_BYTES, ZeroTwo
from rlplan.memory.weight_sync import sync_staging_bytes
from rlplan.spec.hardware import HardwareProfile
from rlplan.spec.job import JobSpec
from rlplan.spec.model import ModelSpec
from rlplan.vocabulary import ActionKind, MemoryKind


class TrainerForecast:
    """One data-parallel rank. See `memory.predict.Forecast`."""

    has_arena: bool = True
    """Whether weights go out through shared memory; otherwise they are written to files."""

    def __init__(self, job: JobSpec, model: ModelSpec, profile: HardwareProfile, num_ranks: int, rank: int) -> None:
        self.job, self.model, self.profile, self.rank = job, model, profile, rank
        self.num_ranks = num_ranks
        self.zero = ZeroTwo(model, num_ranks, rank, job.training.reduce_bucket_size)

    def resident(self, action: Action, moment: Moment) -> dict[MemoryKind, int]:
        """Held when the action has ended."""
        held = self._base(has_optimizer=self._has_optimizer(action, moment))
        if action.kind is ActionKind.TRAIN_FORWARD_BACKWARD:
            held[MemoryKind.GRADIENTS] = self.zero.gradient_bytes()
        if not (moment == "start" and action.kind is ActionKind.START_TRAINER):
            held[MemoryKind.SYNC_STAGING] = self._staging()
        return held

    def loaded(self, action: Action) -> dict[MemoryKind, int]:
        """Nothing is repacked."""
        return {}

    def peak(self, action: Action, moment: Moment) -> dict[MemoryKind, int]:
        """Held at the moment of the process's peak inside the action."""
        held = self.resident(action, moment)
        if action.kind is ActionKind.START_TRAINER:
            # The loaded parameters and DeepSpeed's flat copy of them exist side by side while it flattens.
            held[MemoryKind.COMM_BUFFERS] = max(0, self.zero.weight_bytes() - self.zero.master_bytes())
        elif action.kind is ActionKind.TRAIN_FORWARD_BACKWARD:
            held |= self._passes
        elif action.kind in (ActionKind.CHECKPOINT, ActionKind.SAVE_WEIGHTS) and self.rank == 0:
            # Every tensor is copied out of the flat buffer before it is written.
            held[MemoryKind.WEIGHTS] += parameter_bytes(self.model, FLOAT_BYTES)
        elif action.kind is ActionKind.OPTIMIZER_STEP:
            gradients, extra = self._step_moment(held, is_first=moment == "first" and not action.mini_batch)
            held[MemoryKind.GRADIENTS], held[MemoryKind.COMM_BUFFERS] = gradients, extra
        tensors = sum(held.values()) - held[MemoryKind.PROCESS] - held[MemoryKind.FRAGMENTATION]
        held[MemoryKind.FRAGMENTATION] = slack_bytes(self.profile.process_slack.policy_trainer, tensors)
        return held

    @cached_property
    def _passes(self) -> dict[MemoryKind, int]:
        workload = self.job.workload
        share = workload.mini_batch_size // self.num_ranks
        num_tokens = largest_micro_batch(share * workload.max_seq_len, self.job.max_tokens_per_micro_batch)
        micro = MicroBatch(
            num_tokens=num_tokens,
            num_response_tokens=min(share * workload.max_response_len, num_tokens),
            count=num_micro_batches(share * workload.max_seq_len, self.job.max_tokens_per_micro_batch),
        )
        return forward_backward_peak(self.zero, micro)

    def _step_moment(self, held: dict[MemoryKind, int], *, is_first: bool) -> tuple[int, int]:
        """(gradients, communication buffers) at the largest of three moments of the step.

        Flattening: the gradients and a flat copy of this rank's partition, before Adam's moments first appear.
        Stepping: the flat copy, beside the moments.
        Gathering: gloo gathers all partitions into a buffer of the parameters' size before it copies them out.
        """
        flat = self.zero.partition_numel * FLOAT_BYTES
        late = held.get(MemoryKind.OPTIMIZER, 0) if is_first else 0
        flattening = self.zero.gradient_bytes() + flat - late
        gathering = self.zero.weight_bytes() if self.num_ranks > 1 else 0
        if gathering >= max(flattening, flat):
            return 0, gathering
        return max(flattening, flat), 0

    def _base(self, *, has_optimizer: bool) -> dict[MemoryKind, int]:
        held = {
            MemoryKind.WEIGHTS: self.zero.weight_bytes(),
            MemoryKind.MASTER_WEIGHTS: self.zero.master_bytes(),
            MemoryKind.PROCESS: self.profile.process_overheads.policy_trainer.value,
            MemoryKind.FRAGMENTATION: self.profile.process_slack.policy_trainer.value,
        }
        if has_optimizer:
            held[MemoryKind.OPTIMIZER] = self.zero.optimizer_bytes()
        return held

    def _has_optimizer(self, action: Action, moment: Moment) -> bool:
        """Adam's moments appear in the first optimizer step."""
        if moment == "start":
            return False
        if moment != "first":
            return True
        after_a_step = (
            ActionKind.OPTIMIZER_STEP,
            ActionKind.SYNC_WEIGHTS,
            ActionKind.SAVE_WEIGHTS,
            ActionKind.CHECKPOINT,
        )
        return action.kind in after_a_step or bool(action.mini_batch)

    def _staging(self) -> int:
        """The first rank alone sends."""
        if self.rank or not self.has_arena:
            return 0
        return sync_staging_bytes(self.job, self.model)
