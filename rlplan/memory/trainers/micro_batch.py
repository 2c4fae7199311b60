"""Activations and logits of one micro-batch at each place of its passes.

In: the sizes of a micro-batch (MicroBatchShape), the number of layers whose activations are saved. Out: bytes.
Left out: gradients, gathered weights and states (step_peak.py), pipeline schedules (the micro-batches in flight are a
field).
"""

from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from rlplan.memory.model.activations import (
    between_saved_bytes,
    block_saved_bytes,
    checkpoint_bytes,
    exchanged_bytes,
    final_saved_bytes,
    forward_layer_bytes,
    mlp_freed_bytes,
    norm_saved_bytes,
    recomputed_bytes,
    working_bytes,
)
from rlplan.memory.model.block import FLOAT_BYTES, Block
from rlplan.memory.model.frozen import frozen_final_bytes, frozen_layer_bytes
from rlplan.memory.model.logits import CHUNKS, loss_peak_bytes, rows_bytes
from rlplan.memory.trainers.shape import MicroBatchShape, Recompute
from rlplan.vocabulary import Loss


def layer_bytes(shape: MicroBatchShape) -> int:
    """Bytes that one layer saves for one micro-batch without recomputation.

    Counts: `block_saved_bytes`, or `frozen_layer_bytes` where its weights are frozen. Sequence parallelism shards the
    tensors between the matmuls (`between_saved_bytes`), but not the adapters' inputs.
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
    """Bytes of a layer's input, which recomputation saves; sharded under sequence parallelism."""
    width = shape.residual_bytes or shape.element_bytes
    return checkpoint_bytes(shape.block, shape.num_tokens, width) // shape.sequence_shards


def kept_layer_bytes(shape: MicroBatchShape) -> int:
    """Bytes of one layer that stay until its backward pass, averaged over layers.

    Counts: without recomputation everything; full its input e*h; alternate half of each; selective the outputs of every
    second matmul (queries, values, gate, and the MLP's last, which torch.compile drops because nothing reads it),
    attention's output with its log-sums, and the input.
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
    return 0 if shape.offloads_activations else layer_bytes(shape) - _recomputed_module_bytes(shape)


def _recomputed_module_bytes(shape: MicroBatchShape) -> int:
    """Bytes that a layer does not save because modules of it are recomputed individually."""
    names, shards = shape.modules, shape.sequence_shards if shape.gathers_again else 1
    norms = recomputed_bytes(shape.block, names & {"layernorm"}, shape.element_bytes) // shards
    return shape.num_tokens * (norms + recomputed_bytes(shape.block, names - {"layernorm"}, shape.element_bytes))


CHUNKED_LOSSES = (Loss.CHUNKED, Loss.COMPILED_CHUNKED, Loss.UNCAST_CHUNKED)
"""Losses whose head gradient comes once per chunk, and is added to that of the earlier chunks."""
HOLDS_HEAD_INPUT = (Loss.BY_ROWS, Loss.FUSED, Loss.COMPILED_ROWS)
"""Losses that keep the head's input even where the head is frozen, because they compute or recompute logits from it."""


def _head_bytes(shape: MicroBatchShape) -> int:
    """Bytes of the logits' gradients while the head's own gradient is computed.

    Counts: e*V*n. Chunked: without the first chunk, which is freed. By rows: a few rows of them, normalizers, and the
    gradient of the head's input.
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
    return words - (words // CHUNKS if shape.loss in CHUNKED_LOSSES else 0) + _referenced_logit_bytes(shape)


def _referenced_logit_bytes(shape: MicroBatchShape) -> int:
    """Bytes of the logits that stay referenced by the model's output until the training loop drops it."""
    element_bytes = FLOAT_BYTES if shape.loss in (Loss.SHIFTED, Loss.KEPT) else 0
    return element_bytes * shape.num_head_tokens * shape.vocab_size


