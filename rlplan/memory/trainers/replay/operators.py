"""Operators of plain modules, tensor by tensor: norms in fp32, rotary positions, sums, products, activations.

In: a tape, sizes, the tensors that an operator reads. Out: its result; the allocator, used. An operator gives back what
it makes and nobody reads again, never what it was given. Left out: adapters (layer.py), attention (attention.py).

Each follows what transformers 5 writes out in torch's operators: a norm in fp32, its input's copy and the scales kept,
six tensors in fp32 going back; rotary positions of one tensor at a time. Liger's norm and gated activation beside them.
Source: transformers 5.11 models/gemma4 (`Gemma4RMSNorm`, `apply_rotary_pos_emb`), traced with 5.19 under fake tensors.
"""

from rlplan.memory.model.block import FLOAT_BYTES
from rlplan.memory.trainers.replay.tape import Tape, Value

HALF_BYTES = 2

NORM_ROWS = 108
"""Multiprocessors of an A100."""


class Operators:
    """Operators over one tape, for a number of tokens."""

    def __init__(self, tape: Tape, num_tokens: int) -> None:
        self.tape, self.num_tokens = tape, num_tokens

    def rows(self, width: int, element_bytes: int = HALF_BYTES) -> Value:
        """A tensor of all tokens."""
        return self.tape.new(self.num_tokens * width * element_bytes)

    def norm(self, rows: Value, width: int, heads: int = 1, *, has_weight: bool = True) -> Value:
        """A norm in fp32 over each of some heads of a row."""
        drop = self.tape.drop
        wide, square, mean = self.rows(width, FLOAT_BYTES), self.rows(width, FLOAT_BYTES), self._scales(heads)
        drop(square)
        shifted = self._scales(heads)
        drop(mean)
        scales, normed = self._scales(heads), self.rows(width, FLOAT_BYTES)

        def back(gradient: Value) -> None:
            copy = self.rows(width, FLOAT_BYTES)
            drop(gradient)
            if has_weight:
                weighed = self.rows(width, FLOAT_BYTES)
                drop(copy)
                copy = weighed
            of_scales, of_rows = self.rows(width, FLOAT_BYTES), self.rows(width, FLOAT_BYTES)
            drop(of_scales, copy)
            of_mean, power = self.rows(width, FLOAT_BYTES), self.rows(width, FLOAT_BYTES)
            twice, of_square = self.rows(width, FLOAT_BYTES), self.rows(width, FLOAT_BYTES)
            drop(twice, power, of_mean, of_square)
            result = self.rows(width)
            drop(of_rows)
            self.tape.flow(rows, result)

        kept = self.tape.keep(wide, shifted, scales)
        drop(scales, wide, shifted)
        if has_weight:
            weighed = self.rows(width, FLOAT_BYTES)
            drop(normed)
            normed = weighed
        result = self.rows(width)
        drop(normed)
        return self.tape.then(result, kept, back)

    def fused_norm(self, rows: Value, width: int, heads: int = 1) -> Value:
        """Liger's norm, which keeps its input; a gradient of its weight for each multiprocessor lives for a moment."""

        def back(gradient: Value) -> None:
            of_weight, result = self.tape.new(NORM_ROWS * width // heads * FLOAT_BYTES), self.rows(width)
            self.tape.drop(of_weight, gradient)
            self.tape.flow(rows, result)

        result, scales = self.rows(width), self._scales(heads)
        kept = self.tape.keep(rows, scales)
        self.tape.drop(scales)
        return self.tape.then(result, kept, back)

    def gated(self, gate: Value, up: Value, width: int) -> Value:
        """Liger's activation and product, which writes both gradients over what it read."""

        def back(gradient: Value) -> None:
            self.tape.drop(gradient)
            for value in self.tape.keep(up, gate):
                self.tape.flow(value, value)

        return self.tape.then(self.rows(width), self.tape.keep(gate, up), back)

    def rotary(self, rows: Value, width: int) -> Value:
        """Rows turned by their positions; the tables are everybody's."""
        drop = self.tape.drop
        by_cosine, negative = self.rows(width), self.rows(width // 2)
        turned = self.rows(width)
        drop(negative)
        by_sine = self.rows(width)
        drop(turned)
        result = self.rows(width)
        drop(by_cosine, by_sine)

        def back(gradient: Value) -> None:
            by_sine, negative = self.rows(width), self.rows(width // 2)
            low = self.rows(width)
            drop(negative)
            high = self.rows(width)
            drop(by_sine, high)
            by_cosine = self.rows(width)
            drop(gradient, by_cosine)
            self.tape.flow(rows, low)

        return self.tape.then(result, (), back)

    def add(self, rows: Value, others: Value | None, width: int) -> Value:
        """A sum, whose gradient is that of both. others: None where they need none."""

        def back(gradient: Value) -> None:
            if others is not None:
                gradient.holders += 1
                self.tape.flow(others, gradient)
            self.tape.flow(rows, gradient)

        return self.tape.then(self.rows(width), (), back)

    def activated(self, rows: Value, width: int) -> Value:
        """GELU by one kernel, which keeps what it reads."""

        def back(gradient: Value) -> None:
            result = self.rows(width)
            self.tape.drop(gradient)
            self.tape.flow(rows, result)

        result = self.rows(width)
        return self.tape.then(result, self.tape.keep(rows), back)

    def product(self, rows: Value, others: Value, width: int) -> Value:
        """Element by element; both are kept."""

        def back(gradient: Value) -> None:
            of_rows, of_others = self.rows(width), self.rows(width)
            self.tape.drop(gradient)
            self.tape.flow(others, of_others)
            self.tape.flow(rows, of_rows)

        result = self.rows(width)
        return self.tape.then(result, self.tape.keep(rows, others), back)

    def scaled(self, rows: Value, width: int) -> Value:
        """By a number."""

        def back(gradient: Value) -> None:
            result = self.rows(width)
            self.tape.drop(gradient)
            self.tape.flow(rows, result)

        return self.tape.then(self.rows(width), (), back)

    def linear(self, rows: Value, into: int, out: int) -> Value:
        """A product with a frozen weight, which keeps nothing."""

        def back(gradient: Value) -> None:
            result = self.rows(into)
            self.tape.drop(gradient)
            self.tape.flow(rows, result)

        return self.tape.then(self.rows(out), (), back)

    def _scales(self, heads: int) -> Value:
        return self.rows(heads, FLOAT_BYTES)
