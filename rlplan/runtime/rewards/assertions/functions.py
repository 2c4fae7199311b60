"""Functions that assertions may use: Python's own, on plain values and at a bounded cost.

In: a budget, and values that a program may have crafted. Out: Python's results.
Differs: `zip` requires equal lengths, so that an empty result does not pass as a right one.
Left out: functions that take a function (`map`, `key=`), that reveal one (`getattr`, `type`), and that print or read.
"""

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rlplan.runtime.rewards.assertions.operations import TEXTS, Budget, TooMuchError, items, keys, number, size

MAX_DIGITS = 400
"""Digits of round(): more than any float has on either side of the decimal point."""
MAX_NUMERAL = 4300
"""Characters of a text that becomes a number: Python's own limit on digits."""


def _round(budget: Budget, value: Any, ndigits: Any = None) -> Any:
    if ndigits is not None and abs(operator.index(ndigits)) > MAX_DIGITS:
        raise TooMuchError(f"rounding to more than {MAX_DIGITS} digits")
    return round(number(budget, value), ndigits)


def _sum(budget: Budget, values: Iterable[Any], /, start: Any = 0) -> Any:
    return sum((number(budget, each) for each in values), number(budget, start))


def _take_several(choose: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    def function(budget: Budget, first: Any, /, *others: Any) -> Any:
        return choose(items(budget, (first, *others) if others else first))

    return function


def _sort(budget: Budget, values: Iterable[Any], /, *, reverse: Any = False) -> list[Any]:
    before = budget.left
    elements = items(budget, values)
    # a sort compares each element about log2(n) times
    budget.spend((before - budget.left) * len(elements).bit_length() // 16)
    return sorted(elements, reverse=bool(reverse))


def _search_until(stops_at: bool) -> Callable[..., bool]:
    """all() or any(), which stop at the first value of this truth."""

    def function(budget: Budget, values: Iterable[Any], /) -> bool:
        for each in values:
            budget.spend(1)
            if bool(each) is stops_at:
                return stops_at
        return not stops_at

    return function


def zip_equal(budget: Budget, /, *values: Any, strict: Any = True) -> Iterator[Any]:
    """zip() of equal lengths. Raises: ValueError for different lengths, before any element is read."""
    assert strict, "what is not strict is refused when it is read"
    columns = [each if size(each) else items(budget, each) for each in values]
    if len({len(each) for each in columns}) > 1:
        raise ValueError("zip() of different lengths")
    return iter(list(zip(*(items(budget, each) for each in columns), strict=True)))


def zip_shortest(budget: Budget, /, *values: Any, strict: Any = False) -> Iterator[Any]:
    """Python's zip()."""
    return iter(list(zip(*(items(budget, each) for each in values), strict=bool(strict))))


def _convert_to_text(budget: Budget, value: Any = "", /) -> str:
    budget.weigh(value)
    return str(value)


def _is_close(budget: Budget, a: Any, b: Any, *, rel_tol: Any = 1e-9, abs_tol: Any = 0.0) -> bool:
    first, second, relative, absolute = (number(budget, each) for each in (a, b, rel_tol, abs_tol))
    return math.isclose(first, second, rel_tol=relative, abs_tol=absolute)


def _apply_to_number(apply: Callable[[Any], Any]) -> Callable[..., Any]:
    def function(budget: Budget, value: Any, /) -> Any:
        return apply(number(budget, value))

    return function


def _convert_to_number(kind: Callable[[Any], Any]) -> Callable[..., Any]:
    def function(budget: Budget, value: Any = 0, /) -> Any:
        if type(value) not in TEXTS:
            return kind(number(budget, value))
        if len(value) > MAX_NUMERAL:
            raise TooMuchError(f"a numeral of more than {MAX_NUMERAL} characters")
        return kind(value)

    return function


def make_list(budget: Budget, values: Iterable[Any] = (), /) -> list[Any]:
    """list(), a display or a comprehension."""
    return items(budget, values)


def make_tuple(budget: Budget, values: Iterable[Any] = (), /) -> tuple[Any, ...]:
    """tuple() or a display."""
    return tuple(items(budget, values))


def make_set(budget: Budget, values: Iterable[Any] = (), /) -> set[Any]:
    """set(), a display or a comprehension. Raises: ValueError for members that were crafted to collide."""
    return set(keys(budget, values))


def make_dict(budget: Budget, pairs: Any = (), /, **named: Any) -> dict[Any, Any]:
    """dict(), a display or a comprehension. Raises: ValueError for keys that were crafted to collide."""
    entries = [(key, value) for key, value in items(budget, pairs.items() if type(pairs) is dict else pairs)]
    keys(budget, (key for key, _ in entries))
    return dict(entries, **named)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": _apply_to_number(abs),
    "all": _search_until(stops_at=False),
    "any": _search_until(stops_at=True),
    "bool": lambda _, value=None, /: bool(value),
    "dict": make_dict,
    "enumerate": lambda budget, values, start=0: iter(list(enumerate(items(budget, values), start))),
    "float": _convert_to_number(float),
    "frozenset": lambda budget, values=(), /: frozenset(keys(budget, values)),
    "int": _convert_to_number(int),
    "isclose": _is_close,
    "len": lambda _, value, /: len(value),
    "list": make_list,
    "math.ceil": _apply_to_number(math.ceil),
    "math.fabs": _apply_to_number(math.fabs),
    "math.floor": _apply_to_number(math.floor),
    "math.isclose": _is_close,
    "math.isinf": _apply_to_number(math.isinf),
    "math.isnan": _apply_to_number(math.isnan),
    "math.sqrt": _apply_to_number(math.sqrt),
    "max": _take_several(max),
    "min": _take_several(min),
    "range": lambda _, first, /, *others: range(first, *others),
    "reversed": lambda budget, values, /: iter(items(budget, reversed(values))),
    "round": _round,
    "set": make_set,
    "sorted": _sort,
    "str": _convert_to_text,
    "sum": _sum,
    "tuple": make_tuple,
    "zip": zip_equal,
}
"""Functions by their names in tests. Each takes a budget before its own arguments."""
ITERATING = frozenset({"all", "any", "enumerate", "frozenset", "list", "set", "sorted", "sum", "tuple", "zip"})
"""Functions that only iterate over their argument, which may therefore be a generator."""
