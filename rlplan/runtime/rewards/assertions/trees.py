"""Helpers for syntax trees of assertions: the owner of a call, and the text of a refusal.

In: nodes of `ast`. Out: names and texts. Nothing is executed.
"""

import ast
import builtins

from rlplan.runtime.rewards.assertions.functions import FUNCTIONS

_PYTHON = frozenset(name for name in dir(builtins) if not name.startswith("_")) | FUNCTIONS.keys()


class UnreadableTestsError(ValueError):
    """Raised for a row's tests in an unsupported form; the message says what to write instead."""


def refuse_node(node: ast.AST) -> UnreadableTestsError:
    """The refusal of a node that the evaluator does not support."""
    return UnreadableTestsError(
        f"`{shorten_node(node)}` is no literal, and is not executed here; write its value, or what docs/job.md lists"
    )


def shorten_node(node: ast.AST) -> str:
    """The source of a node, shortened for messages."""
    return ast.unparse(node)[:100]


def get_dotted_name(node: ast.expr) -> str:
    """The name `f` or `math.isclose`; empty for any other expression."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def is_single(node: ast.expr) -> bool:
    """Whether a node is True, False or None."""
    return isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool))


def get_called_name(node: ast.Call) -> str:
    """The first called function, `f` in `f(1)` and `C` in `C().f(1)`; empty where it has no name."""
    current: ast.expr = node
    while isinstance(current, ast.Call | ast.Attribute | ast.Subscript):
        if isinstance(current, ast.Call) and isinstance(current.func, ast.Name):
            return current.func.id
        current = current.func if isinstance(current, ast.Call) else current.value
    return ""


def is_python(name: str) -> bool:
    """Whether a name is a builtin, or a function that tests may use."""
    return name in _PYTHON


def name_program_function(name: str) -> str:
    """An expression for the program's function, even where a builtin has its name."""
    return f"globals()[{name!r}]" if is_python(name) else name
