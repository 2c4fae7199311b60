"""An update of adapters, replayed through torch's allocator: what it reserves at most.

In: a model's stored tensors, a layer's sizes, a micro-batch, how logits are tiled (ReplayedUpdate). Out: bytes.
Left out: several kinds of layers, gradients that accumulate, what another process or the driver holds.

The order: stored weights come, each with its adapters; two passes without gradient (the reference's log-probs, then the
policy's); for each micro-batch a forward pass that keeps the layers' entries, the log-probs by tiles of rows, the same
going back, the layers from the last to the first, the step. Gradients and the optimizer's moments are a tensor for each
adapter, small ones mostly, but some are larger than 1 MiB: they stay in blocks that a tile has left, and the next tile
reserves anew. So does cuBLAS's workspace in autograd's thread; the engine has made that of the main one before. And so
do the tables of rotary positions, a row for each token of the micro-batch: a pass that goes back holds them to its end.
Source: AgileRL 2.8.2 algorithms/grpo.py (`learn`), core/base.py (`_fused_forward_no_grad`, `_get_logprobs`),
core/llm_ops/fused_logprobs.py; transformers 5.11 models/qwen2 (`Qwen2RotaryEmbedding.forward`, given positions of every
sequence); the compiled tile's graph: logits in the model's type, going back a sparse gradient in
fp32 beside them, then the logits' place is written over. torch 2.13 optim/adam.py (`_multi_tensor_adam`: a copy for the
square roots).
"""

from collections.abc import Iterable
from functools import lru_cache

from rlplan.memory.machine.segments import Segments, Tensor
from rlplan.memory.model.block import FLOAT_BYTES
from rlplan.memory.trainers.replay.gemma import GemmaPasses, Kinds
from rlplan.memory.trainers.replay.layer import CUBLAS_WORKSPACE, LayerPasses, LayerSizes
from rlplan.records import dataclass

UPDATES = 2
"""Micro-batches that are replayed at most: the second finds the moments of the first in its way, later ones no more."""


@dataclass(frozen=True)
class ReplayedUpdate:
    """One update."""

    layer: LayerSizes
    num_layers: int
    vocab_size: int
    sequences: int
    """Of a micro-batch."""
    stored: tuple[int, ...]
    """Bytes of each stored tensor, in the order in which they come to the GPU."""
    num_micro_batches: int
    """Each with a step of its own."""
    rows_at_once: int
    """Of logits, in a tile."""
    kinds: Kinds | None = None
    """All layers where they differ (gemma.py); `layer` is the first one's then."""

    @property
    def num_rows(self) -> int:
        """Tokens with logits: all but each sequence's last."""
        return self.layer.num_tokens - self.sequences


@dataclass(frozen=True)
class Reserved:
    """What an update came to, at most."""

    reserved: int
    allocated: int


@lru_cache(maxsize=512)
def replayed_peak(update: ReplayedUpdate) -> Reserved:
    """Bytes reserved and allocated at most in an update.

    Counts: every tensor of the update, in order, by the allocator's rules. Source: this module and layer.py.
    Assumes: the allocator is empty before; later segments lie at lower addresses, which decides which of two equal
    blocks is broken into. With rising ones eight of AgileRL's updates of 0.5B lack 150 to 300 MiB, two are met better.
    """
    segments = Segments(goes_down=True)
    replay = _Replay(update, segments) if update.kinds is None else _ReplayOfKinds(update, update.kinds, segments)
    replay.run()
    return Reserved(replay.segments.reserved, replay.segments.peak_allocated)


