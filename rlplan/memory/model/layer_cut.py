"""LayerCut: the parts of a decoder layer that tensor parallel ranks cut, and the parts that each rank holds whole.

In: kinds of layers, ranks. Out: the layers of one rank. Left out: bytes (activations.py, trainers/micro_batch.py), the
elements of the weights (spec/models/shards.py).

Source: Megatron-Core 0.14 and its main branch of 2026-08: tensor_parallel/layers.py
(`LinearWithGradAccumulationAndAsyncCommunication` saves its input sharded and gathers it again in the backward pass),
transformer/moe/moe_layer.py (MoE with tensor parallelism trains only under sequence parallelism); Transformer Engine
2026-08, module/layernorm_linear.py (`ln_out_needs_gather`); torch 2.13 distributed/tensor/parallel/style.py
(`SequenceParallel`; the matmul of `ColwiseParallel` saves its gathered input).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from rlplan.memory.model.block import Layers


@dataclass(frozen=True)
class LayerCut:
    """The cut of a layer over tensor parallel ranks."""

    tp: int = 1
    """Ranks over which heads and MLP are cut."""
    expert_tp: int = 1
    """Ranks over which each expert's matrices are cut. 1: experts are whole, and each rank sends them its own rows."""
    shares_rows: bool = False
    """Sequence parallelism: between the sharded matmuls (norms, residual, router) a rank has only its own rows."""
    gathers_again: bool = False
    """Whether a sharded matmul saves only the rank's part of its input and gathers it again in the backward pass."""

    @property
    def sequence_shards(self) -> int:
        """Ranks that shard the rows between the sharded matmuls."""
        return self.tp if self.shares_rows else 1

    def cut_layers(self, kinds: Iterable[Layers]) -> tuple[Layers, ...]:
        """Cut kinds of layers to one rank.

        >>> from rlplan.memory.model.block import Block
        >>> [kind] = LayerCut(2, 2).cut_layers([Layers(3, Block(64, 4, 2, 16, 256))])
        >>> kind.num, kind.block.num_heads, kind.block.intermediate
        (3, 2, 128)
        """
        return tuple(replace(kind, block=kind.block.shard(self.tp, self.expert_tp)) for kind in kinds)


def choose_layer_cut(tp: int, expert_tp: int, *, is_megatron: bool, has_sequence_parallel: bool) -> LayerCut:
    """The cut that a trainer makes. Megatron saves sharded inputs, torch's DTensor gathered ones.

    >>> choose_layer_cut(4, 1, is_megatron=True, has_sequence_parallel=True).sequence_shards
    4
    >>> choose_layer_cut(1, 1, is_megatron=True, has_sequence_parallel=True) == LayerCut()
    True
    """
    shares_rows = has_sequence_parallel and tp > 1
    return LayerCut(tp, expert_tp if is_megatron else tp, shares_rows, shares_rows and is_megatron)
