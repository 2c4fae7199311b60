"""Tests of a program: what it is given goes into the sandbox, what would be right stays here.

In: a row's answer: {"inputs": [...], "outputs": [...]} as verl has them (with "fn_name" for calls), assert statements
as a text or a list (MBPP), or {"test": text, "entry_point": name} (HumanEval). Out: cases, and what is right for each.
Assertions are taken apart, never executed: `f(x) == literal`, `f(x)`, `not f(x)`, `f(x) is None`, and closeness by
`abs(f(x) - literal) < literal` or `math.isclose(f(x), literal)`. Any other shape is an error of the row, and so is what
would have to be executed first: loops, branches, and variables or modules of the tests in what a function is given.
"""

import ast
import builtins
import json
import math
from dataclasses import dataclass
from typing import Any

from rlplan.runtime.sandbox.programs import Case, CaseResult
from rlplan.runtime.sandbox.values import UnreadableValueError, decode

MAX_TESTS = 1000
TOLERANCES = (("rel_tol", 1e-9), ("abs_tol", 0.0))
"""Of math.isclose, where a test leaves them out."""


class UnreadableTestsError(ValueError):
    """A row's tests are in no known form."""


@dataclass(frozen=True, slots=True)
class Check:
    """A case with what is right. tolerance: (relative, absolute) where numbers need only be close."""

    case: Case
    right: Any
    kind: str = "value"
    tolerance: tuple[float, float] | None = None

    def holds(self, result: CaseResult) -> bool:
        """Whether a case's result is what is right. Values are plain data here; none has a say in being equal."""
        if result.status != "ok":
            return False
        if self.kind == "text":
            return _lines(result.output.decode("utf-8", "replace")) == _lines(str(self.right))
        try:
            value = decode(result.output)
        except UnreadableValueError:
            return False
        if self.kind == "truth":
            return bool(value) is self.right
        if self.tolerance is not None:
            return _is_close(value, self.right, *self.tolerance)
        return _same(value, self.right)


def read_tests(answer: str) -> tuple[Check, ...]:
    """The tests in a row's answer. Raises: UnreadableTestsError."""
    try:
        checks = _read(answer)
    except UnreadableTestsError:
        raise
    except (ValueError, TypeError, IndexError, RecursionError, MemoryError) as error:  # a row may say anything
        raise UnreadableTestsError(f"they cannot be read: {str(error)[:100] or type(error).__name__}") from None
    if not 0 < len(checks) <= MAX_TESTS:
        raise UnreadableTestsError(f"{len(checks)} tests; 1 to {MAX_TESTS} are taken")
    return tuple(checks)


def _read(answer: str) -> list[Check]:
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        found = answer
    if isinstance(found, dict) and "inputs" in found:
        return _of_pairs(found)
    if isinstance(found, dict) and isinstance(found.get("test"), str):
        return _of_assertions(found["test"], str(found.get("entry_point", "candidate")))
    if isinstance(found, str) or (isinstance(found, list) and all(isinstance(each, str) for each in found)):
        return _of_assertions(found if isinstance(found, str) else "\n".join(found))
    raise UnreadableTestsError("neither inputs and outputs nor assert statements")


def _of_pairs(found: dict[str, Any]) -> list[Check]:
    inputs, outputs, name = found["inputs"], found.get("outputs"), found.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise UnreadableTestsError("inputs and outputs are lists of the same length")
    if name is None:
        if not all(isinstance(each, str) for each in (*inputs, *outputs)):
            raise UnreadableTestsError("what a program reads and prints is text")
        return [Check(Case(stdin=i.encode()), o, "text") for i, o in zip(inputs, outputs, strict=True)]
    if not isinstance(name, str) or not name.isidentifier():
        raise UnreadableTestsError("fn_name is no function's name")
    return [_call(name, given, right) for given, right in zip(inputs, outputs, strict=True)]


def _call(name: str, given: Any, right: Any) -> Check:
    """LeetCode's way: one JSON value a line or a list of arguments; a method where there is a class Solution."""
    if isinstance(given, str):
        try:
            given = [json.loads(line) for line in given.splitlines() if line.strip()]
            right = json.loads(right) if isinstance(right, str) else right
        except ValueError:
            raise UnreadableTestsError("arguments of a call are JSON, one a line") from None
    if not isinstance(given, list):
        raise UnreadableTestsError("arguments of a call are a list")
    arguments = ", ".join(repr(each) for each in given)
    target = f"(Solution().{name} if 'Solution' in globals() else {name})"
    return Check(Case(call=f"{target}({arguments})"), right)


