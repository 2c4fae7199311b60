"""The peak of one training step of one rank: memory snapshots at five points of the passes and at the optimizer's step.

In: what the rank holds (RankState), its micro-batch (MicroBatchShape). Out: bytes by kind in each snapshot, the largest
of which is the peak.
Left out: pipelines (sharding.py turns them into tokens in flight), allocator effects (overheads.py).

Between the snapshots bytes change linearly: layer by layer activations go and gradients come. So the largest of
`loss` (everything saved, the logits at their worst), `head` (their gradient, and the head's), `first_layer` (the head's
gradient has come, the logits are gone), `last_layer` (all gradients, one layer), `table` (the embedding's gradient) and
`step` is the peak; backward.py walks every parameter for the CPU runtime.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from rlplan.memory.model.activations import (
    block_saved_bytes,
    checkpoint_bytes,
    final_saved_bytes,
    forward_layer_bytes,
    norm_saved_bytes,
    working_bytes,
)
from rlplan.memory.model.block import Block, Layers
from rlplan.memory.model.frozen import Frozen, frozen_layer_bytes
from rlplan.memory.model.logits import CHUNKS, Loss, held_bytes, loss_peak_bytes, rows_bytes
from rlplan.vocabulary import MemoryKind

MemorySnapshot = dict[MemoryKind, int]
FLOAT_BYTES = 4
MASKS = 2
"""Dropout masks of a layer, each of one byte an element (Korthikanti et al. 2022, section 4.1)."""


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


@dataclass(frozen=True)
class RankState:
    """Bytes of one rank that do not depend on the tokens.

    resident: between steps, by kind. gradients: when the backward pass ends. kept_gradients: the part of them that is
    resident already. head_gradient: of the vocabulary table, the first to come; layer_gradient: of one layer;
    table_gradient: of the embedding, the last to come: as far as they are part of `gradients`. is_tied: it is added to
    the head's, which has waited for it. passing: gathered weights and buckets inside the passes; head_passing: those
    that go when the head is done; layer_passing: those that come with the layers' backward. step_copies: inside the
    optimizer's step, beside the gradients. accumulates: this micro-batch is not the first, so that all gradients are
    there before it.
    """

    resident: Mapping[MemoryKind, int]
    gradients: int
    kept_gradients: int = 0
    head_gradient: int = 0
    layer_gradient: int = 0
    table_gradient: int = 0
    is_tied: bool = False
    passing: int = 0
    head_passing: int = 0
    layer_passing: int = 0
    step_copies: int = 0
    accumulates: bool = False


@dataclass(frozen=True)
class MicroBatchShape:
    """What one rank computes in one micro-batch. block: of its first layer. num_layers: on this rank, of that kind.
    more: layers of other kinds (block_families.py, `blocks_of`), in their order. num_head_tokens: tokens with logits; 0
    where another pipeline stage has the head. frozen: what is trained beside frozen weights; None trains everything.
    repeats_keys: keys and values are copied for every query head before attention (with a padding mask; torchtune).
    views_fused: the values are a view of one fused projection, which they keep whole (litgpt). is_compiled: recomputed
    regions keep nothing that the backward pass does not read. held_logit_bytes: of a word's logit, of the logits that
    the training loop keeps in a variable. sequence_shards: tensor parallel ranks that share what lies between the
    sharded matmuls (sequence parallelism). has_dropout: after attention and after the MLP. exchanges_heads: Ulysses,
    whose output projection reads a copy of attention's output. passes_keys_on: context parallelism, where keys and
    values go round the ranks.
    """

    block: Block
    num_layers: int
    vocab_size: int
    num_tokens: int
    num_head_tokens: int
    element_bytes: int = 2
    recompute: Recompute = Recompute.NONE
    loss: Loss = Loss.PLAIN
    offloads_activations: bool = False
    frozen: Frozen | None = None
    repeats_keys: bool = False
    views_fused: bool = False
    is_compiled: bool = False
    held_logit_bytes: int = 0
    sequence_shards: int = 1
    has_dropout: bool = False
    exchanges_heads: bool = False
    passes_keys_on: bool = False
    micro_batches_in_flight: int = 1
    softcaps_logits: bool = False
    more: tuple[Layers, ...] = ()

    @cached_property
    def kinds(self) -> "tuple[MicroBatchShape, ...]":
        """The same shape for each kind of layer alone."""
        if not self.more:
            return (self,)
        others = (replace(self, block=kind.block, num_layers=kind.num, more=()) for kind in self.more)
        return (replace(self, more=()), *others)


def layer_bytes(shape: MicroBatchShape) -> int:
    """Bytes that one layer saves for one micro-batch, before recomputation takes them off.

    Counts: `block_saved_bytes`, or `frozen_layer_bytes` where its weights are frozen; keys and values at the queries'
    width where they are repeated; queries and keys once more where the values keep the fused projection. Under
    sequence parallelism the norms' inputs are shares; the rows that the matmuls read are gathered whole.

    >>> block = Block(hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate=128)
    >>> shape = MicroBatchShape(block, 1, 100, 1, 1)
    >>> layer_bytes(shape)  # norms 16*64 + 8, attention 4*64 + 4*32 + 16, MLP 8*128
    2456
    >>> layer_bytes(replace(shape, repeats_keys=True))
    2584
    """
    block, e, tokens = shape.block, shape.element_bytes, shape.num_tokens
    if shape.frozen is None:
        saved = block_saved_bytes(block, tokens, e)
    else:
        saved = frozen_layer_bytes(block, shape.frozen, tokens, e)
    if block.latent is not None:
        return saved
    more = 2 * (block.q - block.k) if shape.repeats_keys else 0
    is_view = shape.views_fused and not block.packs_qkv and not more
    more += block.q + block.k if is_view else 0
    between = block.num_norms * norm_saved_bytes(block.norm, block.hidden, e, keeps_output=False)
    more += block.q if shape.exchanges_heads else 0
    saved += MASKS * tokens * block.hidden if shape.has_dropout else 0
    return saved + tokens * (e * more - (between - between // shape.sequence_shards))


def entry_bytes(shape: MicroBatchShape) -> int:
    """Bytes of a layer's input, which recomputation keeps; a share of it under sequence parallelism."""
    return checkpoint_bytes(shape.block, shape.num_tokens, shape.element_bytes) // shape.sequence_shards


