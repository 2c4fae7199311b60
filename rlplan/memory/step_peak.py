"""The peak of one training step of one rank: three moments of the passes and the optimizer's.

In: what the rank holds (Held), what it works on (Work). Out: bytes by kind at each moment, the largest of which binds.
Left out: pipelines (sharding.py turns them into tokens in flight), allocator effects (overheads.py).

Between the moments bytes change linearly: layer by layer activations go and gradients come. So the largest of
`loss` (everything saved, the logits at their worst), `first_layer` (the head's gradient has come, the logits are gone),
`last_layer` (all gradients, one layer) and `step` is the peak; backward.py walks every parameter for the CPU runtime.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from rlplan.memory.activations import (
    attention_saved_bytes,
    block_saved_bytes,
    checkpoint_bytes,
    final_saved_bytes,
    mlp_saved_bytes,
    working_bytes,
)
from rlplan.memory.block import Block, Norm
from rlplan.memory.logits import Loss, held_bytes, loss_peak_bytes
from rlplan.vocabulary import MemoryKind

Moment = dict[MemoryKind, int]
FLOAT_BYTES = 4


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


class Adapters(StrEnum):
    """What of a layer is trained."""

    NONE = "none"
    ATTENTION = "attention"
    MLP = "mlp"
    ALL = "all"
    NORMS = "norms"


@dataclass(frozen=True)
class Held:
    """Bytes of one rank that do not depend on the tokens.

    resident: between steps, by kind. gradients: when the backward pass ends. kept_gradients: the part of them that is
    resident already. head_gradient: of the vocabulary table, the first to come; layer_gradient: of one layer;
    table_gradient: of the embedding, the last to come: as far as they are part of `gradients`. passing: gathered
    weights and buckets inside the passes. step_copies: inside the optimizer's step, beside the gradients. accumulates:
    this micro-batch is not the first, so that all gradients are there before it.
    """

    resident: Mapping[MemoryKind, int]
    gradients: int
    kept_gradients: int = 0
    head_gradient: int = 0
    layer_gradient: int = 0
    table_gradient: int = 0
    passing: int = 0
    step_copies: int = 0
    accumulates: bool = False


@dataclass(frozen=True)
class Work:
    """What one rank computes in one micro-batch. num_layers: on this rank. num_head_tokens: tokens with logits; 0 where
    another pipeline stage has the head. adapter_bytes: of an element of adapters and their inputs; 0 trains everything.
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
    adapters: Adapters | None = None
    adapter_bytes: int = FLOAT_BYTES
    micro_batches_in_flight: int = 1
    softcaps_logits: bool = False


def layer_bytes(work: Work) -> int:
    """Bytes that one layer saves for one micro-batch, before recomputation takes them off.

    Counts: `block_saved_bytes`; frozen layers save no linear inputs (norm outputs, the MLP's product) and no normed
    values; adapters save their inputs in their own type.

    >>> block = Block(hidden=64, num_heads=4, num_kv_heads=4, head_dim=16, intermediate=128)
    >>> work = Work(block, 1, 100, 1, 1)
    >>> layer_bytes(work)  # norms 16*64 + 8, attention 8*64 + 16, MLP 8*128
    2584
    """
    block, e = work.block, work.element_bytes
    saved = block_saved_bytes(block, work.num_tokens, e)
    if work.adapters is None or block.experts is not None or block.latent is not None:
        return saved
    linear_inputs = e * (2 * block.hidden + block.intermediate)
    normed = 2 * e * block.hidden if work.adapters is not Adapters.NORMS and block.norm is not Norm.LAYER else 0
    saved -= work.num_tokens * (linear_inputs + normed)
    return saved + work.num_tokens * _adapter_inputs(work)


def _adapter_inputs(work: Work) -> int:
    """Bytes for a token that LoRA's first matrices read: each module keeps its own copy in the adapters' type."""
    block, kind = work.block, work.adapters
    shares = 1 if work.adapter_bytes == work.element_bytes else 0
    width = 0
    if kind in (Adapters.ATTENTION, Adapters.ALL):
        copies = 1 if shares else (2 if kind is Adapters.ATTENTION else 3)
        width += copies * block.hidden + (block.q if kind is Adapters.ALL and not shares else 0)
    if kind in (Adapters.MLP, Adapters.ALL):
        width += (1 if shares else 2) * block.hidden + block.intermediate
    return width * work.adapter_bytes


