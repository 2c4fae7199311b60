"""Evaluator of test expressions over results that came out of the sandbox.

It runs in the driver's process on values that a program may have crafted. So every operation has a bounded cost, and
only plain Python values occur. It refuses an expression that it cannot evaluate when the expression is read, unlike the
evaluator of foreign scripts (foreign/python).

In: the tree of an expression, written by the data set's author, and values by name, returned by a program. Out: its
value. Left out: attributes, imports, lambdas and names other than those of values and of functions.py.
"""

import ast
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from rlplan.runtime.rewards.assertions.functions import (
    FUNCTIONS,
    make_dict,
    make_list,
    make_set,
    make_tuple,
    zip_equal,
    zip_shortest,
)
from rlplan.runtime.rewards.assertions.operations import ARITHMETIC, COMPARISONS, SIGNS, Budget
from rlplan.runtime.rewards.assertions.trees import (
    UnreadableTestsError,
    get_dotted_name,
    is_single,
    refuse_node,
    shorten_node,
)

FAULTS = (ArithmeticError, LookupError, TypeError, ValueError, MemoryError, RecursionError)
"""Exceptions of an expression whose values do not fit: the assertion then fails."""
_DISPLAYS = {ast.List: make_list, ast.Tuple: make_tuple, ast.Set: make_set}


@dataclass(frozen=True, slots=True)
class Frame:
    """The values of names, and the remaining budget."""

    names: dict[str, Any]
    budget: Budget


Compute = Callable[[Frame], Any]
_Build = Callable[[Any, frozenset[str]], Compute]


def evaluate(compute: Compute, names: Mapping[str, Any]) -> Any:
    """The value of a compiled expression. Raises: one of FAULTS."""
    return compute(Frame(dict(names), Budget()))


def read_expression(node: ast.expr, names: frozenset[str]) -> Compute:
    """A compiled expression over these names. Raises: UnreadableTestsError."""
    if isinstance(node, ast.Constant | ast.UnaryOp | ast.List | ast.Tuple | ast.Set | ast.Dict):
        try:  # a large literal becomes one constant instead of a function per element
            return _make_constant(ast.literal_eval(node))
        except (ValueError, TypeError, SyntaxError):
            pass
    build = _BUILDS.get(type(node))
    if build is None:
        raise refuse_node(node)
    compute = build(node, names)
    is_open = any(isinstance(each, ast.Name) and each.id in names for each in ast.walk(node))
    return compute if is_open else _evaluate_once(compute, node)


def _evaluate_once(compute: Compute, node: ast.expr) -> Compute:
    """A constant expression, evaluated once when it is read, so that an error in it is reported for the row."""
    try:
        value = evaluate(compute, {})
    except FAULTS as error:
        raise UnreadableTestsError(f"`{shorten_node(node)}` has no value: {error}") from None
    # an iterator is exhausted after one evaluation
    return compute if isinstance(value, Iterator) else _make_constant(value)


def _make_constant(value: Any) -> Compute:
    return lambda _: value


def _read_name(node: ast.Name, names: frozenset[str]) -> Compute:
    if node.id not in names:
        raise UnreadableTestsError(f"`{node.id}` would have to be executed first; write its value in place of the name")
    name = node.id
    return lambda frame: frame.names[name]


def _read_truths(node: ast.BoolOp, names: frozenset[str]) -> Compute:
    parts = [read_expression(each, names) for each in node.values]
    ends_at = isinstance(node.op, ast.Or)

    def compute(frame: Frame) -> Any:
        value = None
        for part in parts:
            value = part(frame)
            if bool(value) is ends_at:
                break
        return value

    return compute


def _read_sign(node: ast.UnaryOp, names: frozenset[str]) -> Compute:
    if type(node.op).__name__ not in SIGNS:
        raise refuse_node(node)
    apply, operand = SIGNS[type(node.op).__name__], read_expression(node.operand, names)
    return lambda frame: apply(frame.budget, operand(frame))


