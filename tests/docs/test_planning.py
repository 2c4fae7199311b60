"""docs/planning.md: every resource and objective, examples on GPUs that fit, and the keys of a plan file."""

import json
import typing
from pathlib import Path

import pytest
from rlplan_cli.render.terminal import name_resource

from rlplan.planner.plan import dump_plan
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.search import find_best_plan
from rlplan.spec.files.job_file import load_job
from rlplan.spec.job_roles import Objective
from rlplan.timing.cost import Resource
from tests.docs.documentation import DOCS, EXAMPLES, read, rows, section, words
from tests.emit.test_goldens import GOLDENS
from tests.factories import GPU_EXAMPLES

PAGE = read(DOCS / "planning.md")


def test_every_resource_is_explained_by_the_word_that_a_table_has_for_it() -> None:
    assert [row[0] for row in rows(section(PAGE, "Asking for a plan"))][: len(Resource)] == [
        name_resource(resource, is_on_host=False) for resource in Resource
    ]


def test_every_objective_is_explained() -> None:
    documented = [words(row[0])[0] for row in rows(section(PAGE, "Objectives"))]
    assert documented == list(typing.get_args(Objective))


def test_every_example_on_gpus_is_named() -> None:
    assert GPU_EXAMPLES
    for path in GPU_EXAMPLES:
        assert f"(../examples/{path.name})" in PAGE


@pytest.mark.parametrize("path", [p for p in GPU_EXAMPLES if p.parent == EXAMPLES], ids=lambda path: path.stem)
def test_an_example_on_gpus_fits(path: Path) -> None:
    """Says its golden plan, which tests/planner/answers/test_golden_plans.py holds to the plan of today."""
    golden = json.loads((GOLDENS / "plans" / f"{path.stem}.json").read_text("utf-8"))
    assert golden["verdict"] == Verdict.FITS.value


def test_every_key_of_a_plan_file_is_documented() -> None:
    data = json.loads(dump_plan(find_best_plan(load_job(EXAMPLES / "dpo-8b-8xa100.yaml")), EXAMPLES))
    documented = {word for row in rows(section(PAGE, "The plan file")) for word in words(row[0])}
    assert documented == set(data)
