"""Tests of a program: inputs go into the sandbox, and expected results stay outside.

Assertions are split, never executed (assertions/split.py). The calls of the program go into the sandbox, and the
condition on their values is evaluated here. Tests that need execution are an error of the row: loops, branches, calls
without an assertion, and variables or modules of the tests.

In: a row's answer. It holds verl's {"inputs": [...], "outputs": [...]} (with "fn_name" for calls), assert statements
as a text or a list (MBPP), or {"test": text, "entry_point": name} (HumanEval). Out: cases and their expected results.
"""

import ast
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlplan.runtime.rewards.assertions.split import Names, split
from rlplan.runtime.rewards.assertions.trees import (
    UnreadableTestsError,
    get_called_name,
    is_python,
    name_program_function,
)
from rlplan.runtime.rewards.verifiers import WHITE_SPACE
from rlplan.runtime.sandbox.programs import Case, CaseResult
from rlplan.runtime.sandbox.values import UnreadableValueError, decode

MAX_TESTS = 1000


class Check(Protocol):
    """One test of a program, with its expected result."""

    @property
    def cases(self) -> tuple[Case, ...]:
        """Cases that run in the sandbox."""

    def holds(self, results: Sequence[CaseResult]) -> bool:
        """Whether the results are right; one result per case. Values are plain data without methods of the program."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A case with its expected result."""

    case: Case
    """Input of the program."""

    right: Any
    """Expected output or return value."""

    prints: bool = False
    """Whether the printed output is compared instead of a return value."""

    @property
    def cases(self) -> tuple[Case, ...]:
        return (self.case,)

    def holds(self, results: Sequence[CaseResult]) -> bool:
        (result,) = results
        if result.status != "ok":
            return False
        if self.prints:
            return _split_lines(result.output.decode("utf-8", "replace")) == _split_lines(str(self.right))
        try:
            return _are_equal(decode(result.output), self.right)
        except UnreadableValueError:
            return False


def read_tests(answer: str) -> tuple[Check, ...]:
    """The tests in a row's answer. Raises: UnreadableTestsError."""
    try:
        checks = _read(answer)
    except UnreadableTestsError:
        raise
    except (ValueError, TypeError, IndexError, RecursionError, MemoryError) as error:  # a row may say anything
        raise UnreadableTestsError(f"they cannot be read: {str(error)[:100] or type(error).__name__}") from None
    count = sum(len(check.cases) for check in checks)
    if not 0 < count <= MAX_TESTS:
        raise UnreadableTestsError(f"{count} tests; a row must have 1 to {MAX_TESTS}")
    return tuple(checks)


def _read(answer: str) -> list[Check]:
    try:
        content = json.loads(answer)
    except (ValueError, RecursionError):
        content = answer
    if isinstance(content, dict) and "inputs" in content:
        return _read_pairs(content)
    if isinstance(content, dict) and isinstance(content.get("test"), str):
        return _read_assertions(content["test"], str(content.get("entry_point", "")))
    if isinstance(content, str) or (isinstance(content, list) and all(isinstance(text, str) for text in content)):
        return _read_assertions(content if isinstance(content, str) else "\n".join(content))
    raise UnreadableTestsError("neither inputs and outputs nor assert statements")


def _read_pairs(content: dict[str, Any]) -> list[Check]:
    inputs, outputs, name = content["inputs"], content.get("outputs"), content.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise UnreadableTestsError("inputs and outputs must be lists of the same length")
    if name is None:
        if not all(isinstance(text, str) for text in (*inputs, *outputs)):
            raise UnreadableTestsError("inputs and outputs of a program must be texts")
        return [Pair(Case(stdin=i.encode()), o, prints=True) for i, o in zip(inputs, outputs, strict=True)]
    if not isinstance(name, str) or not name.isidentifier():
        raise UnreadableTestsError("fn_name must be the name of a function")
    return [_make_call(name, arguments, right) for arguments, right in zip(inputs, outputs, strict=True)]


def _make_call(name: str, arguments: Any, right: Any) -> Pair:
    """A call in LeetCode's format: one JSON value per line, or a list of arguments; a method if Solution exists."""
    if isinstance(arguments, str):
        try:
            arguments = [json.loads(line) for line in arguments.split("\n") if line.strip()]
            right = json.loads(right) if isinstance(right, str) else right
        except ValueError:
            raise UnreadableTestsError("arguments of a call must be JSON, one value per line") from None
    if not isinstance(arguments, list):
        raise UnreadableTestsError("arguments of a call must be a list")
    target = f"(Solution().{name} if 'Solution' in globals() else {name_program_function(name)})"
    return Pair(Case(call=f"{target}({', '.join(map(repr, arguments))})"), right)


