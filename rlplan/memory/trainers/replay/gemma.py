"""Layers of Gemma 4 with adapters, tensor by tensor: what their passes take from the allocator and give back.

In: each layer's kind, a micro-batch, the allocator (segments.py). Out: the same allocator, used.
Left out: a base in 4 bits, experts, encoders of images and sound.

What sets them apart is data: two widths of heads, keys that later layers take from earlier ones, an input of its own
for each layer, modules that are not adapted, how each kind attends, whether Liger's kernels are in (its 0.8.0 has none
for `gemma4`, 0.8.1 has). Every layer is a list of operators (operators.py) over a tape, and its backward pass follows.
The first hidden states need a gradient, as transformers asks for under recomputation, and with them the inputs of all
layers; each layer hands on a gradient of the size of all of them.
Source: transformers 5.11 models/gemma4 (`Gemma4TextDecoderLayer.forward`, `project_per_layer_inputs`),
modeling_utils.py (`enable_input_require_grads`); Liger-Kernel 0.8.1 transformers/monkey_patch.py
(`apply_liger_kernel_to_gemma4`); traced with transformers 5.19 and PEFT 0.21 under fake tensors.
"""

from collections.abc import Callable, Iterator

from rlplan.memory.machine.segments import Segments, Tensor
from rlplan.memory.model.block import Block
from rlplan.memory.trainers.replay.attention import Sequences, Way, attended
from rlplan.memory.trainers.replay.layer import LayerPasses, LayerSizes
from rlplan.memory.trainers.replay.operators import Operators
from rlplan.memory.trainers.replay.tape import Tape, Value
from rlplan.records import dataclass

LAYER_INPUT = ("per_layer_input_gate", "per_layer_projection")
"""Modules through which a layer reads its own input."""
MODEL_INPUT = "per_layer_model_projection"


@dataclass(frozen=True)
class Kind:
    """One layer of several kinds."""

    block: Block
    way: Way
    """How it attends."""
    adapted: frozenset[str]
    """Modules with adapters, in the words of `LayerSizes.modules` and `LAYER_INPUT`."""
    keys_of: int | None = None
    """The layer whose keys and values it takes."""


@dataclass(frozen=True)
class Kinds:
    """All layers of a model."""

    layers: tuple[Kind, ...]
    sequences: Sequences
    rank: int
    has_liger: bool = False
    """Liger's norms and activations, but for norms of values and behind layers' own inputs."""
    mask_bytes: tuple[int, ...] = ()
    """Of the booleans that all layers of a kind share."""

    @property
    def layer_input(self) -> int:
        """Width of each layer's own input."""
        return self.layers[0].block.per_layer_width

    @property
    def head_widths(self) -> tuple[int, ...]:
        """Of a head, each once."""
        return tuple(dict.fromkeys(kind.block.head_dim for kind in self.layers))

    def adapter_widths(self) -> Iterator[int]:
        """Numbers of each adapter, over the rank."""
        hidden = self.layers[0].block.hidden
        if MODEL_INPUT in self.layers[0].adapted:
            yield from (hidden, len(self.layers) * self.layer_input)
        for kind in self.layers:
            for name, widths in module_widths(kind.block).items():
                if name in kind.adapted and (kind.keys_of is None or name not in ("k", "v")):
                    yield from widths


def module_widths(block: Block) -> dict[str, tuple[int, int]]:
    """Width of the input and of the output of each linear layer."""
    own = LayerSizes(block, 1, 1).modules
    if not block.per_layer_width:
        return own
    gate, projection = LAYER_INPUT
    wide = block.hidden, block.per_layer_width
    return own | {gate: wide, projection: wide[::-1]}


