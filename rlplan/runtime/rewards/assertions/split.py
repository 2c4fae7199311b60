"""Splitting of assertions: calls of the program's functions run in the sandbox, the comparison stays outside.

The program sees only the arguments of a call, and neither the expected value nor the comparison, so it cannot forge the
verdict.

In: the tree of an assertion. Out: cases for the sandbox, and an expression over their results. Left out: assertions in
which a call does not give one plain value; they are refused.
"""

import ast
import builtins
import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlplan.runtime.rewards.assertions.expressions import FAULTS, Compute, evaluate, read_expression
from rlplan.runtime.rewards.assertions.functions import ITERATING
from rlplan.runtime.rewards.assertions.trees import (
    UnreadableTestsError,
    get_called_name,
    get_dotted_name,
    is_python,
    is_single,
    name_program_function,
    shorten_node,
)
from rlplan.runtime.sandbox.programs import Case, CaseResult
from rlplan.runtime.sandbox.values import UnreadableValueError, decode

_SAMPLES: tuple[object, ...] = (None, True, 0, 1.5, "", "1", b"", (), [], [0], ["a"], [[0]], [(0, 0)], {}, set())
"""Possible results of a function. An assertion that raises TypeError for all of them is an error of the row."""
MAX_TRIALS = 5000
"""Combinations of samples, one sample per call, that are tried."""
_CONTAINERS = (ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Starred, ast.keyword)


@dataclass(frozen=True, slots=True)
class Names:
    """Owners of names in a row's tests."""

    own: frozenset[str] = frozenset()
    """Names that the tests bind, other than `math` and imports from it."""

    program: frozenset[str] = frozenset()
    """Functions of the program that share a name with a builtin."""

    entry_point: str = ""
    """The tested function; empty where the row does not name one."""


@dataclass(frozen=True, slots=True)
class Assertion:
    """An assertion on a program, split into calls and an expression."""

    cases: tuple[Case, ...]
    """Calls of the program's functions."""

    names: tuple[str, ...]
    """Names of the results in `compute`, one per case."""

    compute: Compute
    """The expression over the results, which must be true."""

    def holds(self, results: Sequence[CaseResult]) -> bool:
        """Whether every call returned a value and the assertion is true. results: one per case."""
        if any(result.status != "ok" for result in results):
            return False
        try:
            values = [decode(result.output) for result in results]
            return bool(evaluate(self.compute, dict(zip(self.names, values, strict=True))))
        except (UnreadableValueError, *FAULTS):
            return False


def split(test: ast.expr, names: Names) -> Assertion:
    """The split assertion of an expression. Raises: UnreadableTestsError."""
    splitter = _Splitter(names)
    rest = splitter.split(copy.deepcopy(test), frozenset())  # messages still quote the original tree
    places = frozenset(splitter.calls)
    compute = read_expression(rest, places)
    if not places:
        raise UnreadableTestsError(
            f"`{shorten_node(test)}` calls nothing of the program's; compare a call with a value, as in f(1) == 2"
        )
    _check_sides(rest, places)
    judged = {name for name, call in splitter.calls.items() if call.is_given_another}
    if not names.entry_point:
        _check_truths(rest, judged)
    if not _fits(compute, tuple(places)):
        raise UnreadableTestsError(f"`{shorten_node(test)}` fails whatever the program gives; mend its types")
    cases = tuple(Case(call=call.text) for call in splitter.calls.values())
    return Assertion(cases, tuple(splitter.calls), compute)


@dataclass(slots=True)
class _Taken:
    """A call that runs in the sandbox."""

    source: str
    """Source of the call."""

    is_iterated: bool
    """Whether every use only iterates over the result."""

    is_given_another: bool
    """Whether another call of the program is among its arguments."""

    @property
    def text(self) -> str:
        """Source of the case; an iterated result may be a generator, which the sandbox turns into a list."""
        return f"[*{self.source}]" if self.is_iterated else self.source