def _read_arithmetic(node: ast.BinOp, names: frozenset[str]) -> Compute:
    if type(node.op).__name__ not in ARITHMETIC:
        raise refuse_node(node)
    apply = ARITHMETIC[type(node.op).__name__]
    # the result would be the same whatever the program returns
    for each in (node.left, node.right):
        if isinstance(each, ast.Constant) and isinstance(each.value, float) and not math.isfinite(each.value):
            raise UnreadableTestsError(f"`{shorten_node(node)}` calculates with infinity; write a finite number")
    left, right = read_expression(node.left, names), read_expression(node.right, names)
    return lambda frame: apply(frame.budget, left(frame), right(frame))


def _read_comparison(node: ast.Compare, names: frozenset[str]) -> Compute:
    operands = [read_expression(each, names) for each in (node.left, *node.comparators)]
    applies = [COMPARISONS[type(each).__name__] for each in node.ops]
    for operation, pair in zip(node.ops, itertools.pairwise((node.left, *node.comparators)), strict=True):
        if isinstance(operation, ast.Is | ast.IsNot) and not any(is_single(each) for each in pair):
            raise UnreadableTestsError(f"`{shorten_node(node)}` compares by `is`; write ==")

    def compute(frame: Frame) -> Any:
        value, holds = operands[0](frame), True
        for apply, operand in zip(applies, operands[1:], strict=True):
            before, value = value, operand(frame)
            holds = apply(frame.budget, before, value)
            if not holds:
                break
        return holds

    return compute


def _read_display(node: ast.List | ast.Tuple | ast.Set, names: frozenset[str]) -> Compute:
    make = _DISPLAYS[type(node)]
    parts = [
        (isinstance(each, ast.Starred), read_expression(each.value if isinstance(each, ast.Starred) else each, names))
        for each in node.elts
    ]

    def elements(frame: Frame) -> Iterator[Any]:
        for is_starred, part in parts:
            if is_starred:
                yield from part(frame)
            else:
                yield part(frame)

    return lambda frame: make(frame.budget, elements(frame))


def _read_mapping(node: ast.Dict, names: frozenset[str]) -> Compute:
    if None in node.keys:
        raise refuse_node(node)
    pairs = [
        (read_expression(key, names), read_expression(value, names))
        for key, value in zip(node.keys, node.values, strict=True)
        if key is not None
    ]
    return lambda frame: make_dict(frame.budget, ((key(frame), value(frame)) for key, value in pairs))


def _read_subscript(node: ast.Subscript, names: frozenset[str]) -> Compute:
    value = read_expression(node.value, names)
    if isinstance(node.slice, ast.Slice):
        bounds = [
            _make_constant(None) if each is None else read_expression(each, names)
            for each in (node.slice.lower, node.slice.upper, node.slice.step)
        ]

        def cut(frame: Frame) -> Any:
            container = value(frame)
            frame.budget.spend(len(container))
            return container[slice(*(bound(frame) for bound in bounds))]

        return cut
    index = read_expression(node.slice, names)
    return lambda frame: value(frame)[index(frame)]


def _read_call(node: ast.Call, names: frozenset[str]) -> Compute:
    name = get_dotted_name(node.func)
    if name not in FUNCTIONS or name in names or any(isinstance(each, ast.Starred) for each in node.args):
        raise refuse_node(node)
    function = _choose_zip(node) if name == "zip" else FUNCTIONS[name]
    arguments = [read_expression(each, names) for each in node.args]
    named = {each.arg: read_expression(each.value, names) for each in node.keywords if each.arg is not None}
    if len(named) < len(node.keywords):
        raise refuse_node(node)
    try:
        inspect.signature(function).bind(None, *arguments, **named)  # None takes the place of the budget
    except TypeError as error:
        raise UnreadableTestsError(f"`{shorten_node(node)}` is no call of {name}: {error}") from None
    return lambda frame: function(
        frame.budget, *(each(frame) for each in arguments), **{name: each(frame) for name, each in named.items()}
    )


