"""The peak of one training step of one rank: five moments of the passes and the optimizer's.

In: what the rank holds (Held), what it works on (Work). Out: bytes by kind at each moment, the largest of which binds.
Left out: pipelines (sharding.py turns them into tokens in flight), allocator effects (overheads.py).

Between the moments bytes change linearly: layer by layer activations go and gradients come. So the largest of
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

Moment = dict[MemoryKind, int]
FLOAT_BYTES = 4
MASKS = 2
"""Dropout masks of a layer, each of one byte an element (Korthikanti et al. 2022, section 4.1)."""


class Recompute(StrEnum):
    """What the backward pass computes anew.

    FULL: every layer from its input. ALTERNATE: every other layer. SELECTIVE: within each layer all but every second
    matrix product and attention's output (torchtitan's `selective(op)`). ATTENTION: attention's core alone, which flash
    attention does by itself.
    """

    NONE = "none"
    FULL = "full"
    ALTERNATE = "alternate"
    SELECTIVE = "selective"
    ATTENTION = "attention"


@dataclass(frozen=True)
class Held:
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
class Work:
    """What one rank computes in one micro-batch. block: of its first layer. num_layers: on this rank, of that kind.
    more: layers of other kinds (block_families.py, `blocks_of`), in their order. num_head_tokens: tokens with logits; 0
    where another pipeline stage has the head. frozen: what is trained beside frozen weights; None trains everything.
    repeats_keys: keys and values are copied for every query head before attention (with a padding mask; torchtune).
    views_fused: the values are a view of one fused projection, which they keep whole (litgpt). is_compiled: recomputed
    regions keep nothing that the backward pass does not read. held_logit_bytes: of a word's logit, of the logits that
    the training loop keeps in a variable. sequence_ways: tensor parallel ranks that share what lies between the
    sharded products (sequence parallelism). has_dropout: after attention and after the MLP. exchanges_heads: Ulysses,
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
    sequence_ways: int = 1
    has_dropout: bool = False
    exchanges_heads: bool = False
    passes_keys_on: bool = False
    micro_batches_in_flight: int = 1
    softcaps_logits: bool = False
    more: tuple[Layers, ...] = ()

    @cached_property
    def kinds(self) -> "tuple[Work, ...]":
        """The same work for each kind of layer alone."""
        if not self.more:
            return (self,)
        others = (replace(self, block=kind.block, num_layers=kind.num, more=()) for kind in self.more)
        return (replace(self, more=()), *others)


