"""Setting of a training pass: a role with its layout, a micro-batch, and how often each part is computed.

In: nothing. Out: frozen values. Left out: seconds (passes.py, shards.py).
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from rlplan.dataflow.choice import TrainerChoice
from rlplan.memory.trainers.shape import Recompute, parse_recompute
from rlplan.spec.model import ModelSpec
from rlplan.spec.models.parts import NONE
from rlplan.spec.resolved import SettledTraining
from rlplan.timing.training.elementwise import BACKWARD, Recomputed
from rlplan.timing.training.flops import Lengths
from rlplan.timing.training.kernels import Kernels, choose_kernels
from rlplan.vocabulary import Backend, Loss, Role

ATTENTION_BACKWARD = 2.5
"""Attention's backward pass relative to its forward pass: five matmuls against two. Source: Dao et al. 2022,
algorithm 4."""


@dataclass(frozen=True)
class TrainSetting:
    """A role that trains or scores, with its layout."""

    model: ModelSpec
    role: Role
    training: SettledTraining
    choice: TrainerChoice
    num_ranks: int
    """All GPUs of the role."""
    backend: Backend = "deepspeed"
    has_other_passes: bool = True
    """Whether another micro-batch runs beside a pass."""
    host_waits: Literal["none", "layers", "tokens"] = "none"
    """GPU work that the host waits for (FrameworkRelease.host_waits)."""

    @cached_property
    def runs(self) -> Kernels:
        """Kernels of the trainer."""
        return choose_kernels(self.backend, self.training)

    @property
    def layers_ahead(self) -> float:
        """Layers per predicted-ahead token: one; in hybrid models one with attention and one with experts."""
        return 2.0 if NONE in self.model.attention_kinds else 1.0

    @property
    def num_groups(self) -> int:
        """Micro-batches that run at once: ranks over those that share one."""
        return max(1, self.num_ranks // self.choice.ranks_per_sequence)

    @property
    def ranks_of_tokens(self) -> int:
        """Ranks that split the tokens of a sequence."""
        return self.choice.cp * self.choice.ulysses

    @property
    def row_shards(self) -> int:
        """Tensor-parallel ranks that split the rows between matmuls (sequence parallelism)."""
        return self.choice.tp if self.training.shares_rows(self.backend) else 1

    @cached_property
    def recompute(self) -> Recompute:
        """Recomputation in the backward pass."""
        return parse_recompute(self.training.recomputed)[0] if self.choice.gradient_checkpointing else Recompute.NONE

    @property
    def modules(self) -> frozenset[str]:
        """Modules of a layer that the backward pass recomputes."""
        return self.runs.modules if self.choice.gradient_checkpointing else frozenset()

    @property
    def loss(self) -> Loss:
        """Implementation of the loss; a value model has no vocabulary and no such loss."""
        if self.role in (Role.VALUE, Role.REWARD) or self.model.head_width == 1:
            return Loss.NONE
        return self.training.loss

    @property
    def hides_experts(self) -> bool:
        """Whether rows travel to experts during the matmuls of another micro-batch."""
        return self.runs.hides_experts and self.has_other_passes

    @property
    def expert_imbalance(self) -> float:
        """Rows of the busiest expert-parallel rank relative to the mean."""
        return self.runs.expert_imbalance if self.choice.ep > 1 else 1.0

    def head_times(self, times: "Times") -> float:
        """How often the head's matmul is computed; row-chunked losses recompute logits in the backward pass."""
        return times.head + (times.is_training and self.loss is Loss.BY_ROWS)


@dataclass(frozen=True)
class MicroBatch:
    """Work of a group of ranks in one pass."""

    num_sequences: float
    lengths: Lengths
    """Lengths as computed, with padding."""
    num_head_tokens: float
    """Tokens with logits."""

    @property
    def num_tokens(self) -> float:
        """Tokens including padding."""
        return self.num_sequences * self.lengths.mean


class StagePart(NamedTuple):
    """Pipeline stages with the same layers."""

    num_layers: int
    has_head: bool
    number: int = 1
    """Number of such stages."""


@dataclass(frozen=True)
class Times:
    """How often each part of a forward pass is computed in total."""

    matmuls: float
    attention: float
    elementwise: float
    """Bytes of elementwise operators."""
    exchanges: float
    """Communication between ranks."""
    head: float
    """The head's matmul."""
    is_training: bool
    """Whether there is a backward pass."""
    expert_exchanges_again: float = 0.0
    """Exchanges of rows with experts in addition to `exchanges`."""
    num_losses: int = 1
    """Heads and losses per token: one for the next token, and one for each predicted ahead."""

    def add_recomputed(self, again: Recomputed) -> "Times":
        """Add modules that are recomputed."""
        return replace(
            self,
            matmuls=self.matmuls + again.matmuls,
            attention=self.attention + again.attention,
            elementwise=self.elementwise + again.elementwise,
            expert_exchanges_again=again.expert_exchanges,
        )

    def add_predicted_ahead(self, num_tokens: int, layers: float) -> "Times":
        """Add multi-token prediction: `layers` (a share of all) and one head per token ahead.

        Source: DeepSeek-V3, arXiv 2412.19437, section 2.2. Left out: the projection that merges two hidden states.
        """
        if not num_tokens:
            return self
        more = 1 + num_tokens * layers
        return replace(
            self,
            matmuls=self.matmuls * more,
            attention=self.attention * more,
            elementwise=self.elementwise * more,
            exchanges=self.exchanges * more,
            num_losses=self.num_losses + num_tokens,
        )


FORWARD = Times(1.0, 1.0, 1.0, 1.0, 1.0, is_training=False)


def training_times(recompute: Recompute, *, is_frozen: bool = False, has_narrow: bool = False) -> Times:
    """How often each part is computed in a forward and a backward pass.

    Counts: matmuls 1 + 2, attention 1 + 2.5, bytes 1 + 2, exchanges 1 + 1. Recomputation adds all layers, every second
    layer, or (selective) every second matmul and all elementwise operators. has_narrow: 8- or 4-bit matmuls, all of
    which selective recomputation repeats because its list of kept operators lacks them. Frozen weights: matmuls 1 + 1.
    Source: Kaplan et al. 2020; Dao et al. 2022, algorithm 4; torchtitan 2024-12 (`mm_count % 2`).

    >>> training_times(Recompute.FULL).matmuls, training_times(Recompute.NONE, is_frozen=True).matmuls
    (4.0, 2.0)
    """
    second = 1.0 if has_narrow else 0.5
    again = {
        Recompute.FULL: (1.0, 1.0, 1.0),
        Recompute.ALTERNATE: (0.5, 0.5, 0.5),
        Recompute.SELECTIVE: (second, 0, 1.0),
    }
    matmuls, attention, elementwise = again.get(recompute, (0.0, 0.0, 0.0))
    backward = 1.0 if is_frozen else 2.0
    return Times(
        matmuls=1 + backward + matmuls,
        attention=1 + ATTENTION_BACKWARD + attention,
        elementwise=1 + BACKWARD + elementwise,
        exchanges=2 + (1.0 if recompute is Recompute.FULL else 0.5 if recompute is Recompute.ALTERNATE else 0.0),
        head=1 + backward,
        is_training=True,
    )
