"""Plans on disk: equal after a round trip, refused when they are something else, movable with their tree."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import SpecError
from rlplan.planner.answers.plan_file import write_gpu_plan
from rlplan.planner.gpu.remedies import find_gpu_plan
from rlplan.planner.plan import Plan, dump_plan, read_plan, write_plan
from rlplan.planner.search import find_plan
from rlplan.spec.job_file import load_job
from tests.factories import EXAMPLES, QUICKSTART, gpu_job, make_plan

PLANS: dict[str, Callable[[], Plan]] = {
    "small": make_plan,
    "disaggregated": lambda: make_plan(placement={"placement": "disaggregated"}),
    "no reference": lambda: make_plan(**{"algorithm.kl_coef": 0}),
    "quickstart": lambda: find_plan(load_job(QUICKSTART)),
    "memory-bound": lambda: find_plan(load_job(EXAMPLES / "memory-bound.yaml")),
}


@cache
def planned(name: str) -> Plan:
    """One of PLANS; made when a test asks, not while tests are collected."""
    return PLANS[name]()


@pytest.fixture
def plan(request: pytest.FixtureRequest) -> Plan:
    return planned(request.param)


plans = pytest.mark.parametrize("plan", PLANS, indirect=True)


@plans
def test_a_plan_is_read_as_it_was_written(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "plan.json"
    write_plan(plan, path)
    assert read_plan(path) == plan


@plans
def test_a_written_plan_names_no_place_of_the_machine(plan: Plan) -> None:
    text = dump_plan(plan, EXAMPLES)
    assert str(EXAMPLES.parent) not in text
    assert json.loads(text)["job"]["policy"]["path"].startswith("models/")
    assert json.loads(text)["schema_version"] == 2


def test_a_plan_for_gpus_in_the_place_of_a_jobs_plan_is_told_how_it_becomes_one(tmp_path: Path) -> None:
    budget = find_gpu_plan(gpu_job({"policy": "Qwen/Qwen2.5-0.5B", "hardware": "1xH100"}))
    write_gpu_plan(budget, tmp_path / "plan.json")
    with pytest.raises(SpecError, match="is a plan for GPUs, not a job's plan") as caught:
        read_plan(tmp_path / "plan.json")
    assert caught.value.way_out.startswith(f"rlplan emit {tmp_path / 'plan.json'} -o bundle")
    assert "yet" not in str(caught.value)


def test_a_plan_moved_with_its_tree_still_finds_its_files(tmp_path: Path) -> None:
    here = tmp_path / "here"
    shutil.copytree(EXAMPLES / "models" / "sorter", here / "models" / "sorter")
    shutil.copytree(EXAMPLES / "data", here / "data")
    shutil.copy(QUICKSTART, here)
    write_plan(find_plan(load_job(here / "quickstart.yaml")), here / "plans" / "plan.json")
    there = tmp_path / "some" / "where" / "else"
    there.parent.mkdir(parents=True)
    shutil.move(here, there)
    job = read_plan(there / "plans" / "plan.json").job
    assert job.policy.path == str(there / "models" / "sorter")
    assert job.load_model().num_parameters == 796_032
    assert Path(job.needed_data.prompts).is_file()


@pytest.mark.parametrize("version", [0, 1, "2", None, ..., 1.5, [2]])
def test_another_schema_version_is_refused(tmp_path: Path, version: Any) -> None:
    data = json.loads(dump_plan(planned("small"), tmp_path)) | {"schema_version": version}
    data = {key: value for key, value in data.items() if value is not ...}
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(SpecError, match="plan schema version is") as caught:
        read_plan(tmp_path / "plan.json")
    assert caught.value.exit_code == 2
    assert caught.value.where == f"{tmp_path / 'plan.json'}: schema_version"
    assert "rlplan plan JOB" in caught.value.way_out


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"schema_version": 1}', '{"schema_version": 1, "job": {}}'])
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(SpecError) as caught:
        read_plan(tmp_path / "plan.json")
    assert caught.value.where.startswith(str(tmp_path / "plan.json"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("job.seed", "0"),
        ("job.workload.num_steps", 0),
        ("job.workload.num_stepz", 3),
        ("schedule.placement", "beside"),
        ("schedule.step.0.kind", "dream"),
        ("schedule.step.0.colour", "blue"),
        ("ledger.rows.0.kind", "dust"),
        ("ledger.rows.0.resident_bytes", 1.5),
        ("ledger.rows.0.colour", "blue"),
        ("rejected.0.reason", None),
        ("extra", 1),
    ],
)
def test_a_plan_that_was_damaged_is_refused_at_its_key(tmp_path: Path, key: str, value: Any) -> None:
    data = json.loads(dump_plan(planned("small"), tmp_path))
    *parents, last = key.split(".")
    part: Any = data
    for parent in parents:
        part = part[int(parent) if parent.isdigit() else parent]
    part[last] = value
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(SpecError) as caught:
        read_plan(tmp_path / "plan.json")
    assert caught.value.where == f"{tmp_path / 'plan.json'}: {key}"


@plans
def test_an_estimate_is_json_with_every_row_and_its_totals(plan: Plan) -> None:
    estimate = json.loads(json.dumps(plan.estimate()))
    assert (estimate["schema_version"], estimate["job"], estimate["verdict"]) == (2, plan.job.name, "fits")
    assert len(estimate["rows"]) == len(plan.ledger.rows)
    scopes = [peak["scope"] for peak in estimate["peaks"]]
    assert scopes == ["host", *plan.ledger.devices, *plan.ledger.processes]
    assert estimate["peaks"][0]["num_bytes"] == plan.ledger.host_peak().num_bytes <= estimate["host_capacity_bytes"]
    for row in estimate["rows"]:
        assert row["source"]
        assert row["provenance"] in ("measured", "datasheet", "derived", "assumed")


def test_a_plan_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SpecError, match="cannot be written"):
        write_plan(planned("small"), tmp_path / "file" / "plan.json")
    with pytest.raises(SpecError, match="cannot be written: Is a directory"):
        write_plan(planned("small"), tmp_path)
