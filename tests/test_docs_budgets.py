"""docs/budgets.md: every key, every formula, and examples that are budgets."""

import importlib

import pytest

from rlplan.planner.budget import Verdict
from rlplan.planner.gpu.remedies import find_budget
from rlplan.spec.algorithm import ALGORITHMS
from rlplan.spec.budget import BudgetSpec, load_budget
from tests.documentation import DOCS, EXAMPLES, keys_of, read, rows, section, words
from tests.test_docs_memory_model import public_names

PAGE = read(DOCS / "budgets.md")
MODULES = (
    *("host", "nvme", "gpu.spread", "gpu.process", "gpu.states", "gpu.trainer", "gpu.scorer", "gpu.engine"),
    *("gpu.kv_demand", "gpu.predict", "gpu.rank", "gpu.exported"),
)


def test_every_key_is_documented_and_every_documented_key_exists() -> None:
    documented = {word for row in rows(section(PAGE, "Every key")) for word in words(row[0])}
    assert documented == {key for key in keys_of(BudgetSpec) if not key.startswith("training.lora.")}


def test_every_algorithm_is_named() -> None:
    for name in ALGORITHMS:
        assert f"`{name}`" in PAGE


@pytest.mark.parametrize("module", MODULES)
def test_every_formula_is_documented(module: str) -> None:
    importlib.import_module(f"rlplan.memory.{module}")
    assert {name for name in public_names(module) if f"`{name}`" not in PAGE} == set()


BUDGETS = sorted(path for path in EXAMPLES.glob("*.yaml") if "\ngpus:" in read(path))


@pytest.mark.parametrize("path", BUDGETS, ids=lambda path: path.stem)
def test_an_example_is_a_budget_that_fits(path) -> None:  # type: ignore[no-untyped-def]
    assert find_budget(load_budget(path)).verdict is Verdict.FITS