class GemmaPasses:
    """The passes of all layers over one allocator."""

    def __init__(self, kinds: Kinds, segments: Segments) -> None:
        self.kinds, self.segments = kinds, segments
        tokens, num = kinds.sequences.num_tokens, len(kinds.layers)
        self.parts = {
            block: LayerPasses(LayerSizes(block, tokens, kinds.rank), segments)
            for block in {kind.block for kind in kinds.layers}
        }
        for block, part in self.parts.items():
            part.modules = module_widths(block) | {MODEL_INPUT: (block.hidden, num * block.per_layer_width)}
        self._has_gradient = False
        self._begun, self._ended = self._operators(keeps=False), self._operators(keeps=False)
        """What is before all layers, and the last norm."""
        self._entries: list[Value] = []
        """Inputs of layers that wait, and the last one's output."""
        self._hidden: Value | None = None
        self._inputs: Value | None = None
        """What layers read of their own."""
        self._shared: dict[int, tuple[Value, Value]] = {}
        """Keys and values that later layers take, by the layer that made them."""

    def set_copies(self, copies: list[Tensor] | None) -> None:
        """Where autocast keeps adapters in 16 bits until a forward pass ends, if it does."""
        for part in self.parts.values():
            part.copies = copies

    def take_gradients(self) -> list[Tensor]:
        """All adapters' gradients, which are the caller's then."""
        found = [gradient for part in self.parts.values() for gradient in part.gradients]
        for part in self.parts.values():
            part.gradients = []
        return found

    def forward(self, *, has_gradient: bool) -> Tensor:
        """A forward pass. Returns the last hidden states, which are the caller's."""
        self._has_gradient, self._shared = has_gradient, {}
        self._begun, self._ended = self._operators(keeps=has_gradient), self._operators(keeps=has_gradient)
        entry, drop = self._begin(), self._begun.tape.drop
        for place in range(len(self.kinds.layers)):
            result, before = self._layer(self._operators(keeps=False), place, entry)
            drop(before)
            self._entries.append(entry)
            if not has_gradient:
                drop(self._entries.pop())
            entry = result
        self._hidden = self._norm(self._ended, entry, self.kinds.layers[0].block.hidden)
        drop(entry)
        self._entries.append(entry)
        if not has_gradient:
            self._entries.clear()
            self._end()
        return self._hidden.block

    def backward(self, gradient: Tensor) -> None:
        """Back through all, given the gradient of the last hidden states, which is taken over."""
        assert self._hidden is not None
        self._hidden.gradient = Value(gradient)
        self._ended.tape.backward()
        found = self._entries.pop().gradient
        for place in reversed(range(len(self.kinds.layers))):
            assert found is not None
            found = self._back(place, self._entries[-1], found)
            if place:
                self._begun.tape.drop(self._entries.pop())
        first = self._entries.pop()
        first.gradient = found
        self._begun.tape.backward()
        self._begun.tape.drop(first.gradient, first)
        self._end()

    def _end(self) -> None:
        """What was held for all layers goes."""
        drop = self._begun.tape.drop
        drop(self._inputs)
        self._inputs = None
        for shared in self._shared.values():
            drop(*shared)
        self._shared = {}

    def _operators(self, *, keeps: bool) -> Operators:
        return Operators(Tape(self.segments, keeps=keeps), self.kinds.sequences.num_tokens)

    def _begin(self) -> Value:
        """Hidden states, and what every layer reads of its own, which is held until the pass has gone back."""
        o, hidden, num = self._begun, self.kinds.layers[0].block.hidden, len(self.kinds.layers)
        width, drop = num * self.kinds.layer_input, self._begun.tape.drop
        looked_up, entry = o.rows(hidden), o.rows(hidden)
        drop(looked_up)
        if not width:
            return entry
        looked_up, named = o.rows(width), o.rows(width)
        drop(looked_up)
        projected = self._linear(o, self.kinds.layers[0], MODEL_INPUT, entry)
        scaled = o.scaled(projected, width)
        drop(projected)
        normed = o.norm(scaled, width, num)
        drop(scaled)
        both = o.add(normed, None, width)
        self._inputs = o.scaled(both, width)
        drop(both, normed, named)
        return entry

    def _back(self, place: int, entry: Value, gradient: Value) -> Value | None:
        """One layer computed anew and gone back through. Returns the gradient of its input."""
        operators, kind = self._operators(keeps=True), self.kinds.layers[place]
        tape, own = operators.tape, self._inputs
        self._inputs = None if own is None else Value(own.block)
        result, before = self._layer(operators, place, entry)
        tape.drop(result, before)
        result.gradient = operators.rows(kind.block.hidden)
        tape.drop(gradient)
        tape.backward()
        if own is not None and self._inputs is not None:
            whole = operators.rows(len(self.kinds.layers) * self.kinds.layer_input)
            tape.drop(self._inputs.gradient)
            tape.flow(own, whole)
        self._inputs = own
        return entry.gradient

    def _layer(self, o: Operators, place: int, entry: Value) -> tuple[Value, Value]:
        """All operators of a layer. Returns its output and the hidden states before the last sum."""
        kind, hidden, drop = self.kinds.layers[place], self.kinds.layers[place].block.hidden, o.tape.drop
        between = self._added(o, entry, hidden, lambda rows: self._attention(o, place, rows))
        after = self._added(o, between, hidden, lambda rows: self._mlp(o, kind, rows))
        drop(between)
        if self._inputs is None:
            after.holders += 1
            return after, after
        found = self._input(o, kind, after, self._inputs)
        normed = o.norm(found, hidden)
        drop(found)
        result = o.add(after, normed, hidden)
        drop(normed)
        return result, after

    def _added(self, o: Operators, entry: Value, hidden: int, inner: Callable[[Value], Value]) -> Value:
        """Hidden states with what a part of a layer adds to them, normed before it and behind it."""
        rows = self._norm(o, entry, hidden)
        found = inner(rows)
        o.tape.drop(rows)
        normed = self._norm(o, found, hidden)
        o.tape.drop(found)
        total = o.add(entry, normed, hidden)
        o.tape.drop(normed)
        return total

    def _attention(self, o: Operators, place: int, rows: Value) -> Value:
        kind, drop = self.kinds.layers[place], o.tape.drop
        block = kind.block
        projected = self._linear(o, kind, "q", rows)
        normed = self._norm(o, projected, block.q, block.num_heads)
        drop(projected)
        queries = o.rotary(normed, block.q)
        drop(normed)
        keys, values = self._keys(o, place, rows)
        found = attended(o, block, self.kinds.sequences, kind.way, (queries, keys, values))
        result = self._linear(o, kind, "o", found)
        drop(found, queries, keys, values)
        return result

    def _keys(self, o: Operators, place: int, rows: Value) -> tuple[Value, Value]:
        """Keys and values, held once more for the layer."""
        kind, drop = self.kinds.layers[place], o.tape.drop
        block = kind.block
        if kind.keys_of is not None:
            shared = self._shared[kind.keys_of]
            for value in shared:
                value.holders += 1
            return shared
        keys, values = self._linear(o, kind, "k", rows), self._linear(o, kind, "v", rows)
        normed = self._norm(o, keys, block.k, block.num_kv_heads)
        drop(keys)
        turned = o.rotary(normed, block.k)
        drop(normed)
        normed_values = o.norm(values, block.k, block.num_kv_heads, has_weight=False)
        drop(values)
        if any(other.keys_of == place for other in self.kinds.layers):
            for value, before in zip((turned, normed_values), self._shared.pop(place, (None, None)), strict=True):
                value.holders += 1
                if before is not None:
                    value.gradient = before.gradient
                    drop(before)
            self._shared[place] = turned, normed_values
        return turned, normed_values

    def _norm(self, o: Operators, rows: Value, width: int, heads: int = 1) -> Value:
        return (o.fused_norm if self.kinds.has_liger else o.norm)(rows, width, heads)

    def _mlp(self, o: Operators, kind: Kind, rows: Value) -> Value:
        drop, width = o.tape.drop, kind.block.intermediate
        gate = self._linear(o, kind, "gate", rows)
        activated = None if self.kinds.has_liger else o.activated(gate, width)
        drop(None if activated is None else gate)
        up = self._linear(o, kind, "up", rows)
        product = o.gated(gate, up, width) if activated is None else o.product(activated, up, width)
        drop(activated or gate, up)
        result = self._linear(o, kind, "down", product)
        drop(product)
        return result

    def _input(self, o: Operators, kind: Kind, rows: Value, own: Value) -> Value:
        """What a layer reads of its own input."""
        drop, width = o.tape.drop, kind.block.per_layer_width
        gate = self._linear(o, kind, LAYER_INPUT[0], rows)
        activated = o.activated(gate, width)
        drop(gate)
        product = o.product(activated, own, width)
        drop(activated)
        result = self._linear(o, kind, LAYER_INPUT[1], product)
        drop(product)
        return result

    def _linear(self, o: Operators, kind: Kind, name: str, rows: Value) -> Value:
        """A linear layer, with its adapter where it has one."""
        part = self.parts[kind.block]
        into, out = part.modules[name]
        if name not in kind.adapted:
            return o.linear(rows, into, out)
        block, kept = part.product(name, self._has_gradient, keeps=o.tape.keeps)

        def back(gradient: Value) -> None:
            before = rows.gradient
            place = before.block if before is not None and before.holders == 1 else None
            found = part.back(name, kept, None, into=place)
            o.tape.drop(gradient)
            if place is None:
                o.tape.flow(rows, Value(found))

        return o.tape.then(Value(block), (), back)
