"""Totals of a model or of a pass that several tests need."""

from rlplan.memory.model.block import Block
from rlplan.memory.model.block_families import list_blocks
from rlplan.memory.model.logits import saved_loss_bytes
from rlplan.memory.trainers.micro_batch import MicroBatchBytes, Place
from rlplan.memory.trainers.shape import MicroBatchShape
from rlplan.spec.model import ModelSpec
from rlplan.vocabulary import Loss


def find_block(model: ModelSpec) -> Block:
    """The block that most layers of a model are."""
    return max(list_blocks(model), key=lambda layers: layers.num).block


def forward_end_bytes(shape: MicroBatchShape) -> int:
    """Activations and logits that wait when the forward pass ends."""
    waiting = saved_loss_bytes(shape.loss, shape.num_head_tokens, shape.vocab_size, shape.element_bytes)
    if shape.softcaps_logits and shape.loss is Loss.PLAIN:
        waiting += shape.element_bytes * shape.num_head_tokens * shape.vocab_size
    return MicroBatchBytes(shape).activations(Place.LOSS, shape.total_layers) + waiting
