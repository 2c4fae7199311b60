"""docs/estimates.md: every formula, and examples on GPUs that fit."""

import importlib

import pytest

from rlplan.planner.gpu.remedies import find_gpu_plan
from rlplan.planner.gpu_plan import Verdict
from rlplan.spec.job_file import load_job
from tests.documentation import DOCS, EXAMPLES, read
from tests.factories import GPU_EXAMPLES
from tests.test_docs_memory_model import public_names

PAGE = read(DOCS / "estimates.md")
MODULES = (
    *("host", "nvme", "gpu.spread", "gpu.process", "gpu.states", "gpu.trainer", "gpu.scorer", "gpu.engine"),
    *("gpu.kv_demand", "gpu.predict", "gpu.rank", "gpu.exported"),
)


@pytest.mark.parametrize("module", MODULES)
def test_every_formula_is_documented(module: str) -> None:
    importlib.import_module(f"rlplan.memory.{module}")
    assert {name for name in public_names(module) if f"`{name}`" not in PAGE} == set()


FITTING = [path for path in GPU_EXAMPLES if path.parent == EXAMPLES]


@pytest.mark.parametrize("path", FITTING, ids=lambda path: path.stem)
def test_an_example_on_gpus_fits(path) -> None:  # type: ignore[no-untyped-def]
    assert find_gpu_plan(load_job(path)).verdict is Verdict.FITS
