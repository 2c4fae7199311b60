"""Plans on disk: equal after a round trip, refused when they are something else, movable with their tree."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import SpecError
from rlplan.planner.answers.plan_results import estimate_as_json, results_as_json
from rlplan.planner.plan import Plan, dump_plan, read_plan, write_plan
from rlplan.planner.search import find_best_plan, find_plan
from rlplan.spec.files.job_file import job_from, load_job
from tests.factories import EXAMPLES, QUICKSTART, make_plan

PLANS: dict[str, Callable[[], Plan]] = {
    "small": make_plan,
    "disaggregated": lambda: make_plan(placement={"placement": "disaggregated"}),
    "no reference": lambda: make_plan(**{"algorithm.kl_coef": 0}),
    "quickstart": lambda: find_plan(load_job(QUICKSTART)),
    "memory-bound": lambda: find_plan(load_job(EXAMPLES / "memory-bound.yaml")),
    "does not fit a host": lambda: find_best_plan(load_job(QUICKSTART, ["hardware.memory=1GiB"])),
    "two GPUs": lambda: make_gpu_job(),
    "ppo": lambda: make_gpu_job("workload.mini_batch_size=256", algorithm="ppo"),
    "dpo": lambda: make_gpu_job(algorithm="dpo"),
    "lengths": lambda: make_gpu_job("workload.response_lengths={kind: lognormal, median: 500, sigma: 0.7}"),
    "adapters": lambda: make_gpu_job(
        "training.lora={rank: 8, target_modules: [q_proj]}", "rollout.kv_cache_memory=2GiB"
    ),
    "two kinds": lambda: make_gpu_job(hardware="2xH100 + 2xL40S"),
    "megatron": lambda: make_gpu_job("training.backend=megatron"),
    "does not fit GPUs": lambda: make_gpu_job("training.zero_stage=2", policy="Qwen/Qwen2.5-7B", hardware="1xRTX4090"),
}


def make_gpu_job(*overrides: str, **parts: str) -> Plan:
    return find_best_plan(job_from({"policy": "Qwen/Qwen2.5-0.5B", "hardware": "2xH100"} | parts, overrides))


@cache
def plan_example(name: str) -> Plan:
    """One of PLANS; made when a test asks, not while tests are collected."""
    return PLANS[name]()


@pytest.fixture
def plan(request: pytest.FixtureRequest) -> Plan:
    return plan_example(request.param)


plans = pytest.mark.parametrize("plan", PLANS, indirect=True)


@plans
def test_a_plan_is_read_as_it_was_written(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "plan.json"
    write_plan(plan, path)
    again = read_plan(path)
    assert again == plan
    assert results_as_json(again) == results_as_json(plan)
    assert dump_plan(again, path.parent) + "\n" == path.read_text()


@plans
def test_a_written_plan_names_no_place_of_the_machine(plan: Plan) -> None:
    data = json.loads(dump_plan(plan, EXAMPLES))
    assert str(EXAMPLES.parent) not in json.dumps(data["results"])
    assert not data["job"]["policy"]["path"].startswith("/")
    assert not data["asked"]["policy"]["path"].startswith("/")
    assert data["schema_version"] == 3


@plans
def test_a_plan_tells_people_and_other_tools_what_they_ask_first(plan: Plan) -> None:
    results = json.loads(dump_plan(plan, EXAMPLES))["results"]
    assert results["verdict"] == plan.verdict.value
    assert results["peak_bytes"]["low"] <= results["peak_bytes"]["expected"] <= results["peak_bytes"]["high"]
    step = results["step"]
    assert step["seconds"] == pytest.approx(plan.seconds)
    for phase in step["phases"].values():
        assert phase["bound_by"] in phase["parts"]


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
    data = json.loads(dump_plan(plan_example("small"), tmp_path)) | {"schema_version": version}
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
        ("considered.0.reason", None),
        ("choice.trainer.zero_stage", "2"),
        ("choice.trainer.colour", "blue"),
        ("verdict", "fits well"),
        ("extra", 1),
    ],
)
def test_a_plan_that_was_damaged_is_refused_at_its_key(tmp_path: Path, key: str, value: Any) -> None:
    data = json.loads(dump_plan(plan_example("quickstart"), tmp_path))
    *parents, last = key.split(".")
    part: Any = data
    for parent in parents:
        part = part[int(parent) if parent.isdigit() else parent]
    part[last] = value
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(SpecError) as caught:
        read_plan(tmp_path / "plan.json")
    assert caught.value.where == f"{tmp_path / 'plan.json'}: {key}"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("asked.hardware.num_devices", 4),
        ("job.seed", 7),
        ("choice.trainer.zero_stage", 0),
        ("choice.arrangement.num_training", 1),
        ("ledger.rows.0.resident_bytes", 1),
        ("results.verdict", "does not fit"),
        ("digest", ""),
    ],
)
@pytest.mark.parametrize("name", ["small", "two GPUs"])
def test_a_plan_that_was_changed_by_hand_is_refused(tmp_path: Path, name: str, key: str, value: Any) -> None:
    data = json.loads(dump_plan(plan_example(name), tmp_path))
    *parents, last = key.split(".")
    part: Any = data
    for parent in parents:
        part = part[int(parent) if parent.isdigit() else parent]
    part[last] = value
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(SpecError, match="changed after it was made") as caught:
        read_plan(tmp_path / "plan.json")
    assert "rlplan plan JOB" in caught.value.way_out


def test_a_plan_whose_text_is_laid_out_anew_is_the_same(tmp_path: Path) -> None:
    write_plan(plan_example("small"), tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps(dict(reversed(data.items()))))
    assert read_plan(tmp_path / "plan.json") == plan_example("small")


def test_a_plan_that_was_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    text = dump_plan(plan_example("small"), tmp_path)
    for end in range(0, len(text) - 2, max(1, len(text) // 20)):
        (tmp_path / "plan.json").write_text(text[:end])
        with pytest.raises(SpecError):
            read_plan(tmp_path / "plan.json")


@plans
def test_an_estimate_is_json_with_every_row_and_its_totals(plan: Plan) -> None:
    estimate = json.loads(json.dumps(estimate_as_json(plan)))
    assert (estimate["schema_version"], estimate["verdict"]) == (4, plan.verdict.value)
    assert len(estimate["rows"]) == len(plan.ledger.rows)
    scopes = {peak["scope"] for peak in estimate["peaks"]}
    assert scopes >= {*plan.ledger.devices, *plan.ledger.processes}
    assert estimate["peaks"][0]["num_bytes"] == plan.ledger.host_peak().num_bytes
    for row in estimate["rows"]:
        assert row["source"]
        assert row["provenance"] in ("measured", "datasheet", "derived", "assumed")


def test_a_plan_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SpecError, match="cannot be written"):
        write_plan(plan_example("small"), tmp_path / "file" / "plan.json")
    with pytest.raises(SpecError, match="cannot be written: Is a directory"):
        write_plan(plan_example("small"), tmp_path)