def _choose_zip(node: ast.Call) -> Callable[..., Any]:
    """The variant of zip: equal lengths are required, except for a value and its own slices, as in `zip(x, x[1:])`."""
    strict = next((each.value for each in node.keywords if each.arg == "strict"), None)
    if strict is not None and not (isinstance(strict, ast.Constant) and strict.value is True):
        raise UnreadableTestsError(
            f"`{shorten_node(node)}` would leave out what is too short or too long; write zip without strict"
        )
    bases = {ast.dump(each.value if _is_cut(each) else each) for each in node.args}
    return zip_shortest if len(bases) == 1 and any(map(_is_cut, node.args)) else zip_equal


def _is_cut(node: ast.expr) -> TypeGuard[ast.Subscript]:
    return isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice)


def _read_loop(generators: Sequence[ast.comprehension], results: Sequence[ast.expr], names: frozenset[str]) -> Compute:
    """A generator of the tuples of results of nested comprehension loops."""
    if not generators:
        parts = [read_expression(each, names) for each in results]
        cost = sum(1 for each in results for _ in ast.walk(each))

        def last(frame: Frame) -> Iterator[Any]:
            frame.budget.spend(cost)
            yield tuple(part(frame) for part in parts)

        return last
    first = generators[0]
    if first.is_async:
        raise refuse_node(first)
    values = read_expression(first.iter, names)
    bind = _read_binding(first.target)
    inner = names | {each.id for each in ast.walk(first.target) if isinstance(each, ast.Name)}
    conditions = [read_expression(each, inner) for each in first.ifs]
    rest = _read_loop(generators[1:], results, inner)
    cost = 1 + sum(1 for each in first.ifs for _ in ast.walk(each))

    def loop(frame: Frame) -> Iterator[Any]:
        for value in values(frame):
            frame.budget.spend(cost)
            bind(frame, value)
            if all(condition(frame) for condition in conditions):
                yield from rest(frame)

    return loop


def _read_binding(target: ast.expr) -> Callable[[Frame, Any], None]:
    if isinstance(target, ast.Name):
        name = target.id
        if name in FUNCTIONS:
            raise UnreadableTestsError(f"`{name}` names an item of a comprehension; give it a name of its own")
        return lambda frame, value: frame.names.__setitem__(name, value)
    if not isinstance(target, ast.Tuple | ast.List):
        raise refuse_node(target)
    parts = [_read_binding(each) for each in target.elts]

    def bind(frame: Frame, value: Any) -> None:
        frame.budget.spend(len(parts))
        items = tuple(value)
        if len(items) != len(parts):
            raise ValueError(f"{len(items)} values for {len(parts)} names")
        for part, item in zip(parts, items, strict=True):
            part(frame, item)

    return bind


def _read_comprehension(
    node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, names: frozenset[str]
) -> Compute:
    is_dict = isinstance(node, ast.DictComp)
    loop = _read_loop(node.generators, (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,), names)

    def results(frame: Frame) -> Iterator[Any]:
        inner = Frame(dict(frame.names), frame.budget)  # a comprehension's variables do not leak
        return (each if is_dict else each[0] for each in loop(inner))

    makes: dict[type, Callable[..., Any]] = {ast.ListComp: make_list, ast.SetComp: make_set, ast.DictComp: make_dict}
    make = makes.get(type(node))
    return results if make is None else lambda frame: make(frame.budget, results(frame))


_BUILDS: dict[type, _Build] = {
    ast.Name: _read_name,
    ast.BoolOp: _read_truths,
    ast.UnaryOp: _read_sign,
    ast.BinOp: _read_arithmetic,
    ast.Compare: _read_comparison,
    ast.List: _read_display,
    ast.Tuple: _read_display,
    ast.Set: _read_display,
    ast.Dict: _read_mapping,
    ast.Subscript: _read_subscript,
    ast.Call: _read_call,
    ast.ListComp: _read_comprehension,
    ast.SetComp: _read_comprehension,
    ast.DictComp: _read_comprehension,
    ast.GeneratorExp: _read_comprehension,
}
