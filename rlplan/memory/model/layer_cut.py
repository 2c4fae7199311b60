"""LayerCut: which parts of a decoder layer tensor parallel ranks share, and which each of them holds whole.

In: kinds of layers, ranks. Out: the layers of one rank. Left out: bytes (activations.py, trainers/micro_batch.py), the
elements of the weights (spec/models/shards.py). Plans and published runs cut their layers here.

Source: Megatron-Core 0.14 and its main branch of 2026-08: tensor_parallel/layers.py
(`LinearWithGradAccumulationAndAsyncCommunication` saves its input as it came and gathers it again going back),
transformer/moe/moe_layer.py (experts behind tp ranks are trained under sequence parallelism only); Transformer Engine
2026-08, module/layernorm_linear.py (`ln_out_needs_gather`); torch 2.13 distributed/tensor/parallel/style.py
(`SequenceParallel`; what `ColwiseParallel` gathers is what its matmul saves).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from rlplan.memory.model.block import Layers


@dataclass(frozen=True)
class LayerCut:
    """How ranks share a layer: heads and MLP over tp, each expert's matrices over expert_tp of them (1: experts are
    whole, and each rank sends them its own share of the rows)."""

    tp: int = 1
    expert_tp: int = 1
    shares_rows: bool = False
    """Sequence parallelism: what lies between the sharded matmuls (norms, residual, router) is of a rank's own rows."""
    gathers_again: bool = False
    """The rows that a sharded matmul reads are kept as shares, and gathered once more going back."""

    @property
    def sequence_shards(self) -> int:
        """Ranks over which the rows between the sharded matmuls are cut."""
        return self.tp if self.shares_rows else 1

    def layers_of(self, kinds: Iterable[Layers]) -> tuple[Layers, ...]:
        """The kinds of layers as one rank has them.

        >>> from rlplan.memory.model.block import Block
        >>> [kind] = LayerCut(2, 2).layers_of([Layers(3, Block(64, 4, 2, 16, 256))])
        >>> kind.num, kind.block.num_heads, kind.block.intermediate
        (3, 2, 128)
        """
        return tuple(replace(kind, block=kind.block.sharded(self.tp, self.expert_tp)) for kind in kinds)


def layer_cut(tp: int, expert_tp: int, *, is_megatron: bool, has_sequence_parallel: bool) -> LayerCut:
    """The cut of a trainer: Megatron keeps shares of what it gathers, torch's DTensor the gathered rows.

    >>> layer_cut(4, 1, is_megatron=True, has_sequence_parallel=True).sequence_shards
    4
    >>> layer_cut(1, 1, is_megatron=True, has_sequence_parallel=True) == LayerCut()
    True
    """
    shares_rows = has_sequence_parallel and tp > 1
    return LayerCut(tp, expert_tp if is_megatron else tp, shares_rows, shares_rows and is_megatron)