def kept_layer_bytes(shape: MicroBatchShape) -> int:
    """Bytes of one layer that stay until its backward pass, averaged over layers.

    Counts: none everything; full its input e*h; alternate half of each; selective the outputs of every second matmul
    (queries, values, gate, and the MLP's last unless a compiler sees that nobody reads it), attention's own output with
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
    return 0 if shape.offloads_activations else layer_bytes(shape)


def snapshots(rank_state: RankState, shape: MicroBatchShape) -> dict[str, MemorySnapshot]:
    """Bytes by kind in the six snapshots: `loss`, `head`, `first_layer`, `last_layer`, `table` and `step`."""
    kept = kept_layer_bytes(shape.kinds[0]) * shape.micro_batches_in_flight
    layers = _all_kept_bytes(shape) * shape.micro_batches_in_flight
    before = rank_state.gradients if rank_state.accumulates else rank_state.kept_gradients
    head = max(before, rank_state.kept_gradients + rank_state.head_gradient)
    late = (
        0
        if rank_state.accumulates
        else rank_state.layer_gradient + (0 if rank_state.is_tied else rank_state.table_gradient)
    )
    top = max(_recomputed_bytes(kind) + _working_bytes(kind) for kind in shape.kinds)
    last = layer_bytes(shape) + _working_bytes(shape) + kept - min(kept, layer_bytes(shape))
    twice = rank_state.table_gradient if rank_state.is_tied or rank_state.accumulates else 0
    entry = entry_bytes(shape)
    words, kept_words = _head_bytes(shape), _held_logits(shape)
    tables = rank_state.head_gradient * (2 if rank_state.accumulates or shape.loss in CHUNKED_LOSSES else 1)
    start, passing = layers + _final_bytes(shape), rank_state.passing
    early, inside = passing + rank_state.head_passing, passing + rank_state.layer_passing
    return {
        "loss": _snapshot(rank_state, start, _loss_bytes(shape), before, early),
        "head": _snapshot(rank_state, start, words, max(before, rank_state.kept_gradients) + tables, early),
        "first_layer": _snapshot(rank_state, layers + top, kept_words, head, inside),
        "last_layer": _snapshot(rank_state, last, kept_words, max(head, rank_state.gradients - late), inside),
        "table": _snapshot(rank_state, entry, kept_words, rank_state.gradients + twice, passing),
        "step": _snapshot(rank_state, 0, kept_words, rank_state.gradients, rank_state.step_copies),
    }


CHUNKED_LOSSES = (Loss.CHUNKED, Loss.COMPILED_CHUNKED, Loss.UNCAST_CHUNKED)
"""Losses after which the head's gradient comes once a chunk, and is added to what came before."""


