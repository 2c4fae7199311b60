"""What one micro-batch adds to a rank's memory at each place of its passes: activations and logits, without gradients.

In: the sizes of a micro-batch (MicroBatchShape), how many layers still wait. Out: bytes.
Left out: gradients, gathered weights and states (step_peak.py), pipelines (tokens in flight are a field).
"""

from enum import StrEnum
from functools import cached_property

from rlplan.memory.model.activations import (
    between_saved_bytes,
    block_saved_bytes,
    checkpoint_bytes,
    exchanged_bytes,
    final_saved_bytes,
    forward_layer_bytes,
    mlp_freed_bytes,
    norm_saved_bytes,
    working_bytes,
)
from rlplan.memory.model.block import Block
from rlplan.memory.model.frozen import frozen_final_bytes, frozen_layer_bytes
from rlplan.memory.model.logits import CHUNKS, loss_peak_bytes, rows_bytes
from rlplan.memory.model.recomputed import recomputed_bytes
from rlplan.memory.trainers.shape import MicroBatchShape, Recompute
from rlplan.vocabulary import Loss

FLOAT_BYTES = 4


def layer_bytes(shape: MicroBatchShape) -> int:
    """Bytes that one layer saves for one micro-batch, before recomputation takes them off.

    Counts: `block_saved_bytes`, or `frozen_layer_bytes` where its weights are frozen. Under sequence parallelism
    what lies between the matmuls is a share (`between_saved_bytes`); what adapters read is whole.
    Source: NeMo's and Megatron-Bridge's adapters ask Transformer Engine for the gathered output of the norm
    (`return_layernorm_output_gathered`).

    >>> block = Block(hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate=128)
    >>> shape = MicroBatchShape(block, 1, 100, 1, 1)
    >>> layer_bytes(shape)  # norms 16*64 + 8, attention 4*64 + 4*32 + 16, MLP 8*128
    2456
    """
    block, e, tokens = shape.block, shape.element_bytes, shape.num_tokens
    if shape.frozen is None:
        saved = block_saved_bytes(block, tokens, e)
    else:
        saved = frozen_layer_bytes(block, shape.frozen, tokens, e)
    has_outputs = shape.gathers_again and shape.frozen is None
    between = tokens * between_saved_bytes(block, e, has_outputs=has_outputs)
    saved -= between - between // shape.sequence_shards
    if block.latent is not None:
        return saved
    return saved + exchanged_bytes(block, shape.ulysses, tokens, e)


def entry_bytes(shape: MicroBatchShape) -> int:
    """Bytes of a layer's input, which recomputation keeps; a share of it under sequence parallelism."""
    width = shape.residual_bytes or shape.element_bytes
    return checkpoint_bytes(shape.block, shape.num_tokens, width) // shape.sequence_shards


def kept_layer_bytes(shape: MicroBatchShape) -> int:
    """Bytes of one layer that stay until its backward pass, averaged over layers.

    Counts: none everything; full its input e*h; alternate half of each; selective the outputs of every second matmul
    (queries, values, gate, and the MLP's last unless a compiler sees that it is not read), attention's own output with
    its log-sums, and the input.
    Source: torchtitan 2024-12, parallelize_llama.py (`_save_list`, `mm_count % 2`).
    """
    block, e, tokens = shape.block, shape.element_bytes, shape.num_tokens
    entry = 0 if shape.offloads_activations else entry_bytes(shape)
    if shape.recompute is Recompute.FULL:
        return entry
    if shape.recompute is Recompute.ALTERNATE:
        return (entry + layer_bytes(shape)) // 2
    if shape.recompute is Recompute.SELECTIVE:
        last = 0 if shape.is_compiled else block.hidden
        half = 2 * block.q + block.k + block.intermediate + last
        return entry + tokens * (e * half + FLOAT_BYTES * block.num_heads)
    return 0 if shape.offloads_activations else layer_bytes(shape) - _given_back(shape)


def _given_back(shape: MicroBatchShape) -> int:
    """Bytes of a layer's modules that are recomputed alone."""
    names, shards = shape.modules, shape.sequence_shards if shape.gathers_again else 1
    norms = recomputed_bytes(shape.block, names & {"layernorm"}, shape.element_bytes) // shards
    return shape.num_tokens * (norms + recomputed_bytes(shape.block, names - {"layernorm"}, shape.element_bytes))


CHUNKED_LOSSES = (Loss.CHUNKED, Loss.COMPILED_CHUNKED, Loss.UNCAST_CHUNKED)
"""Losses after which the head's gradient comes once a chunk, and is added to what came before."""
HOLDS_HEAD_INPUT = (Loss.BY_ROWS, Loss.FUSED, Loss.COMPILED_ROWS)
"""Losses beside which the head's input is counted even where the head is frozen: they take the logits a part at a time,
or recompute them from it."""