def _read_assertions(source: str, entry_point: str = "") -> list[Check]:
    """Read assert statements. entry_point: name of HumanEval's tested function, which replaces `candidate`."""
    try:
        tree = ast.parse(source)
        entry = ast.parse(entry_point or "candidate", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnreadableTestsError(f"the assert statements are not Python: {error}") from None
    tree = _Candidate(entry).visit(tree)
    own = frozenset(name for node in ast.walk(tree) for name in _list_bound_names(node))
    tests = [statement.test for statement in _list_asserts(tree.body, own)]
    # `assert True` tests nothing.
    tests = [test for test in tests if not (isinstance(test, ast.Constant) and test.value)]
    names = Names(
        own, _find_shadowing(tests, entry_point), get_called_name(ast.Call(entry, [], [])) if entry_point else ""
    )
    return [split(test, names) for test in tests]


class _Candidate(ast.NodeTransformer):
    def __init__(self, entry: ast.expr) -> None:
        self.entry = entry

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.entry if node.id == "candidate" else node


def _find_shadowing(tests: Sequence[ast.expr], entry_point: str) -> frozenset[str]:
    """The program's functions that shadow a Python builtin: the tested function, or the only one that is called."""
    if entry_point:
        return frozenset({entry_point} if is_python(entry_point) else ())
    calls = [node for test in tests for node in ast.walk(test) if isinstance(node, ast.Call) and get_called_name(node)]
    names = {get_called_name(node) for node in calls}
    is_one = len(names) == 1 and all(node.args or node.keywords for node in calls)
    return frozenset(names if is_one and all(map(is_python, names)) else ())


def _list_asserts(body: list[ast.stmt], own: frozenset[str], *, is_inside: bool = False) -> list[ast.Assert]:
    """Assertions of a module and of HumanEval's `def check(candidate)`.

    Other statements must not affect them. Raises: UnreadableTestsError.
    """
    asserts = []
    for node in body:
        if isinstance(node, ast.Assert):
            asserts.append(node)
        elif isinstance(node, ast.FunctionDef) and not is_inside:
            asserts += _list_asserts(node.body, own, is_inside=True)
        elif not (
            isinstance(node, ast.Assign | ast.AnnAssign | ast.Import | ast.ImportFrom | ast.Pass)
            or (isinstance(node, ast.Expr) and _is_idle(node.value, own))
        ):
            raise UnreadableTestsError(
                f"`{ast.unparse(node).splitlines()[0][:80]}` would have to be executed; write independent assertions"
            )
    return asserts


def _is_idle(node: ast.expr, own: frozenset[str]) -> bool:
    """Whether an expression statement has no effect on the program: a docstring, `print(...)`, `check(f)`."""
    return isinstance(node, ast.Constant | ast.Name) or (
        isinstance(node, ast.Call) and get_called_name(node) in {"print", *own}
    )


def _list_bound_names(node: ast.AST) -> list[str]:
    """Names that a statement of the tests binds, except `math` and its functions under their own names."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        is_from_math = isinstance(node, ast.ImportFrom) and node.module == "math"
        known = {alias for alias in node.names if not alias.asname and (is_from_math or alias.name == "math")}
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names if alias not in known]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [alias.id for target in targets for alias in ast.walk(target) if isinstance(alias, ast.Name)]
    return [node.name] if isinstance(node, ast.FunctionDef) else []


def _are_equal(value: Any, right: Any) -> bool:
    """Equality as in Python, but a tuple equals a list when the row expects a list."""
    if isinstance(right, list) and isinstance(value, tuple):
        value = list(value)
    if isinstance(right, list) and isinstance(value, list):
        return len(value) == len(right) and all(_are_equal(a, b) for a, b in zip(value, right, strict=True))
    return bool(value == right)


def _split_lines(text: str) -> list[str]:
    """Lines without white space at their ends, and without empty lines at the end.

    >>> _split_lines("a \\r\\nb\\n\\n") == ["a", "b"], _split_lines("a\\x0bb") == ["a", "b"]
    (True, False)
    """
    return [line.rstrip(WHITE_SPACE) for line in text.rstrip(WHITE_SPACE).split("\n")]
