"""Values as the runner encodes them: its own function, taken out of its text, for the rest of it runs at once."""

import ast
from typing import Any

from rlplan.runtime.sandbox.process import RUNNER


def encode(value: object) -> bytes:
    """What a sandbox says of a value that a program gives back."""
    functions = [n for n in ast.parse(RUNNER).body if isinstance(n, ast.FunctionDef) and n.name == "_encode"]
    space: dict[str, Any] = {}
    exec(compile(ast.Module(functions, []), "runner", "exec"), space)
    return bytes(space["_encode"](value))
