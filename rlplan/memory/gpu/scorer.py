"""What one rank of a frozen role (reference, reward model) holds on its GPU and on its host, action by action.

In: a model, how many ranks share it, tokens of a pass. Out: bytes by kind.
Left out: tensor parallelism; weights are whole, or ZeRO-3 shards that are gathered layer by layer.
"""

from functools import cached_property, lru_cache

from rlplan.dataflow.schedule import Action
from rlplan.memory.block_families import blocks_of
from rlplan.memory.gpu.process import Bytes, add, pinned, process_overheads
from rlplan.memory.gpu.trainer import Passes
from rlplan.memory.ledger import Moment
from rlplan.memory.logits import Loss
from rlplan.memory.step_peak import Work, score_peak_bytes
from rlplan.memory.zero import ZeroSettings, ZeroStates
from rlplan.spec.hardware import GpuOverheads
from rlplan.spec.model import ModelSpec
from rlplan.spec.models.adapters import value_head_parameters
from rlplan.vocabulary import ActionKind, MemoryKind, Role


@lru_cache(maxsize=256)
def frozen_parts(model: ModelSpec, settings: ZeroSettings, *, has_head: bool) -> tuple[int, int]:
    """(bytes of the rank's weights, of gathered weights at most at a time) of a frozen model."""
    parameters = model.parameters if has_head else value_head_parameters(model)
    states = ZeroStates(settings, (), frozen=parameters)
    return states.weight_bytes(), states.gathered_bytes(model.num_parameters // model.num_layers)


class ScorerOnGpu:
    """One rank. See `memory.predict.Forecast`. is_sharded: whether the weights are cut over all ranks."""

    def __init__(
        self,
        role: Role,
        model: ModelSpec,
        element_bytes: int,
        loss: Loss,
        passes: Passes,
        num_ranks: int,
        overheads: GpuOverheads,
        *,
        is_sharded: bool,
    ) -> None:
        self.role, self.model, self.overheads = role, model, overheads
        self.num_ranks = num_ranks if is_sharded else 1
        self.has_head = role is Role.REFERENCE
        self.element_bytes, self.loss, self.passes = element_bytes, loss if self.has_head else Loss.NONE, passes
        settings = ZeroSettings(stage=3 if is_sharded else 0, num_ranks=self.num_ranks, weight_bytes=element_bytes)
        self.largest_layer = element_bytes * (model.num_parameters // model.num_layers)
        self.weights, self.gathered = frozen_parts(model, settings, has_head=self.has_head)

    def resident(self, action: Action, moment: Moment) -> Bytes:
        """Held on the GPU when the action has ended."""
        held = process_overheads(self.overheads, self.num_ranks)
        if action.kind is not ActionKind.OFFLOAD_ROLE:
            held[MemoryKind.WEIGHTS] = self.weights
        return held

    def peak(self, action: Action, moment: Moment) -> Bytes:
        """Held on the GPU at the peak inside the action."""
        held = process_overheads(self.overheads, self.num_ranks) | {MemoryKind.WEIGHTS: self.weights}
        if action.kind is not ActionKind.SCORE:
            return held
        return add(held, {MemoryKind.COMM_BUFFERS: self.gathered, MemoryKind.LOGITS: self._pass_bytes})

    def on_host(self, action: Action, moment: Moment) -> Bytes:
        """Held in the host's memory: the weights while the role is parked, and while they are loaded."""
        if action.kind is ActionKind.START_SCORER:
            return {MemoryKind.SYNC_STAGING: self.weights if self.num_ranks == 1 else self.largest_layer}
        parked = action.kind is ActionKind.OFFLOAD_ROLE
        return pinned({MemoryKind.WEIGHTS: self.weights}) if parked else {}

    @cached_property
    def _pass_bytes(self) -> int:
        """Activations and logits of one pass without gradients."""
        first, *more = blocks_of(self.model)
        return score_peak_bytes(
            Work(
                first.block,
                first.num,
                self.model.vocab_size if self.has_head else 1,
                self.passes.num_tokens,
                self.passes.num_head_tokens,
                element_bytes=self.element_bytes,
                loss=self.loss,
                more=tuple(more),
            )
        )
