"""docs/python.md and examples/planning.ipynb: every line of Python in them runs, and every function is on the page."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

import rlplan
from tests.docs.documentation import DOCS, EXAMPLES, read, rows, words
from tests.report.factory import make_run

PAGE = read(DOCS / "python.md")


def run_cells(cells: list[str]) -> list[Any]:
    """The last value of each cell, as a notebook would show it; all cells share one namespace."""
    names: dict[str, Any] = {}
    shown = []
    for cell in cells:
        *body, last = ast.parse(cell).body
        if not isinstance(last, ast.Expr):
            body.append(last)
        exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
        shown.append(
            eval(compile(ast.Expression(last.value), "<cell>", "eval"), names) if isinstance(last, ast.Expr) else None
        )
    return shown


def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    make_run(tmp_path / "runs" / "quickstart")
    monkeypatch.chdir(tmp_path)
    *_, compared = run_cells(re.findall(r"(?ms)^```python\n(.*?)^```", PAGE))
    assert list(compared["kind"]) == ["planned", "measured"]


def test_the_notebook_runs_and_every_cell_shows_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    notebook = json.loads(read(EXAMPLES / "planning.ipynb"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    plan, largest, explained, compared = run_cells(cells)
    assert "fits" in plan._repr_html_()
    assert (largest >= 0).all()
    assert explained.rows()[0]["change"] == "workload.num_samples_per_prompt=4"
    assert [row["kind"] for row in compared.rows()] == ["planned", "simulated", "planned", "planned"]


def test_every_public_function_is_on_the_page() -> None:
    assert {words(row[0])[0] for row in rows(PAGE)} == set(rlplan.__all__) - {"__version__"}