def _of_assertions(source: str, candidate: str = "candidate") -> list[Check]:
    """candidate: HumanEval's name for what is tested stands for this one."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnreadableTestsError(f"the assert statements are not Python: {error}") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "candidate":
            node.id = candidate
    tests = [each.test for each in _asserts(tree.body)]
    checks = [_assertion(test) for test in tests if not (isinstance(test, ast.Constant) and test.value)]
    own = {name for node in ast.walk(tree) for name in _bound(node)}
    for check in checks:
        _check_names(str(check.case.call), own)
    return checks


def _asserts(body: list[ast.stmt], *, is_inside: bool = False) -> list[ast.Assert]:
    """Those of a module and of HumanEval's `def check(candidate)`; the rest is what has no say in them."""
    found = []
    for node in body:
        if isinstance(node, ast.Assert):
            found.append(node)
        elif isinstance(node, ast.FunctionDef) and not is_inside:
            found += _asserts(node.body, is_inside=True)
        elif not isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr | ast.Import | ast.ImportFrom | ast.Pass):
            raise UnreadableTestsError(f"`{ast.unparse(node).splitlines()[0][:80]}` would have to be executed")
    return found


def _bound(node: ast.AST) -> list[str]:
    """Names to which a statement of the tests gives a value."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(each.asname or each.name).partition(".")[0] for each in node.names]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
    return [node.name] if isinstance(node, ast.FunctionDef) else []


def _check_names(call: str, own: set[str]) -> None:
    """Raises: UnreadableTestsError for a name in a call that has no value where the program alone is there.

    own: names of the tests themselves. What is called may be the program's, for it may define classes of its own.
    """
    nodes = list(ast.walk(ast.parse(call, mode="eval")))
    inside = {each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    inside |= {each.arg for each in nodes if isinstance(each, ast.arg)} | set(dir(builtins))
    called = {id(each.func) for each in nodes if isinstance(each, ast.Call)}
    for each in nodes:
        if isinstance(each, ast.Name) and each.id not in inside and (id(each) not in called or each.id in own):
            raise UnreadableTestsError(f"`{call[:80]}` needs `{each.id}`, which would have to be executed first")


def _assertion(test: ast.expr) -> Check:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) and isinstance(test.operand, ast.Call):
        return Check(_case(test.operand), right=False, kind="truth")
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _comparison(test.left, test.ops[0], test.comparators[0])
    if isinstance(test, ast.Call):
        is_close = ast.unparse(test.func) in ("math.isclose", "isclose") and len(test.args) == 2
        if is_close:
            given = {str(each.arg): each.value for each in test.keywords}
            if not given.keys() <= dict(TOLERANCES).keys():
                raise UnreadableTestsError(f"`{ast.unparse(test)[:100]}` is no call of math.isclose")
            relative, absolute = (_number(given[key]) if key in given else default for key, default in TOLERANCES)
            return Check(_case(test.args[0]), _number(test.args[1]), tolerance=(abs(relative), abs(absolute)))
        return Check(_case(test), right=True, kind="truth")
    raise UnreadableTestsError(f"`assert {ast.unparse(test)[:100]}` is of no known shape")


def _comparison(left: ast.expr, operation: ast.cmpop, right: ast.expr) -> Check:
    is_abs = isinstance(left, ast.Call) and ast.unparse(left.func) == "abs" and len(left.args) == 1
    if isinstance(operation, ast.Lt | ast.LtE) and is_abs:
        difference = left.args[0]
        if isinstance(difference, ast.BinOp) and isinstance(difference.op, ast.Sub):
            return Check(_case(difference.left), _number(difference.right), tolerance=(0.0, abs(_number(right))))
    if isinstance(operation, ast.Eq | ast.Is):
        if isinstance(left, ast.Call):
            return Check(_case(left), _literal(right))
        return Check(_case(right), _literal(left))
    raise UnreadableTestsError(f"`assert {ast.unparse(left)[:80]} …` compares in no known way")


def _case(call: ast.expr) -> Case:
    if not isinstance(call, ast.Call):
        raise UnreadableTestsError(f"`{ast.unparse(call)[:100]}` calls nothing of the program's")
    return Case(call=ast.unparse(call))


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise UnreadableTestsError(f"`{ast.unparse(node)[:100]}` is no literal, and is not executed here") from None


def _number(node: ast.expr) -> float:
    """A finite number. Raises: UnreadableTestsError."""
    value = _literal(node)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UnreadableTestsError(f"`{ast.unparse(node)[:100]}` is no number to be close to")
    return value


def _is_close(value: Any, right: Any, relative: float, absolute: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isclose(value, right, rel_tol=relative, abs_tol=absolute)
    except OverflowError:  # an integer that no float can hold
        return False


def _same(value: Any, right: Any) -> bool:
    """Equal as Python has it, lists and tuples apart only where the row says tuple."""
    if isinstance(right, list) and isinstance(value, tuple):
        value = list(value)
    if isinstance(right, list) and isinstance(value, list):
        return len(value) == len(right) and all(_same(a, b) for a, b in zip(value, right, strict=True))
    return bool(value == right)


def _lines(text: str) -> list[str]:
    """Lines without the spaces at their ends and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