def kept_layer_bytes(work: Work) -> int:
    """Bytes of one layer that stay until its backward pass, averaged over layers.

    Counts: none everything; full its input e*h; alternate half of each; selective the outputs of every second matrix
    product (keys, attention's output projection, up), attention's own output with its log-sums, and the input.
    """
    block, e, tokens = work.block, work.element_bytes, work.num_tokens
    entry = 0 if work.offloads_activations else checkpoint_bytes(block, tokens, e)
    if work.recompute is Recompute.FULL:
        return entry
    if work.recompute is Recompute.ALTERNATE:
        return (entry + layer_bytes(work)) // 2
    if work.recompute is Recompute.SELECTIVE:
        half = block.q + block.k + block.hidden + block.intermediate
        return entry + tokens * (e * half + FLOAT_BYTES * block.num_heads)
    return 0 if work.offloads_activations else layer_bytes(work)


def moments(held: Held, work: Work) -> dict[str, Moment]:
    """Bytes by kind at the five moments: `loss`, `first_layer`, `last_layer`, `table` and `step`."""
    kept = kept_layer_bytes(work) * work.micro_batches_in_flight
    layers = work.num_layers * kept
    before = held.gradients if held.accumulates else held.kept_gradients
    head = max(before, held.kept_gradients + held.head_gradient)
    late = 0 if held.accumulates else held.layer_gradient + held.table_gradient
    working = working_bytes(work.block, work.num_tokens, work.element_bytes)
    last = layer_bytes(work) + working + kept - min(kept, layer_bytes(work))
    table = max(held.gradients, held.gradients + (held.table_gradient if held.accumulates else 0))
    passing = held.passing
    return {
        "loss": _moment(held, layers + _final_bytes(work), _loss_bytes(work), before, passing),
        "first_layer": _moment(held, layers + _recomputed_bytes(work) + working, 0, head, passing),
        "last_layer": _moment(held, last, 0, max(head, held.gradients - late), passing),
        "table": _moment(held, checkpoint_bytes(work.block, work.num_tokens, work.element_bytes), 0, table, passing),
        "step": _moment(held, 0, 0, held.gradients, held.step_copies),
    }


def _recomputed_bytes(work: Work) -> int:
    """Bytes of the topmost layer that its backward pass makes anew. Alternate: the topmost layer was kept whole."""
    if work.recompute in (Recompute.FULL, Recompute.SELECTIVE):
        entry = checkpoint_bytes(work.block, work.num_tokens, work.element_bytes)
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
    return head + extra


def forward_end_bytes(work: Work) -> int:
    """Activations and logits that wait when the forward pass ends."""
    held = held_bytes(work.loss, work.num_head_tokens, work.vocab_size, work.element_bytes)
    if work.softcaps_logits and work.loss is Loss.PLAIN:
        held += work.element_bytes * work.num_head_tokens * work.vocab_size
    return work.num_layers * kept_layer_bytes(work) + _final_bytes(work) + held


def score_peak_bytes(work: Work) -> int:
    """Bytes beside the weights of a pass without gradient that gives log-probs: one layer or the logits.

    Counts: residual, norm and the widest tensors of one layer; or the hidden states and the logits.
    """
    block, e, tokens = work.block, work.element_bytes, work.num_tokens
    inner = max(mlp_saved_bytes(block, e), attention_saved_bytes(block, e)) + 3 * e * block.hidden
    logits = loss_peak_bytes(work.loss, work.num_head_tokens, work.vocab_size, e, block.hidden, has_gradient=False)
    return max(tokens * inner, tokens * e * block.hidden + logits)


def _moment(held: Held, activations: int, logits: int, gradients: int, buffers: int) -> Moment:
    moment = dict(held.resident)
    moment[MemoryKind.ACTIVATIONS] = activations
    moment[MemoryKind.LOGITS] = logits
    moment[MemoryKind.GRADIENTS] = max(moment.get(MemoryKind.GRADIENTS, 0), gradients)
    moment[MemoryKind.COMM_BUFFERS] = moment.get(MemoryKind.COMM_BUFFERS, 0) + buffers
    return {kind: size for kind, size in moment.items() if size}
