"""A tape: what autograd keeps of a pass and takes going back through it, over torch's allocator.

In: operators in the order in which a module runs them, each with what it keeps and what its backward pass takes.
Out: the allocator (segments.py), used. Left out: values, and what operators do.

The rules. A tensor is given back when nobody holds it any more: the module, an operator that reads it going back, or
several gradients that it stands for. Operators go back in reverse order; each is handed the gradient of its result,
gives that and what it kept back when it has run, and hands on gradients of its inputs. Where an input has one already
the two are added in one of their places, if nobody else holds that one.
Source: torch 2.13 autograd/engine.cpp (`evaluate_function`), input_buffer.cpp (`accumulate`).
"""

from collections.abc import Callable

from rlplan.memory.machine.segments import Segments, Tensor


class Value:
    """A tensor of a pass, by who holds it, and its gradient going back."""

    __slots__ = ("block", "gradient", "holders")

    def __init__(self, block: Tensor) -> None:
        self.block, self.holders = block, 1
        self.gradient: Value | None = None


Back = Callable[[Value], None]
"""An operator's backward pass: takes the gradient of its result over, and gives it back."""


class Tape:
    """Operators of one pass. keeps: whether a backward pass follows, for which tensors are kept."""

    def __init__(self, segments: Segments, *, keeps: bool) -> None:
        self.segments, self.keeps = segments, keeps
        self._nodes: list[tuple[Value, tuple[Value, ...], Back]] = []

    def new(self, num_bytes: int) -> Value:
        """A tensor, held by who asked."""
        return Value(self.segments.take(num_bytes))

    def drop(self, *values: Value | None) -> None:
        """One holder less of each."""
        for value in values:
            if value is not None:
                value.holders -= 1
                if not value.holders:
                    self.segments.give(value.block)

    def keep(self, *values: Value) -> tuple[Value, ...]:
        """Hold tensors for a backward pass, if one follows."""
        if not self.keeps:
            return ()
        for value in values:
            value.holders += 1
        return values

    def then(self, result: Value, kept: tuple[Value, ...], back: Back) -> Value:
        """An operator has given its result. kept: what `keep` said of it.

        >>> tape = Tape(Segments(), keeps=True)
        >>> rows, result = tape.new(512), tape.new(512)
        >>> tape.drop(tape.then(result, tape.keep(rows), tape.drop), rows)
        >>> tape.segments.allocated  # the rows, which the operator keeps
        512
        """
        if self.keeps:
            self._nodes.append((result, kept, back))
        return result

    def flow(self, value: Value, gradient: Value) -> None:
        """A gradient of a value: its first, or added to what is there."""
        before = value.gradient
        if before is None:
            value.gradient = gradient
        elif before.holders == 1:
            self.drop(gradient)
        else:
            self.drop(before)
            value.gradient = gradient

    def backward(self) -> None:
        """All operators, from the last to the first. Values have their gradients before."""
        while self._nodes:
            result, kept, back = self._nodes.pop()
            gradient, result.gradient = result.gradient, None
            if gradient is not None:
                back(gradient)
            self.drop(*kept)
