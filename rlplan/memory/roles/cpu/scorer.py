"""What a scorer (a frozen model that gives log-probs) holds, action by action.

In: a job and its model. Out: bytes by kind.
"""

from dataclasses import replace

from rlplan.dataflow.schedule import Action
from rlplan.memory.ledger import RunPhase
from rlplan.memory.machine.overheads import slack_bytes
from rlplan.memory.model.block_families import cut_layers
from rlplan.memory.model.layer_cut import LayerCut
from rlplan.memory.model.logits import FLOAT_BYTES, largest_micro_batch, rows_on_cpu
from rlplan.memory.model.params import parameter_bytes
from rlplan.memory.predict import Forecast
from rlplan.memory.trainers.micro_batch import score_peak_bytes
from rlplan.memory.trainers.shape import MicroBatchShape
from rlplan.memory.trainers.training import frozen_states
from rlplan.spec.hardware.profile import HardwareProfile
from rlplan.spec.model import ModelSpec
from rlplan.spec.resolved import ResolvedJob
from rlplan.units import ceil_div
from rlplan.vocabulary import ActionKind, Loss, MemoryKind


def pass_bytes(job: ResolvedJob, shape: MicroBatchShape, num_processes: int, ulysses: int = 1) -> int:
    """Bytes that a forward pass over the largest pack of a process's rollouts adds. shape: of its model.

    num_processes: that have passes of their own. ulysses: ranks that share the tokens of each.
    """
    share = ceil_div(job.workload.num_rollouts_per_step, num_processes) * job.workload.max_seq_len
    num_tokens = ceil_div(largest_micro_batch(share, job.max_tokens_per_micro_batch), ulysses)
    return score_peak_bytes(replace(shape, num_tokens=num_tokens, num_head_tokens=num_tokens))


def shape_on_cpu(model: ModelSpec, element_bytes: int, tp: int = 1) -> MicroBatchShape:
    """What the runtime computes of a model on a CPU host, without tokens. tp: ranks that each have a part of it."""
    first, *more = cut_layers(model, None, LayerCut(tp, tp))
    return MicroBatchShape(
        first.block,
        first.num,
        model.head_width,
        0,
        0,
        element_bytes=element_bytes,
        loss=Loss.BY_ROWS,
        more=tuple(more),
        rows_at_once=rows_on_cpu(element_bytes),
        selects_rows=True,
    )


class ScorerForecast(Forecast):
    """One scorer process. See `predict.Forecast`."""

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
    def _whole_bytes(self) -> int:
        return parameter_bytes(self.model, self.job.training.dtype.num_bytes)

    @property
    def _weight_bytes(self) -> int:
        return self._whole_bytes if self.states is None else self.states.weight_bytes()

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
