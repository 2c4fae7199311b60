"""Our Python files as trees, read once for the files that look at them (tests/repository/side_by_side.py)."""

import ast
from functools import cache
from pathlib import Path

from tests.docs.documentation import ROOT, read

FOLDERS = ("rlplan", "cli", "tests", "benchmarks", "examples")


@cache
def sources() -> dict[Path, ast.Module]:
    """Every file, by its path."""
    modules = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    return {path: ast.parse(read(path)) for path in modules}


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Everything in a file, walked through once."""
    return list(ast.walk(sources()[path]))