def layer_bytes(work: Work) -> int:
    """Bytes that one layer saves for one micro-batch, before recomputation takes them off.

    Counts: `block_saved_bytes`, or `frozen_layer_bytes` where its weights are frozen; keys and values at the queries'
    width where they are repeated; queries and keys once more where the values keep the fused projection. Under
    sequence parallelism the norms' inputs are shares; the rows that the products read are gathered whole.

    >>> block = Block(hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate=128)
    >>> work = Work(block, 1, 100, 1, 1)
    >>> layer_bytes(work)  # norms 16*64 + 8, attention 4*64 + 4*32 + 16, MLP 8*128
    2456
    >>> layer_bytes(replace(work, repeats_keys=True))
    2584
    """
    block, e, tokens = work.block, work.element_bytes, work.num_tokens
    if work.frozen is None:
        saved = block_saved_bytes(block, tokens, e)
    else:
        saved = frozen_layer_bytes(block, work.frozen, tokens, e)
    if block.latent is not None:
        return saved
    more = 2 * (block.q - block.k) if work.repeats_keys else 0
    is_view = work.views_fused and not block.packs_qkv and not more
    more += block.q + block.k if is_view else 0
    between = block.num_norms * norm_saved_bytes(block.norm, block.hidden, e, keeps_output=False)
    more += block.q if work.exchanges_heads else 0
    saved += MASKS * tokens * block.hidden if work.has_dropout else 0
    return saved + tokens * (e * more - (between - between // work.sequence_ways))


def entry_bytes(work: Work) -> int:
    """Bytes of a layer's input, which recomputation keeps; a share of it under sequence parallelism."""
    return checkpoint_bytes(work.block, work.num_tokens, work.element_bytes) // work.sequence_ways


def kept_layer_bytes(work: Work) -> int:
    """Bytes of one layer that stay until its backward pass, averaged over layers.

    Counts: none everything; full its input e*h; alternate half of each; selective the outputs of every second matrix
    product (queries, values, gate, and the MLP's last unless a compiler sees that nobody reads it), attention's own
    output with its log-sums, and the input.
    Source: torchtitan 2024-12, parallelize_llama.py (`_save_list`, `mm_count % 2`).
    """
    block, e, tokens = work.block, work.element_bytes, work.num_tokens
    entry = 0 if work.offloads_activations else entry_bytes(work)
    if work.recompute is Recompute.FULL:
        return entry
    if work.recompute is Recompute.ALTERNATE:
        return (entry + layer_bytes(work)) // 2
    if work.recompute is Recompute.SELECTIVE:
        last = 0 if work.is_compiled else block.hidden
        half = 2 * block.q + block.k + block.intermediate + last
        return entry + tokens * (e * half + FLOAT_BYTES * block.num_heads)
    return 0 if work.offloads_activations else layer_bytes(work)


def moments(held: Held, work: Work) -> dict[str, Moment]:
    """Bytes by kind at the six moments: `loss`, `head`, `first_layer`, `last_layer`, `table` and `step`."""
    kept = kept_layer_bytes(work.kinds[0]) * work.micro_batches_in_flight
    layers = _all_kept_bytes(work) * work.micro_batches_in_flight
    before = held.gradients if held.accumulates else held.kept_gradients
    head = max(before, held.kept_gradients + held.head_gradient)
    late = 0 if held.accumulates else held.layer_gradient + (0 if held.is_tied else held.table_gradient)
    top = max(_recomputed_bytes(kind) + _working_bytes(kind) for kind in work.kinds)
    last = layer_bytes(work) + _working_bytes(work) + kept - min(kept, layer_bytes(work))
    twice = held.table_gradient if held.is_tied or held.accumulates else 0
    entry = entry_bytes(work)
    words, kept_words = _head_bytes(work), _held_logits(work)
    tables = held.head_gradient * (2 if held.accumulates or work.loss in CHUNKED_LOSSES else 1)
    start, passing = layers + _final_bytes(work), held.passing
    early, inside = passing + held.head_passing, passing + held.layer_passing
    return {
        "loss": _moment(held, start, _loss_bytes(work), before, early),
        "head": _moment(held, start, words, max(before, held.kept_gradients) + tables, early),
        "first_layer": _moment(held, layers + top, kept_words, head, inside),
        "last_layer": _moment(held, last, kept_words, max(head, held.gradients - late), inside),
        "table": _moment(held, entry, kept_words, held.gradients + twice, passing),
        "step": _moment(held, 0, kept_words, held.gradients, held.step_copies),
    }


CHUNKED_LOSSES = (Loss.CHUNKED, Loss.COMPILED_CHUNKED, Loss.UNCAST_CHUNKED)
"""Losses after which the head's gradient comes once a chunk, and is added to what came before."""


def _head_bytes(work: Work) -> int:
    """Gradients of the logits, in the model's type, while the head's own is taken; of chunks the first is gone.

    By rows: those of some rows, normalizers, and the gradient of the rows that the head read.
    """
    words = work.element_bytes * work.num_head_tokens * work.vocab_size
    if work.loss in (Loss.NONE, Loss.FUSED):
        return 0
    if work.loss is Loss.BY_ROWS:
        rows = rows_bytes(work.num_head_tokens, work.vocab_size, work.element_bytes, has_exponentials=False)
        return rows + work.num_head_tokens * (FLOAT_BYTES + work.element_bytes * work.block.hidden)
    return words - (words // CHUNKS if work.loss in CHUNKED_LOSSES else 0) + _held_logits(work)


def _held_logits(work: Work) -> int:
    """Bytes of the logits that the model's output keeps while the training loop keeps that output."""
    shifted = FLOAT_BYTES if work.loss is Loss.SHIFTED else 0
    return (work.held_logit_bytes + shifted) * work.num_head_tokens * work.vocab_size


def _all_kept_bytes(work: Work) -> int:
    """Bytes of all layers of one micro-batch that stay until their backward passes."""
    return sum(kind.num_layers * kept_layer_bytes(kind) for kind in work.kinds)


def _working_bytes(work: Work) -> int:
    passed = ring_bytes(work.block, work.num_tokens, work.element_bytes) if work.passes_keys_on else 0
    return working_bytes(work.block, work.num_tokens, work.element_bytes) + passed


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


def _recomputed_bytes(work: Work) -> int:
    """Bytes of the topmost layer that its backward pass makes anew. Alternate: the topmost layer was kept whole."""
    if work.recompute in (Recompute.FULL, Recompute.SELECTIVE):
        entry = entry_bytes(work)
        kept = entry if work.recompute is Recompute.FULL else kept_layer_bytes(work)
        return layer_bytes(work) - min(kept, layer_bytes(work))
    return 0


def _final_bytes(work: Work) -> int:
    """Bytes that wait outside the layers, where this rank has the head."""
    if not work.num_head_tokens:
        return 0
    return final_saved_bytes(work.block, work.num_tokens, work.num_head_tokens, work.element_bytes)


def step_peak(held: Held, work: Work) -> Moment:
    """The largest of the moments."""
    return max(moments(held, work).values(), key=lambda moment: sum(moment.values()))


def _loss_bytes(work: Work) -> int:
    """The loss at its worst; capped logits (Gemma 2) save their tanh in the model's type too."""
    capped = work.softcaps_logits and work.loss is Loss.PLAIN
    extra = work.element_bytes * work.num_head_tokens * work.vocab_size if capped else 0
    head = loss_peak_bytes(work.loss, work.num_head_tokens, work.vocab_size, work.element_bytes, work.block.hidden)
    return head + extra + work.held_logit_bytes * work.num_head_tokens * work.vocab_size


def forward_end_bytes(work: Work) -> int:
    """Activations and logits that wait when the forward pass ends."""
    held = held_bytes(work.loss, work.num_head_tokens, work.vocab_size, work.element_bytes)
    if work.softcaps_logits and work.loss is Loss.PLAIN:
        held += work.element_bytes * work.num_head_tokens * work.vocab_size
    return _all_kept_bytes(work) + _final_bytes(work) + held


def score_peak_bytes(work: Work) -> int:
    """Bytes beside the weights of a pass without gradient that gives log-probs (or values): one layer or the logits.

    Counts: the largest layer (`forward_layer_bytes`); or the hidden states and the logits, where there is a vocabulary.
    """
    block, e, tokens = work.block, work.element_bytes, work.num_tokens
    logits = loss_peak_bytes(work.loss, work.num_head_tokens, work.vocab_size, e, block.hidden, has_gradient=False)
    layer = max(forward_layer_bytes(kind.block, e) for kind in work.kinds)
    return max(tokens * layer, tokens * e * block.hidden + logits)


def _moment(held: Held, activations: int, logits: int, gradients: int, buffers: int) -> Moment:
    moment = dict(held.resident)
    moment[MemoryKind.ACTIVATIONS] = activations
    moment[MemoryKind.LOGITS] = logits
    moment[MemoryKind.GRADIENTS] = max(moment.get(MemoryKind.GRADIENTS, 0), gradients)
    moment[MemoryKind.COMM_BUFFERS] = moment.get(MemoryKind.COMM_BUFFERS, 0) + buffers
    return {kind: size for kind, size in moment.items() if size}
