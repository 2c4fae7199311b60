"""Trees of Python, as assertions have them: whose a call is, and what is said of a tree that is refused.

In: nodes of `ast`. Out: names and texts. Nothing is executed.
"""

import ast
import builtins

from rlplan.runtime.rewards.assertions.functions import FUNCTIONS

_PYTHON = frozenset(name for name in dir(builtins) if not name.startswith("_")) | FUNCTIONS.keys()


class UnreadableTestsError(ValueError):
    """A row's tests are in no known form. Says what and why, and what to write instead."""


def unknown(node: ast.AST) -> UnreadableTestsError:
    """For what is not evaluated here."""
    return UnreadableTestsError(
        f"`{shortened(node)}` is no literal, and is not executed here; write its value, or what docs/job.md lists"
    )


def shortened(node: ast.AST) -> str:
    """A node as text."""
    return ast.unparse(node)[:100]


def dotted(node: ast.expr) -> str:
    """`f` or `math.isclose`; empty for what is no name."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def is_single(node: ast.expr) -> bool:
    """True, False or None."""
    return isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool))


def called(node: ast.Call) -> str:
    """The function with which a call begins, `f` in `f(1)` and `C` in `C().f(1)`; empty where it has no name."""
    current: ast.expr = node
    while isinstance(current, ast.Call | ast.Attribute | ast.Subscript):
        if isinstance(current, ast.Call) and isinstance(current.func, ast.Name):
            return current.func.id
        current = current.func if isinstance(current, ast.Call) else current.value
    return ""


def is_python(name: str) -> bool:
    """Whether Python has a function of that name, or tests may use one."""
    return name in _PYTHON


def of_program(name: str) -> str:
    """An expression for the program's function, and for nothing that Python has under its name."""
    return f"globals()[{name!r}]" if is_python(name) else name