def _working_bytes(shape: MicroBatchShape) -> int:
    """Bytes in flight inside one layer's backward pass.

    Counts: `working_bytes`; under context parallelism the keys and values of the ring; under PEFT an adapter's output
    and a scaled copy where the layer is recomputed, otherwise the scaled gradient of its output, at most as wide as the
    MLP; with a 4-bit base one dequantized weight, and a copy of the output.
    """
    block, e, tokens = shape.block, shape.element_bytes, shape.num_tokens
    ring = ring_bytes(block, tokens, e) if shape.has_context_parallel else 0
    scales = shape.frozen is not None and shape.frozen.scales_outputs
    # A recomputed layer has both the adapter's output and its scaled copy; otherwise only the scaled gradient exists.
    keeps_linears = shape.recompute in (Recompute.NONE, Recompute.ATTENTION) and not shape.modules
    copies = scales * (1 if keeps_linears else 2)
    outputs = tokens * block.intermediate * (copies + (shape.dequantised > 0))
    working = working_bytes(block, tokens, e) + ring + e * (outputs + shape.dequantised)
    return max(working, score_bytes(block, shape.num_pairs))


FUSED_HEAD = 256
"""Widest head of torch's flash attention (torch 2.11, native/transformers/cuda/sdp_utils.cpp)."""


def score_bytes(block: Block, num_pairs: int) -> int:
    """Bytes of attention scores while a layer's backward pass is in its attention, where no fused kernel fits.

    Counts: scores, probabilities and both gradients in fp32, 16 bytes per pair and head, for heads wider than 256 that
    share keys and values. Their memory-efficient kernel needs copied keys, and transformers copies them only beside a
    mask. Source: torch 2.11 native/transformers/attention.cpp (`_scaled_dot_product_attention_math` computes 16-bit
    inputs in fp32); transformers 5.11 integrations/sdpa_attention.py (`use_gqa_in_sdpa`). AgileRL's peaks of Gemma 4 on
    A100: 14.9 to 18.4 bytes in twelve runs of 2,048 and 4,096 tokens, none in those with padded rows.

    >>> score_bytes(Block(hidden=64, num_heads=8, num_kv_heads=1, head_dim=512, intermediate=256), 4096**2) >> 20
    2048
    """
    is_wide = block.has_attention and block.head_dim > FUSED_HEAD and block.num_kv_heads < block.num_heads
    return 4 * FLOAT_BYTES * block.num_heads * num_pairs if is_wide else 0


def ring_bytes(block: Block, num_tokens: int, element_bytes: int) -> int:
    """Bytes of the two buffers in which keys and values travel round the ranks of context parallelism.

    Counts: two buffers of keys and values, 4*e*k*T; with latent attention keys and values of every head.
    Source: Liu et al. 2023 (Ring Attention); Transformer Engine 2, `AttnFuncWithCPAndKVP2P`: one buffer is read while
    the other is received. Assumes: the backward pass uses the same two for gradients of keys and values.

    >>> ring_bytes(Block(hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate=128), 10, 2)  # 4*2*32*10
    2560
    """
    latent = block.latent
    width = 2 * block.k if latent is None else block.num_heads * (latent.qk_head_dim + latent.v_head_dim)
    return 2 * element_bytes * width * num_tokens


def _recomputed_bytes(shape: MicroBatchShape) -> int:
    """Bytes of the topmost layer that its backward pass recomputes. Under `ALTERNATE` that layer was saved whole."""
    if shape.recompute in (Recompute.FULL, Recompute.SELECTIVE):
        saved = entry_bytes(shape) if shape.recompute is Recompute.FULL else kept_layer_bytes(shape)
        return layer_bytes(shape) - min(saved, layer_bytes(shape))
    return _recomputed_module_bytes(shape)


def _final_bytes(shape: MicroBatchShape) -> int:
    """Bytes saved outside the layers on a rank with the head. Sequence parallelism shards the last norm's tensors.

    A fused loss keeps its gathered rows (verl's `mcore/model_forward_fused.py`).
    """
    rows, tokens, block, e = shape.num_head_tokens, shape.num_tokens, shape.block, shape.element_bytes
    if not rows:
        return 0
    is_gathered = shape.gathers_again and shape.frozen is None
    # `final_saved_bytes` counts whole tensors; sequence parallelism leaves each rank one shard of the norm's.
    norm = tokens * norm_saved_bytes(block.norm, block.hidden, e, keeps_output=is_gathered)
    shared = norm - norm // shape.sequence_shards
    if shape.frozen is not None and shape.loss not in HOLDS_HEAD_INPUT:
        return frozen_final_bytes(block, shape.frozen, tokens, e) - shared
    copied = rows * e * block.hidden if shape.selects_rows and rows == tokens else 0
    copied += tokens * e * block.hidden if is_gathered and shape.loss is Loss.FUSED else 0
    return copied + final_saved_bytes(block, tokens, rows, e) - shared


