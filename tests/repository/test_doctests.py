"""Examples in docstrings are true, below `runtime` and `report`: a test a file, which collecting does not import."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

from tests.factories import ROOT

LEFT_OUT = ("rlplan/runtime/", "rlplan/report/")
"""Folders whose imports are heavy."""
OF_TESTS = "tests/runtime/host/engine_uses.py"


def files_with_examples() -> list[str]:
    files = ((path.relative_to(ROOT).as_posix(), path) for path in sorted((ROOT / "rlplan").rglob("*.py")))
    return [name for name, path in files if not name.startswith(LEFT_OUT) and ">>> " in path.read_text()]


@pytest.mark.parametrize("file", [*files_with_examples(), OF_TESTS])
def test_examples_in_docstrings_are_true(file: str) -> None:
    module = import_module(".".join(part for part in Path(file).with_suffix("").parts if part != "__init__"))
    wrong: list[str] = []
    runner = doctest.DocTestRunner()
    for example in doctest.DocTestFinder(exclude_empty=True).find(module, module.__name__):
        runner.run(example, out=wrong.append)
    assert runner.tries > 0
    assert not wrong, "".join(wrong)
