"""Who computes what in a pass: a role with its layout (TrainSetting), a micro-batch, how often each part is computed.

In: nothing. Out: frozen values. Left out: seconds (passes.py, exchanges.py).
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from rlplan.dataflow.choice import TrainerChoice
from rlplan.memory.trainers.shape import Recompute, recompute_named
from rlplan.spec.model import ModelSpec
from rlplan.spec.models.parts import NONE
from rlplan.spec.resolved import SettledTraining
from rlplan.timing.training.elementwise import BACKWARD
from rlplan.timing.training.flops import Lengths
from rlplan.timing.training.kernels import Kernels, kernels_of
from rlplan.timing.training.modules import Again
from rlplan.vocabulary import Backend, Loss, Role

ATTENTION_BACKWARD = 2.5
"""Matmuls of attention's backward pass for two of the forward pass: five. Source: Dao et al. 2022, algorithm 4."""


@dataclass(frozen=True)
class TrainSetting:
    """A role that computes."""

    model: ModelSpec
    role: Role
    training: SettledTraining
    choice: TrainerChoice
    num_ranks: int
    """All of its GPUs."""
    backend: Backend = "deepspeed"

    @cached_property
    def runs(self) -> Kernels:
        """The kernels that run."""
        return kernels_of(self.backend, self.training)

    @property
    def layers_ahead(self) -> float:
        """Layers that multi-token prediction adds for each token ahead: one, of hybrids attention and experts."""
        return 2.0 if NONE in self.model.attention_kinds else 1.0

    @property
    def num_groups(self) -> int:
        """Micro-batches at once: ranks over those that share one."""
        return max(1, self.num_ranks // self.choice.ranks_per_sequence)

    @property
    def ranks_of_tokens(self) -> int:
        """Ranks over which a sequence's tokens are cut."""
        return self.choice.cp * self.choice.ulysses

    @property
    def row_shards(self) -> int:
        """Tensor parallel ranks that share the rows between their matmuls (sequence parallelism)."""
        return self.choice.tp if self.training.shares_rows(self.backend) else 1

    @cached_property
    def recompute(self) -> Recompute:
        """What the backward pass recomputes."""
        return recompute_named(self.training.recomputed)[0] if self.choice.gradient_checkpointing else Recompute.NONE

    @property
    def modules(self) -> frozenset[str]:
        """Modules of a layer that the backward pass computes anew."""
        return self.runs.modules if self.choice.gradient_checkpointing else frozenset()

    @property
    def loss(self) -> Loss:
        """How log-probs are taken; a value has no vocabulary."""
        if self.role in (Role.VALUE, Role.REWARD) or self.model.head_width == 1:
            return Loss.NONE
        return self.training.loss

    def head_times(self, times: "Times") -> float:
        """How often the head's matmul is computed: once more going back where logits are recomputed, by rows."""
        return times.head + (times.is_training and self.loss is Loss.BY_ROWS)


@dataclass(frozen=True)
class MicroBatch:
    """What a group of ranks computes in one pass."""

    num_sequences: float
    lengths: Lengths
    """As computed, with padding."""
    num_head_tokens: float
    """Tokens with logits."""

    @property
    def num_tokens(self) -> float:
        """Tokens, padding too."""
        return self.num_sequences * self.lengths.mean


class StagePart(NamedTuple):
    """A kind of pipeline stage."""

    num_layers: int
    has_head: bool
    number: int = 1
    """Of such stages."""


@dataclass(frozen=True)
class Times:
    """How often each part of a forward pass is computed in all."""

    matmuls: float
    attention: float
    elementwise: float
    """Of the operators' bytes."""
    exchanges: float
    """Between ranks."""
    head: float
    """The head's matmul."""
    is_training: bool
    """There is a backward pass."""
    expert_exchanges_again: float = 0.0
    """Of rows with experts, beside `exchanges`."""
    num_losses: int = 1
    """Heads and losses of a token: of the next one, and of those that are predicted ahead."""

    def with_again(self, again: Again) -> "Times":
        """The same with modules that are computed once more."""
        return replace(
            self,
            matmuls=self.matmuls + again.matmuls,
            attention=self.attention + again.attention,
            elementwise=self.elementwise + again.elementwise,
            expert_exchanges_again=again.expert_exchanges,
        )

    def with_ahead(self, num_tokens: int, layers: float) -> "Times":
        """The same where further tokens are predicted ahead, each by so many more layers (a share of all) and the head
        once more (DeepSeek-V3's multi-token prediction, arXiv 2412.19437, section 2.2). Left out: the projection of two
        hidden states into one."""
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
    """A forward and a backward pass.

    Counts: matmuls 1 + 2, attention 1 + 2.5, bytes 1 + 2, exchanges 1 + 1; once more what is recomputed: all, every
    other layer, or (selective) every second matmul and all elementwise operators; has_narrow: in 8 or 4 bits, whose
    matmuls selective recomputation has in no list of what it keeps. Frozen weights have no gradient: 1 +
    1.
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
