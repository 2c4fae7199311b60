"""Whole-file goldens of the examples: the estimate and the bundle, as they are written today.

A change of a formula, a profile or an example shows here as a diff. When the diff is what you wanted, write the files
anew with `REGENERATE_GOLDENS=1 pytest tests/emit/test_goldens.py` and commit them with the change. They hold no path of
a machine and no version of rlplan.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rlplan.emit.bundle import write_bundle
from rlplan.planner.answers.plan_results import estimate_as_json
from rlplan.planner.plan import Plan
from rlplan.planner.search import find_plan
from rlplan.spec.files.job_file import load_job
from tests.factories import EXAMPLES, ROOT

GOLDENS = ROOT / "tests" / "goldens"
JOBS = ("quickstart", "memory-bound")


@pytest.fixture(params=JOBS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def plan(name: str) -> Plan:
    return find_plan(load_job(EXAMPLES / f"{name}.yaml"))


def compare(path: Path, text: str) -> None:
    if os.environ.get("REGENERATE_GOLDENS"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    golden = path.read_text(encoding="utf-8") if path.exists() else ""
    assert text == golden, f"{path.relative_to(ROOT)} differs: REGENERATE_GOLDENS=1 writes it again"


def one_line_an_item(value: dict[str, Any]) -> str:
    """JSON whose long lists have one line an item, so that a diff names the rows that changed."""
    parts = []
    for key, item in value.items():
        if isinstance(item, list):
            lines = ",\n".join("  " + json.dumps(element) for element in item)
            parts.append(f" {json.dumps(key)}: [\n{lines}\n ]")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(item)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def test_the_estimate_is_the_golden_one(name: str, plan: Plan) -> None:
    compare(
        GOLDENS / name / "estimate.json",
        one_line_an_item({k: v for k, v in estimate_as_json(plan).items() if k != "job"}),
    )


def test_the_bundle_is_the_golden_one(name: str, plan: Plan, tmp_path: Path) -> None:
    write_bundle(plan, tmp_path)
    examples = os.path.relpath(EXAMPLES, tmp_path)
    for path in sorted(path for path in tmp_path.rglob("*") if path.is_file()):
        text = path.read_text(encoding="utf-8").replace(examples, "EXAMPLES")
        if path.name == "plan.json":
            # the ledger's rows and the results are those of the estimate
            apart = ("rlplan_version", "digest", "ledger", "results", "runners_up")
            data = {key: value for key, value in json.loads(text).items() if key not in apart}
            text = json.dumps(data, indent=1) + "\n"
        compare(GOLDENS / name / "bundle" / path.relative_to(tmp_path), text)


def test_the_goldens_name_no_place_of_a_machine() -> None:
    files = [path for path in GOLDENS.rglob("*") if path.is_file()]
    assert {path.parts[len(GOLDENS.parts)] for path in files} == {*JOBS, "plans"}
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert str(ROOT) not in text
        assert "../" not in text
        assert "rlplan_version" not in text