def gather_buffer_bytes(shape: MicroBatchShape) -> int:
    """Bytes of the buffer in which Megatron's head gathers its input under sequence parallelism.

    The buffer is global: it stays from the first pass on, even while the role is offloaded. Frozen heads and heads
    with one output gather into temporary tensors instead.
    Source: Megatron-Core 0.14 tensor_parallel/layers.py (`get_global_memory_buffer().get_tensor(..., "mpu")`).
    """
    is_kept = shape.gathers_again and shape.frozen is None and shape.loss not in (Loss.NONE, Loss.FUSED)
    return shape.element_bytes * shape.block.hidden * shape.num_tokens if is_kept and shape.num_head_tokens else 0


def _loss_bytes(shape: MicroBatchShape) -> int:
    """Peak bytes of the loss. Soft-capped logits (Gemma 2) also save their tanh in the model's type."""
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
    """Peak bytes of a forward-only pass that computes log-probs (or values), without the weights.

    Counts: the larger of two moments. In the largest layer: `forward_layer_bytes` and a dequantized weight. At the
    head: hidden states and logits, by the framework's profile, or by the loss without gradient.
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
    """A place inside a training step, which decides the part of a micro-batch in memory.

    LOSS: all activations are saved, and the logits are at their peak. HEAD: the head's gradient exists. BELOW_HEAD: the
    logits are freed. MLP: in a layer, before the backward pass has left its MLP. ATTENTION: in the layer's attention.
    TABLE: in the embedding. REDUCE: in the optimizer's step, before Adam's moments first appear. STEP: after that.
    """

    LOSS = "loss"
    HEAD = "head"
    BELOW_HEAD = "below_head"
    MLP = "mlp"
    ATTENTION = "attention"
    TABLE = "table"
    REDUCE = "reduce"
    STEP = "step"


class Moment(NamedTuple):
    """One moment of a step, without memory that depends on the tokens. A search creates hundreds of thousands."""

    place: Place
    layers: int
    """Layers whose activations are still saved, the current one included."""
    gradients: int
    """Bytes of gradients in addition to the resident ones."""
    buffers: int
    """Additional bytes of gathered weights, buckets and copies; negative where resident buffers are not yet in use."""


IN_A_LAYER = (Place.MLP, Place.ATTENTION)


class MicroBatchBytes:
    """Computes the bytes of a micro-batch at each place."""

    def __init__(self, shape: MicroBatchShape) -> None:
        self.shape = shape

    @cached_property
    def kept(self) -> int:
        """Bytes of all layers before their backward passes."""
        return sum(kind.num_layers * kept_layer_bytes(kind) for kind in self.shape.kinds)

    @property
    def others(self) -> int:
        """Bytes of a pipeline's other micro-batches in flight."""
        return self.kept * (self.shape.micro_batches_in_flight - 1)

    @cached_property
    def layer(self) -> int:
        """Bytes in flight inside the largest layer's backward pass."""
        return max(_recomputed_bytes(kind) + _working_bytes(kind) for kind in self.shape.kinds)

    @cached_property
    def alternate(self) -> int:
        """Bytes of one whole layer where every other layer is recomputed; otherwise 0."""
        return layer_bytes(self.shape) if self.shape.recompute is Recompute.ALTERNATE else 0

    def activations(self, place: Place, layers: int) -> int:
        """Bytes of activations at a place. layers: layers whose activations are still saved, the current one included.

        Under `ALTERNATE` the current layer is whole in memory.
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
        """Bytes of logits and of the loss's tensors at a place."""
        if place is Place.LOSS:
            return _loss_bytes(self.shape)
        return _head_bytes(self.shape) if place is Place.HEAD else _referenced_logit_bytes(self.shape)

    @cached_property
    def _left_mlp(self) -> int:
        shape, tokens = self.shape, self.shape.num_tokens
        shards = shape.sequence_shards if shape.gathers_again else 1
        return mlp_freed_bytes(shape.block, tokens, shape.element_bytes, row_shards=shards)