class _Replay:
    """One replay."""

    def __init__(self, update: ReplayedUpdate, segments: Segments) -> None:
        self.update, self.segments = update, segments
        self.passes = LayerPasses(update.layer, segments)
        self.copies: list[Tensor] | None = None
        self.moments: list[Tensor] = []
        self.tables: list[Tensor] = []
        """Attention's mask and the rotary positions, until the pass that goes back has ended."""
        self.has_workspace = False

    def run(self) -> None:
        for size in self.update.stored:
            self.segments.take(size)
        for is_policy in (False, True):
            self._set_copies([] if is_policy else None)
            hidden = self._forward([], has_gradient=False)
            self._give_copies()
            self.passes.give(self._tiles(), hidden)
        for _ in range(min(self.update.num_micro_batches, UPDATES)):
            self._micro_batch()

    def _micro_batch(self) -> None:
        entries: list[Tensor] = []
        self._set_copies([])
        hidden = self._forward(entries, has_gradient=True)
        self._give_copies()
        self.passes.give(self._tiles())
        of_rows = self._tiles(goes_back=True)
        self.passes.give(hidden)
        gradient = self._rows()
        self.passes.give(of_rows)
        self._backward(entries, gradient)
        self.passes.give(*self.tables)
        self._step(self._take_gradients())

    def _backward(self, entries: list[Tensor], gradient: Tensor) -> None:
        """Through the last norm and all layers, over the gradient of the last hidden states."""
        self.passes.give(entries.pop())
        while entries:
            self.passes.backward(entries.pop())
        self.passes.give(gradient)

    def _set_copies(self, copies: list[Tensor] | None) -> None:
        self.copies = self.passes.copies = copies

    def _take_gradients(self) -> list[Tensor]:
        found, self.passes.gradients = self.passes.gradients, []
        return found

    def _rows(self) -> Tensor:
        return self.passes.take(self.update.layer.block.hidden, self.update.layer.element_bytes)

    def _give_copies(self) -> None:
        self.passes.give(*(self.copies or ()))
        self._set_copies(None)

    def _forward(self, entries: list[Tensor], *, has_gradient: bool) -> Tensor:
        """All layers and the last norm. Returns the hidden states; entries get the layers' inputs and the norm's."""
        entry = self._rows()
        self.tables = self._tables_of_a_pass()
        for _ in range(self.update.num_layers):
            output = self.passes.forward(has_gradient=has_gradient)
            if has_gradient:
                entries.append(entry)
            else:
                self.passes.give(entry)
            entry = output
        hidden = self._rows()
        if has_gradient:
            entries.append(entry)
        else:
            self.passes.give(entry, *self.tables)
        return hidden

    def _tables_of_a_pass(self) -> list[Tensor]:
        """What all layers read: a mask of pairs as booleans, if there is one, and the tables of rotary positions."""
        pairs = self.update.layer.mask_pairs
        mask = [self.segments.take(pairs)] if pairs else []
        return mask + self._rotary_tables(self.update.layer.block.head_dim)

    def _rotary_tables(self, width: int) -> list[Tensor]:
        """Cosine and sine of each token's positions, in the model's type; made in fp32, of frequencies that stand twice
        beside each other.
        """
        take = self.passes.take
        working, wide = [take(width // 2, FLOAT_BYTES), take(width, FLOAT_BYTES)], []
        for _ in ("cosine", "sine"):
            unscaled = take(width, FLOAT_BYTES)
            wide.append(take(width, FLOAT_BYTES))
            self.passes.give(unscaled)
        if self.update.layer.element_bytes == FLOAT_BYTES:
            tables = wide
        else:
            tables = [take(width, self.update.layer.element_bytes) for _ in wide]
            working += wide
        self.passes.give(*working)
        return tables

    def _tiles(self, *, goes_back: bool = False) -> Tensor:
        """Logits of some rows after the other. Returns the log-probs, or the gradient of the rows."""
        update, take, give = self.update, self.segments.take, self.passes.give
        e, hidden, vocab = update.layer.element_bytes, update.layer.block.hidden, update.vocab_size
        copied = take(update.num_rows * hidden * e) if update.sequences > 1 else None
        answer = take(update.num_rows * (hidden if goes_back else 1) * e)
        for start in range(0, update.num_rows, update.rows_at_once):
            rows = min(update.rows_at_once, update.num_rows - start)
            logits = take(rows * vocab * e)
            if goes_back:
                self._take_workspace()
                give(take(rows * vocab * FLOAT_BYTES))
                give(take(rows * hidden * e))
            give(logits)
        give(copied)
        return answer

    def _take_workspace(self) -> None:
        """Of the thread that goes back, when its first product runs."""
        if not self.has_workspace:
            self.has_workspace = True
            self.segments.take(CUBLAS_WORKSPACE)

    def _step(self, gradients: list[Tensor]) -> None:
        if not self.moments:
            self.moments = self._like_adapters(copies=2)
        self.passes.give(*self._like_adapters())
        self.passes.give(*gradients)

    def _like_adapters(self, copies: int = 1) -> list[Tensor]:
        """Tensors of the adapters' sizes, in fp32."""
        rank = self.update.layer.rank
        return [self.segments.take(FLOAT_BYTES * rank * width) for width in self._widths() for _ in range(copies)]

    def _widths(self) -> Iterable[int]:
        """Numbers of each adapter, over the rank."""
        layer = self.update.layer
        return (width for _ in range(self.update.num_layers) for module in layer.modules.values() for width in module)


class _ReplayOfKinds(_Replay):
    """One replay of layers of several kinds."""

    def __init__(self, update: ReplayedUpdate, kinds: Kinds, segments: Segments) -> None:
        super().__init__(update, segments)
        self.kinds, self.layers = kinds, GemmaPasses(kinds, segments)

    def _forward(self, entries: list[Tensor], *, has_gradient: bool) -> Tensor:
        self.tables = [self.segments.take(size) for size in self.kinds.mask_bytes]
        for width in self.kinds.head_widths:
            self.tables += self._rotary_tables(width)
        hidden = self.layers.forward(has_gradient=has_gradient)
        if not has_gradient:
            self.passes.give(*self.tables)
        return hidden

    def _backward(self, entries: list[Tensor], gradient: Tensor) -> None:
        self.layers.backward(gradient)

    def _set_copies(self, copies: list[Tensor] | None) -> None:
        self.copies = copies
        self.layers.set_copies(copies)

    def _take_gradients(self) -> list[Tensor]:
        return self.layers.take_gradients()

    def _widths(self) -> Iterable[int]:
        return self.kinds.adapter_widths()
