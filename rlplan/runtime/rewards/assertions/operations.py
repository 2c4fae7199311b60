"""Operators that assertions may use, on plain values that a program may have crafted.

In: values of Python's builtin types. Out: Python's results at a bounded cost: every operation first spends steps of a
budget, numbers and texts cannot grow without bound, and keys that were crafted to collide are refused.
Left out: values of other types, which could run their own code; the sandbox lets none of them out.
"""

import operator
from collections.abc import Callable, Iterable
from typing import Any

from rlplan.runtime.sandbox.values import refuse_crowd

MAX_STEPS = 1_000_000
"""Steps of one assertion, about a second in the driver. 200,000 integers, more than a result can hold, need half of
them."""
MAX_INT_BITS = 1 << 16
"""Bits of an integer in arithmetic."""
TEXTS = (str, bytes)
SEQUENCES = (str, bytes, list, tuple)
_NUMBERS = (bool, int, float, complex)
_SETS = (set, frozenset)


class TooMuchError(ValueError):
    """Raised where an assertion needs too many steps, or too large a value."""


class Budget:
    """Remaining steps of one evaluation."""

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self.left = steps

    def spend(self, steps: int) -> None:
        """Use up steps. Raises: TooMuchError where too few remain."""
        self.left -= steps
        if self.left < 0:
            raise TooMuchError(f"more than {MAX_STEPS} steps")

    def weigh(self, value: Any) -> None:
        """Spend the steps for reading a value with all its content."""
        todo = [value]
        while todo:
            each = todo.pop()
            kind = type(each)
            if kind is int:  # one step per 64 bits of a number, and per 64 characters of a text
                self.spend(1 + each.bit_length() // 64)
            elif kind in TEXTS:
                self.spend(1 + len(each) // 64)
            elif kind in (list, tuple, set, frozenset, dict):
                self.spend(1 + len(each))
                todo.extend(each)
                todo.extend(each.values() if kind is dict else ())
            else:
                self.spend(1)


def number(budget: Budget, value: Any) -> Any:
    """The value itself, if it is a number of bounded size. Raises: TypeError, TooMuchError."""
    if type(value) not in _NUMBERS:
        raise TypeError(f"a {type(value).__name__} is no number")
    if type(value) is int:
        bits = value.bit_length()
        budget.spend(1 + bits // 64)
        if bits > MAX_INT_BITS:
            raise TooMuchError(f"an integer of more than {MAX_INT_BITS} bits")
    return value


def items(budget: Budget, values: Iterable[Any]) -> list[Any]:
    """The elements of an iterable as a list. Raises: TooMuchError."""
    elements = []
    for each in values:
        budget.weigh(each)
        elements.append(each)
    return elements


def keys(budget: Budget, values: Iterable[Any]) -> list[Any]:
    """The elements as members of a set. Raises: ValueError for elements that were crafted to collide."""
    elements = items(budget, values)
    refuse_crowd(elements)
    return elements


def _calculate(apply: Callable[[Any, Any], Any]) -> Callable[[Budget, Any, Any], Any]:
    return lambda budget, a, b: apply(number(budget, a), number(budget, b))


def _add(budget: Budget, a: Any, b: Any) -> Any:
    if type(a) is type(b) and type(a) in SEQUENCES:
        budget.spend(len(a) + len(b))
        return a + b
    return number(budget, a) + number(budget, b)


def _subtract(budget: Budget, a: Any, b: Any) -> Any:
    return _combine_sets(operator.sub)(budget, a, b) if type(a) in _SETS else _calculate(operator.sub)(budget, a, b)


def _multiply(budget: Budget, a: Any, b: Any) -> Any:
    if type(a) in SEQUENCES or type(b) in SEQUENCES:
        sequence, count = (a, b) if type(a) in SEQUENCES else (b, a)
        budget.spend(len(sequence) * max(0, operator.index(count)))
        return sequence * count
    return number(budget, a) * number(budget, b)


def _power(budget: Budget, a: Any, b: Any) -> Any:
    a, b = number(budget, a), number(budget, b)
    if isinstance(a, int) and isinstance(b, int):
        bits = a.bit_length() * abs(b)
        if bits > MAX_INT_BITS:
            raise TooMuchError(f"a power of more than {MAX_INT_BITS} bits")
        budget.spend(bits // 64)
    return a**b


def _combine_sets(apply: Callable[[Any, Any], Any]) -> Callable[[Budget, Any, Any], Any]:
    def combine(budget: Budget, a: Any, b: Any) -> Any:
        if type(a) not in _SETS or type(b) not in _SETS:
            raise TypeError("only sets are combined")
        budget.weigh(a)
        budget.weigh(b)
        return apply(a, b)

    return combine


def _compare(apply: Callable[[Any, Any], Any]) -> Callable[[Budget, Any, Any], Any]:
    def compare(budget: Budget, a: Any, b: Any) -> Any:
        budget.weigh(min(a, b, key=size))  # a comparison stops at the end of the smaller one
        return apply(a, b)

    return compare


def size(value: Any) -> int:
    """The number of items in a value; 0 for a value that is no container."""
    return len(value) if type(value) in (*SEQUENCES, *_SETS, dict) else 0


def _contains(budget: Budget, a: Any, b: Any) -> bool:
    budget.weigh(a)
    if type(b) not in (*_SETS, dict, range):
        budget.weigh(b)
    return a in b


ARITHMETIC: dict[str, Callable[[Budget, Any, Any], Any]] = {
    "Add": _add,
    "Sub": _subtract,
    "Mult": _multiply,
    "Pow": _power,
    "Div": _calculate(operator.truediv),
    "FloorDiv": _calculate(operator.floordiv),
    "Mod": _calculate(operator.mod),
    "BitAnd": _combine_sets(operator.and_),
    "BitOr": _combine_sets(operator.or_),
    "BitXor": _combine_sets(operator.xor),
}
"""Binary operators by the names of their nodes in `ast`."""
SIGNS: dict[str, Callable[[Budget, Any], Any]] = {
    "Not": lambda _, value: not value,
    "USub": lambda budget, value: -number(budget, value),
    "UAdd": lambda budget, value: +number(budget, value),
}
COMPARISONS: dict[str, Callable[[Budget, Any, Any], Any]] = {
    "Eq": _compare(operator.eq),
    "NotEq": _compare(operator.ne),
    "Lt": _compare(operator.lt),
    "LtE": _compare(operator.le),
    "Gt": _compare(operator.gt),
    "GtE": _compare(operator.ge),
    "Is": lambda _, a, b: a is b,
    "IsNot": lambda _, a, b: a is not b,
    "In": _contains,
    "NotIn": lambda budget, a, b: not _contains(budget, a, b),
}
