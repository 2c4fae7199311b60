"""What one rank computes in a micro-batch: the sizes and the habits of its trainer that decide what it holds.

In: nothing. Out: MicroBatchShape, a frozen value. Left out: bytes (micro_batch.py), how layers are cut
(model/layer_cut.py).
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
    """What the backward pass computes anew.

    FULL: every layer from its input. ALTERNATE: every other layer. SELECTIVE: within each layer all but every second
    matmul and attention's output (torchtitan's `selective(op)`). ATTENTION: attention's core alone, which flash
    attention does by itself.
    """

    NONE = "none"
    FULL = "full"
    ALTERNATE = "alternate"
    SELECTIVE = "selective"
    ATTENTION = "attention"


def recompute_named(word: str | tuple[str, ...]) -> tuple[Recompute, frozenset[str]]:
    """What `training.recomputed` says: a policy, and modules that are recomputed alone.

    >>> recompute_named("layers")[0], recompute_named(("mlp",))
    (<Recompute.FULL: 'full'>, (<Recompute.ATTENTION: 'attention'>, frozenset({'mlp'})))
    """
    if isinstance(word, tuple):
        return Recompute.ATTENTION, frozenset(word)
    policies = {"every_other_layer": Recompute.ALTERNATE, "selective": Recompute.SELECTIVE}
    return policies.get(word, Recompute.FULL), frozenset()


@dataclass(frozen=True)
class MicroBatchShape:
    """What one rank computes in one micro-batch."""

    block: Block
    """Of its first layer."""
    num_layers: int
    """On this rank, of that kind."""
    vocab_size: int
    num_tokens: int
    num_head_tokens: int
    """Tokens with logits; 0 where another pipeline stage has the head."""
    element_bytes: int = 2
    recompute: Recompute = Recompute.NONE
    modules: frozenset[str] = frozenset()
    """Of a layer, which are recomputed alone (recomputed.py)."""
    loss: Loss = Loss.PLAIN
    offloads_activations: bool = False
    frozen: Frozen | None = None
    """What is trained beside frozen weights; None trains everything."""
    is_compiled: bool = False
    """Recomputed regions keep nothing that the backward pass does not read."""
    sequence_shards: int = 1
    """Tensor parallel ranks that share what lies between the sharded matmuls (model/layer_cut.py)."""
    gathers_again: bool = False
    """The rows that sharded matmuls read are kept as shares, and gathered once more going back."""
    ulysses: int = 1
    """Ranks that exchange tokens for heads around attention (`activations.exchanged_bytes`)."""
    passes_keys_on: bool = False
    """Context parallelism, where keys and values go round the ranks."""
    micro_batches_in_flight: int = 1
    softcaps_logits: bool = False
    more: tuple[Layers, ...] = ()
    """Layers of other kinds (block_families.py, `blocks_of`), in their order."""
    rows_at_once: RowsAtOnce = ROWS_ON_GPU
    """Of logits, where they are taken by rows (model/logits.py)."""
    selects_rows: bool = False
    """The rows that the head reads are copied out of the hidden states, even where they are all."""
    has_entropy_gradient: bool = False
    """The backward pass holds some rows' probabilities beside their logits."""
    residual_bytes: int = 0
    """Of an element of the residual stream, where autocast leaves it wider than the passes; 0: as they are."""
    dequantised: int = 0
    """Elements of the largest frozen weight in 4 bits, which a matmul dequantises."""

    scored_words: ScoredWords | None = None
    """What a pass without gradient holds of the vocabulary; None where it holds what the loss does."""

    @cached_property
    def kinds(self) -> "tuple[MicroBatchShape, ...]":
        """The same shape for each kind of layer alone."""
        if not self.more:
            return (self,)
        others = (replace(self, block=kind.block, num_layers=kind.num, more=()) for kind in self.more)
        return (replace(self, more=()), *others)

    @cached_property
    def total_layers(self) -> int:
        """Layers of all kinds."""
        return sum(kind.num_layers for kind in self.kinds)