def _head_bytes(shape: MicroBatchShape) -> int:
    """Gradients of the logits, in the model's type, while the head's own is taken; of chunks the first is gone.

    By rows: those of some rows, normalizers, and the gradient of the rows that the head read.
    """
    words = shape.element_bytes * shape.num_head_tokens * shape.vocab_size
    if shape.loss in (Loss.NONE, Loss.FUSED):
        return 0
    if shape.loss is Loss.BY_ROWS:
        rows = rows_bytes(shape.num_head_tokens, shape.vocab_size, shape.element_bytes, has_exponentials=False)
        return rows + shape.num_head_tokens * (FLOAT_BYTES + shape.element_bytes * shape.block.hidden)
    return words - (words // CHUNKS if shape.loss in CHUNKED_LOSSES else 0) + _held_logits(shape)


def _held_logits(shape: MicroBatchShape) -> int:
    """Bytes of the logits that the model's output keeps while the training loop keeps that output."""
    shifted = FLOAT_BYTES if shape.loss is Loss.SHIFTED else 0
    return (shape.held_logit_bytes + shifted) * shape.num_head_tokens * shape.vocab_size


def _all_kept_bytes(shape: MicroBatchShape) -> int:
    """Bytes of all layers of one micro-batch that stay until their backward passes."""
    return sum(kind.num_layers * kept_layer_bytes(kind) for kind in shape.kinds)


def _working_bytes(shape: MicroBatchShape) -> int:
    passed = ring_bytes(shape.block, shape.num_tokens, shape.element_bytes) if shape.passes_keys_on else 0
    return working_bytes(shape.block, shape.num_tokens, shape.element_bytes) + passed


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
    return 0


def _final_bytes(shape: MicroBatchShape) -> int:
    """Bytes that wait outside the layers, where this rank has the head."""
    if not shape.num_head_tokens:
        return 0
    return final_saved_bytes(shape.block, shape.num_tokens, shape.num_head_tokens, shape.element_bytes)


def step_peak(rank_state: RankState, shape: MicroBatchShape) -> MemorySnapshot:
    """The largest of the snapshots."""
    return max(snapshots(rank_state, shape).values(), key=lambda snapshot: sum(snapshot.values()))


def _loss_bytes(shape: MicroBatchShape) -> int:
    """The loss at its worst; capped logits (Gemma 2) save their tanh in the model's type too."""
    capped = shape.softcaps_logits and shape.loss is Loss.PLAIN
    extra = shape.element_bytes * shape.num_head_tokens * shape.vocab_size if capped else 0
    head = loss_peak_bytes(shape.loss, shape.num_head_tokens, shape.vocab_size, shape.element_bytes, shape.block.hidden)
    return head + extra + shape.held_logit_bytes * shape.num_head_tokens * shape.vocab_size


def forward_end_bytes(shape: MicroBatchShape) -> int:
    """Activations and logits that wait when the forward pass ends."""
    waiting = held_bytes(shape.loss, shape.num_head_tokens, shape.vocab_size, shape.element_bytes)
    if shape.softcaps_logits and shape.loss is Loss.PLAIN:
        waiting += shape.element_bytes * shape.num_head_tokens * shape.vocab_size
    return _all_kept_bytes(shape) + _final_bytes(shape) + waiting


def score_peak_bytes(shape: MicroBatchShape) -> int:
    """Bytes beside the weights of a pass without gradient that gives log-probs (or values): one layer or the logits.

    Counts: the largest layer (`forward_layer_bytes`); or the hidden states and the logits, where there is a vocabulary.
    """
    block, e, tokens = shape.block, shape.element_bytes, shape.num_tokens
    logits = loss_peak_bytes(shape.loss, shape.num_head_tokens, shape.vocab_size, e, block.hidden, has_gradient=False)
    layer = max(forward_layer_bytes(kind.block, e) for kind in shape.kinds)
    return max(tokens * layer, tokens * e * block.hidden + logits)


def _snapshot(rank_state: RankState, activations: int, logits: int, gradients: int, buffers: int) -> MemorySnapshot:
    snapshot = dict(rank_state.resident)
    snapshot[MemoryKind.ACTIVATIONS] = activations
    snapshot[MemoryKind.LOGITS] = logits
    snapshot[MemoryKind.GRADIENTS] = max(snapshot.get(MemoryKind.GRADIENTS, 0), gradients)
    snapshot[MemoryKind.COMM_BUFFERS] = snapshot.get(MemoryKind.COMM_BUFFERS, 0) + buffers
    return {kind: size for kind, size in snapshot.items() if size}