def _head_bytes(shape: MicroBatchShape) -> int:
    """Gradients of the logits, in the model's type, while the head's own is taken; of chunks the first is gone.

    By rows: those of some rows, normalizers, and the gradient of the rows that the head read.
    """
    words = shape.element_bytes * shape.num_head_tokens * shape.vocab_size
    if shape.loss in (Loss.NONE, Loss.FUSED, Loss.COMPILED_ROWS):
        return 0
    if shape.loss is Loss.BY_ROWS:
        rows = rows_bytes(
            shape.num_head_tokens,
            shape.vocab_size,
            shape.element_bytes,
            shape.rows_at_once,
            has_exponentials=shape.has_entropy_gradient,
        )
        return rows + shape.num_head_tokens * (FLOAT_BYTES + shape.element_bytes * shape.block.hidden)
    return words - (words // CHUNKS if shape.loss in CHUNKED_LOSSES else 0) + _held_logits(shape)


def _held_logits(shape: MicroBatchShape) -> int:
    """Bytes of the logits that the model's output keeps while the training loop keeps that output."""
    kept = FLOAT_BYTES if shape.loss in (Loss.SHIFTED, Loss.KEPT) else 0
    return kept * shape.num_head_tokens * shape.vocab_size


def _working_bytes(shape: MicroBatchShape) -> int:
    """Bytes in flight inside one layer's backward pass.

    Counts: `working_bytes`; under context parallelism the keys and values that go round; under PEFT an adapter's output
    and a scaled copy where the layer is recomputed, else the scaled gradient of its output, at most as wide as the MLP;
    of a base in 4 bits one weight as the matmul needs it, and a copy of the output.
    """
    block, e, tokens = shape.block, shape.element_bytes, shape.num_tokens
    passed = ring_bytes(block, tokens, e) if shape.passes_keys_on else 0
    scales = shape.frozen is not None and shape.frozen.scales_outputs
    keeps_linears = shape.recompute in (Recompute.NONE, Recompute.ATTENTION) and not shape.modules
    copies = scales * (1 if keeps_linears else 2)
    wide = tokens * block.intermediate * (copies + (shape.dequantised > 0))
    return working_bytes(block, tokens, e) + passed + e * (wide + shape.dequantised)


def ring_bytes(block: Block, num_tokens: int, element_bytes: int) -> int:
    """Bytes of the keys and values that a rank of context parallelism has from its neighbour, and of the next ones.

    Counts: two buffers of keys and values, 4*e*k*T; of latent attention those of every head.
    Source: Liu et al. 2023 (Ring Attention); Transformer Engine 2, `AttnFuncWithCPAndKVP2P`: one is read while the
    other arrives. Assumes: the backward pass adds its gradients of keys and values in the same two.

    >>> ring_bytes(Block(hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate=128), 10, 2)  # 4*2*32*10
    2560
    """
    latent = block.latent
    width = 2 * block.k if latent is None else block.num_heads * (latent.qk_head_dim + latent.v_head_dim)
    return 2 * element_bytes * width * num_tokens


def _recomputed_bytes(shape: MicroBatchShape) -> int:
    """Bytes of the topmost layer that its backward pass makes anew. Alternate: the topmost layer was kept whole."""
    if shape.recompute in (Recompute.FULL, Recompute.SELECTIVE):
        entry = entry_bytes(shape)
        kept = entry if shape.recompute is Recompute.FULL else kept_layer_bytes(shape)
        return layer_bytes(shape) - min(kept, layer_bytes(shape))
    return _given_back(shape)


def _final_bytes(shape: MicroBatchShape) -> int:
    """Bytes that wait outside the layers, where this rank has the head; the last norm's are shares as a layer's are.

    A fused loss keeps the rows that it has gathered (verl's `mcore/model_forward_fused.py`).
    """
    rows, tokens, block, e = shape.num_head_tokens, shape.num_tokens, shape.block, shape.element_bytes
    if not rows:
        return 0
    is_gathered = shape.gathers_again and shape.frozen is None
    norm = tokens * norm_saved_bytes(block.norm, block.hidden, e, keeps_output=is_gathered)
    shared = norm - norm // shape.sequence_shards
    if shape.frozen is not None and shape.loss not in HOLDS_HEAD_INPUT:
        return frozen_final_bytes(block, shape.frozen, tokens, e) - shared
    copied = rows * e * block.hidden if shape.selects_rows and rows == tokens else 0
    copied += tokens * e * block.hidden if is_gathered and shape.loss is Loss.FUSED else 0
    return copied + final_saved_bytes(block, tokens, rows, e) - shared


def gather_buffer_bytes(shape: MicroBatchShape) -> int:
    """Bytes of the rows that Megatron's head reads under sequence parallelism: a buffer that stays from the first pass
    on, whatever becomes of the role.

    Source: Megatron-Core 0.14 tensor_parallel/layers.py (`get_global_memory_buffer().get_tensor(..., "mpu")`). Frozen
    heads gather into tensors of their own, and so do heads of one output.
    """
    is_kept = shape.gathers_again and shape.frozen is None and shape.loss not in (Loss.NONE, Loss.FUSED)
    return shape.element_bytes * shape.block.hidden * shape.num_tokens if is_kept and shape.num_head_tokens else 0


def _loss_bytes(shape: MicroBatchShape) -> int:
    """The loss at its worst; capped logits (Gemma 2) save their tanh in the model's type too."""
    capped = shape.softcaps_logits and shape.loss is Loss.PLAIN
    extra = shape.element_bytes * shape.num_head_tokens * shape.vocab_size if capped else 0
    head = loss_peak_bytes(
        shape.loss,
        shape.num_head_tokens,
        shape.vocab_size,
        shape.residual_bytes or shape.element_bytes,
        shape.block.hidden,
        rows_at_once=shape.rows_at_once,
    )
    return head + extra


def score_peak_bytes(shape: MicroBatchShape) -> int:
    """Bytes beside the weights of a pass without gradient that gives log-probs (or values): one layer or the logits.

    Counts: the largest layer (`forward_layer_bytes`) with what a matmul dequantises; or the hidden states and the
    logits, where there is a vocabulary: as the framework's profile says, else as the loss holds them without gradient.
    """
    block, e, tokens = shape.block, shape.element_bytes, shape.num_tokens
    if shape.scored_words is None or shape.loss is Loss.NONE:
        logits = loss_peak_bytes(
            shape.loss,
            shape.num_head_tokens,
            shape.vocab_size,
            e,
            block.hidden,
            has_gradient=False,
            rows_at_once=shape.rows_at_once,
        )
    else:
        logits = shape.num_head_tokens * shape.vocab_size * shape.scored_words.bytes_per_word(e)
    layer = max(forward_layer_bytes(kind.block, e) for kind in shape.kinds)
    return max(tokens * layer + e * shape.dequantised, tokens * e * block.hidden + logits)


class Place(StrEnum):
    """Where a step is: what it holds of a micro-batch there.

    LOSS: everything is saved, the logits are at their worst. HEAD: the head's gradient has come. BELOW_HEAD: the
    logits are gone. MLP: in a layer, before the backward pass has left its MLP. ATTENTION: after that. TABLE: in the
    embedding. REDUCE: in the optimizer's step, before its moments first appear. STEP: after that.
    """

    LOSS = "loss"
    HEAD = "head"
    BELOW_HEAD = "below_head"
    MLP = "mlp"
    ATTENTION = "attention"
    TABLE = "table"
    REDUCE = "reduce"
    STEP = "step"


IN_A_LAYER = (Place.MLP, Place.ATTENTION)


class HeldAt:
    """Bytes of a micro-batch at each place."""

    def __init__(self, shape: MicroBatchShape) -> None:
        self.shape = shape

    @cached_property
    def kept(self) -> int:
        """Of all layers until their backward passes."""
        return sum(kind.num_layers * kept_layer_bytes(kind) for kind in self.shape.kinds)

    @property
    def others(self) -> int:
        """Of the other micro-batches of a pipeline."""
        return self.kept * (self.shape.micro_batches_in_flight - 1)

    @cached_property
    def layer(self) -> int:
        """Inside the largest layer's backward pass."""
        return max(_recomputed_bytes(kind) + _working_bytes(kind) for kind in self.shape.kinds)

    @cached_property
    def alternate(self) -> int:
        """Of a layer that is there whole where every other one is recomputed."""
        return layer_bytes(self.shape) if self.shape.recompute is Recompute.ALTERNATE else 0

    def activations(self, place: Place, layers: int) -> int:
        """Activations. layers: that still wait, the one that the place is in included.

        Where every other layer is recomputed the one that the place is in is there whole.
        """
        shape = self.shape
        if place in IN_A_LAYER:
            waiting = max(self.kept * layers // shape.total_layers, self.alternate)
            return self.others + waiting + self.layer - (self._left_mlp if place is Place.ATTENTION else 0)
        if place is Place.TABLE:
            return entry_bytes(shape)
        if place in (Place.REDUCE, Place.STEP):
            return 0
        return self.others + self.kept + (0 if place is Place.BELOW_HEAD else _final_bytes(shape))

    def logits(self, place: Place) -> int:
        """Logits and what the loss makes of them."""
        if place is Place.LOSS:
            return _loss_bytes(self.shape)
        return _head_bytes(self.shape) if place is Place.HEAD else _held_logits(self.shape)

    @cached_property
    def _left_mlp(self) -> int:
        shape, tokens = self.shape, self.shape.num_tokens
        shards = shape.sequence_shards if shape.gathers_again else 1
        return mlp_freed_bytes(shape.block, tokens, shape.element_bytes, row_shards=shards)