@dataclass(slots=True)
class _Splitter:
    names: Names
    calls: dict[str, _Taken] = field(default_factory=dict)

    def split(self, node: Any, bound: frozenset[str], *, is_iterated: bool = False) -> Any:
        """A node with a name in place of each call of the program.

        The name is the call's source, which no identifier can equal. bound: variables of enclosing comprehensions.
        """
        if isinstance(node, ast.Call) and self._is_program_call(node, bound):
            return ast.Name(self._take_call(node, bound, is_iterated=is_iterated), ast.Load())
        if isinstance(node, ast.Call):
            self._check_own(get_dotted_name(node.func).partition(".")[0])
            iterates = get_dotted_name(node.func) in ITERATING or (
                get_dotted_name(node.func) in ("min", "max") and len(node.args) == 1
            )
            node.args = [self.split(each, bound, is_iterated=iterates) for each in node.args]
            node.keywords = [self.split(each, bound) for each in node.keywords]
            return node
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            return self._split_comprehension(node, bound)
        for name, value in ast.iter_fields(node):
            if isinstance(value, ast.AST):
                setattr(node, name, self.split(value, bound, is_iterated=isinstance(node, ast.Starred)))
            elif isinstance(value, list):
                setattr(node, name, [self.split(each, bound) if isinstance(each, ast.AST) else each for each in value])
        return node

    def _split_comprehension(self, node: Any, bound: frozenset[str]) -> Any:
        for each in node.generators:
            each.iter = self.split(each.iter, bound, is_iterated=True)
            bound |= {name.id for name in ast.walk(each.target) if isinstance(name, ast.Name)}
            each.ifs = [self.split(condition, bound) for condition in each.ifs]
        for name in ("elt", "key", "value"):
            if hasattr(node, name):
                setattr(node, name, self.split(getattr(node, name), bound))
        return node

    def _is_program_call(self, node: ast.Call, bound: frozenset[str]) -> bool:
        name = get_called_name(node)
        self._check_own(name, bound)
        return bool(name) and (name in self.names.program or not (is_python(name) or name.startswith("__")))

    def _check_own(self, name: str, bound: frozenset[str] = frozenset()) -> None:
        if name in self.names.own or name in bound:
            raise UnreadableTestsError(
                f"`{name}` would have to be executed first; write the value that it gives in its place"
            )

    def _take_call(self, node: ast.Call, bound: frozenset[str], *, is_iterated: bool) -> str:
        if self.names.entry_point and get_called_name(node) != self.names.entry_point:
            raise UnreadableTestsError(
                f"`{shorten_node(node)}` is not the tested function, {self.names.entry_point}, and would itself say "
                "what is right; compare the tested function's own value"
            )
        anew = sorted(bound & {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} - _find_stored(node))
        if anew:
            raise UnreadableTestsError(
                f"`{shorten_node(node)}` is called anew for every `{anew[0]}`; write one assertion for each"
            )
        is_given_another = self._check_given(node, bound)
        _check_names(node, self.names)
        source = ast.unparse(_Renamed(self.names.program).visit(node))
        taken = self.calls.setdefault(source, _Taken(source, is_iterated, is_given_another))
        taken.is_iterated &= is_iterated
        return source

    def _check_given(self, node: ast.Call, bound: frozenset[str]) -> bool:
        """Whether a call has another call as an argument. Raises: UnreadableTestsError where it is nested deeper."""
        is_given_another = False
        function: ast.expr = node
        while isinstance(function, ast.Call | ast.Attribute | ast.Subscript):
            if isinstance(function, ast.Call):
                for each in (*function.args, *function.keywords):
                    is_given_another |= self._check_argument(each, bound)
                function = function.func
            else:
                function = function.value
        return is_given_another

    def _check_argument(self, node: ast.AST, bound: frozenset[str]) -> bool:
        if isinstance(node, ast.Call) and self._is_program_call(node, bound):
            self._check_given(node, bound)
            return True
        if isinstance(node, _CONTAINERS):
            # a sum rather than any(), which would leave the rest unchecked after the first call
            return sum(self._check_argument(each, bound) for each in ast.iter_child_nodes(node)) > 0
        for each in ast.walk(node):
            if isinstance(each, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
                raise UnreadableTestsError(f"`{shorten_node(each)}` would have to be executed first; write its value")
            if isinstance(each, ast.Call) and self._is_program_call(each, bound):
                raise UnreadableTestsError(
                    f"`{shorten_node(each)}` is called inside of `{shorten_node(node)}`, which is given to a function; "
                    "write its value in its place"
                )
        return False


class _Renamed(ast.NodeTransformer):
    """Replaces the names of the program's functions that share a name with a builtin."""

    def __init__(self, program: frozenset[str]) -> None:
        self.program = program

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.parse(name_program_function(node.id), mode="eval").body if node.id in self.program else node


def _find_stored(node: ast.AST) -> set[str]:
    """Names that are bound within an expression."""
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    return names | {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}


def _check_names(call: ast.Call, names: Names) -> None:
    """Raises: UnreadableTestsError for a name in a call that the program does not define.

    Called names are allowed, because the program may define classes.
    """
    inside = _find_stored(call) | set(dir(builtins))
    functions = {id(each.func) for each in ast.walk(call) if isinstance(each, ast.Call)}
    for each in ast.walk(call):
        if not isinstance(each, ast.Name) or each.id in inside:
            continue
        if id(each) not in functions or each.id in names.own:
            raise UnreadableTestsError(
                f"`{shorten_node(call)}` needs `{each.id}`, which would have to be executed first; "
                "write the value in its place"
            )


def _check_sides(node: ast.AST, places: frozenset[str]) -> None:
    """Raises: UnreadableTestsError where both sides of a comparison call the program."""
    for each in ast.walk(node):
        if isinstance(each, ast.Compare):
            operands = [each.left, *each.comparators]
            for left, right in itertools.pairwise(operands):
                if places & _find_names(left) and places & _find_names(right):
                    raise UnreadableTestsError(
                        "both sides of a comparison call the program, and neither says what is right; "
                        "write the value on one side"
                    )


def _find_names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _check_truths(node: ast.expr, judged: set[str]) -> None:
    """Raises: UnreadableTestsError where one function of the program judges the value of another."""
    if isinstance(node, ast.Name) and node.id in judged:
        raise UnreadableTestsError(
            "a function of the program's is given what another one gives, and says whether that is right; compare the "
            "value itself, or name the tested function as entry_point"
        )
    parts: list[ast.expr] = []
    if isinstance(node, ast.UnaryOp):
        parts = [node.operand]
    elif isinstance(node, ast.BoolOp):
        parts = node.values
    elif isinstance(node, ast.Call) and get_dotted_name(node.func) == "bool":
        parts = node.args
    elif isinstance(node, ast.Compare) and any(is_single(each) for each in (node.left, *node.comparators)):
        parts = [node.left, *node.comparators]
    for each in parts:
        _check_truths(each, judged)


def _fits(compute: Compute, places: Sequence[str]) -> bool:
    """Whether some sample values raise no TypeError; True where the combinations are too many to try."""
    samples = itertools.product(_SAMPLES, repeat=len(places))
    return len(_SAMPLES) ** len(places) > MAX_TRIALS or any(
        _passes(compute, dict(zip(places, values, strict=True))) for values in samples
    )


def _passes(compute: Compute, values: dict[str, Any]) -> bool:
    try:
        evaluate(compute, values)
    except TypeError:
        return False
    except FAULTS:
        return True
    return True
