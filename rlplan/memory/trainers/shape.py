"""MicroBatchShape: the sizes of a rank's micro-batch and the trainer's properties that decide its memory.

In: nothing. Out: MicroBatchShape, a frozen value. Left out: bytes (micro_batch.py), the cut of layers
(model/block_families.py).
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from rlplan.frameworks.profile import ScoredWords
from rlplan.memory.model.block import Block, Layers
from rlplan.memory.model.frozen import Frozen
from rlplan.memory.model.logits import ROWS_ON_GPU, RowsAtOnce
from rlplan.vocabulary import Loss


class Recompute(StrEnum):
    """Activation recomputation of the backward pass.

    FULL: every layer, from its input. ALTERNATE: every other layer. SELECTIVE: within each layer all but every second
    matmul and attention's output (torchtitan's `selective(op)`). ATTENTION: only the attention core, which flash
    attention recomputes anyway.
    """

    NONE = "none"
    FULL = "full"
    ALTERNATE = "alternate"
    SELECTIVE = "selective"
    ATTENTION = "attention"


def parse_recompute(word: str | tuple[str, ...]) -> tuple[Recompute, frozenset[str]]:
    """Parse `training.recomputed`: a policy, and modules that are recomputed individually.

    >>> parse_recompute("layers")[0], parse_recompute(("mlp",))
    (<Recompute.FULL: 'full'>, (<Recompute.ATTENTION: 'attention'>, frozenset({'mlp'})))
    """
    if isinstance(word, tuple):
        return Recompute.ATTENTION, frozenset(word)
    policies = {"every_other_layer": Recompute.ALTERNATE, "selective": Recompute.SELECTIVE}
    return policies.get(word, Recompute.FULL), frozenset()


@dataclass(frozen=True)
class MicroBatchShape:
    """Sizes and properties of one micro-batch on one rank."""

    block: Block
    """Block of the rank's first layer."""
    num_layers: int
    """Layers of that block on this rank."""
    vocab_size: int
    num_tokens: int
    num_head_tokens: int
    """Tokens with logits; 0 where another pipeline stage has the head."""
    element_bytes: int = 2
    recompute: Recompute = Recompute.NONE
    modules: frozenset[str] = frozenset()
    """Modules of a layer that are recomputed individually (activations.py)."""
    loss: Loss = Loss.PLAIN
    offloads_activations: bool = False
    frozen: Frozen | None = None
    """Adapters beside frozen weights; None: all weights are trained."""
    is_compiled: bool = False
    """Whether torch.compile removes tensors of recomputed regions that the backward pass does not read."""
    sequence_shards: int = 1
    """Tensor parallel ranks that shard the rows between the sharded matmuls (model/block_families.py)."""
    gathers_again: bool = False
    """Whether sharded matmuls save only the rank's part of their input and gather it again in the backward pass."""
    ulysses: int = 1
    """Ulysses size: ranks that exchange tokens for heads around attention (`activations.exchanged_bytes`)."""
    has_context_parallel: bool = False
    """Whether keys and values travel round the ranks (context parallelism)."""
    micro_batches_in_flight: int = 1
    softcaps_logits: bool = False
    more: tuple[Layers, ...] = ()
    """Layers of other kinds (block_families.py, `list_blocks`), in their order."""
    rows_at_once: RowsAtOnce = ROWS_ON_GPU
    """Rows of logits that a row-chunked loss holds at a time (model/logits.py)."""
    selects_rows: bool = False
    """Whether the head's rows are copied out of the hidden states, even if they are all rows."""
    has_entropy_gradient: bool = False
    """Whether the backward pass holds probabilities of some rows beside their logits."""
    residual_bytes: int = 0
    """Bytes of an element of the residual stream where autocast keeps it wider than the passes; 0: `element_bytes`."""
    dequantised: int = 0
    """Elements of the largest frozen 4-bit weight, which a matmul dequantizes."""

    scored_words: ScoredWords | None = None
    """Vocabulary-wide tensors that a forward-only pass holds; None: those of the loss without gradient."""
    num_pairs: int = 0
    """Pairs of tokens whose scores torch's attention stores for wide heads (`micro_batch.score_bytes`)."""

    @cached_property
    def kinds(self) -> "tuple[MicroBatchShape, ...]":
        """The shape restricted to each kind of layer."""
        if not self.more:
            return (self,)
        others = (replace(self, block=kind.block, num_layers=kind.num, more=()) for kind in self.more)
        return (replace(self, more=()), *others)

    @cached_property
    def total_layers(self) -> int:
        """Layers of all kinds."""
        return sum(kind.num_layers for kind in self.kinds)
