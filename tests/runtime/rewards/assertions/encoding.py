"""The encoding of values by the runner's own function, extracted from its text: importing the runner would run it."""

import ast
from typing import Any

from rlplan.runtime.sandbox.process import RUNNER


def encode(value: object) -> bytes:
    """The sandbox's encoding of a program's return value."""
    functions = [n for n in ast.parse(RUNNER).body if isinstance(n, ast.FunctionDef) and n.name == "_encode"]
    space: dict[str, Any] = {}
    exec(compile(ast.Module(functions, []), "runner", "exec"), space)
    return bytes(space["_encode"](value))
