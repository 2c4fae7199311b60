"""Bundles: what was written is read back, what was edited is checked, and nothing names the machine."""

import json
import re
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from rlplan.emit.bundle import read_bundle, write_bundle
from rlplan.emit.execution import execution_spec
from rlplan.errors import EmitError, SpecError
from rlplan.planner.plan import Plan, read_plan
from rlplan.planner.search import find_plan
from rlplan.spec.files.job_file import load_job
from tests.emit.known_keys import unknown_keys
from tests.factories import EXAMPLES, JOB_EXAMPLES, QUICKSTART, ROOT, make_plan
from tests.repository.at_night import mark_nightly

FILES = {
    "plan.json",
    "execution.json",
    "deepspeed/policy.json",
    "vllm/policy.json",
    "ray.json",
    "launch.sh",
}
PLANS = {
    "small": {},
    "disaggregated": {"placement": {"placement": "disaggregated"}, "hardware.num_devices": 3},
    "no reference": {"algorithm.kl_coef": 0},
    "mini-batches": {"workload.mini_batch_size": 4},
    "controls": {"controls": {"shuffle_rewards": True, "skip_sync_after_step": 2}},
}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    write_bundle(make_plan(), tmp_path / "bundle")
    return tmp_path / "bundle"


def edit(path: Path, change: dict[str, Any] | None = None, **more: Any) -> None:
    data = json.loads(path.read_text())
    for key, value in (change or {} | more).items():
        *parents, last = key.split(".")
        part = data
        for parent in parents:
            part = part[parent]
        part[last] = value
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("overrides", PLANS.values(), ids=PLANS)
def test_what_is_read_is_what_was_to_be_executed(tmp_path: Path, overrides: dict[str, Any]) -> None:
    plan = make_plan(**overrides)
    write_bundle(plan, tmp_path / "bundle")
    assert read_bundle(tmp_path / "bundle") == execution_spec(plan)
    assert read_plan(tmp_path / "bundle" / "plan.json") == plan


@pytest.mark.parametrize("path", mark_nightly(JOB_EXAMPLES, but=JOB_EXAMPLES[::3]), ids=lambda path: path.stem)
def test_the_examples_survive_the_way_through_a_bundle(tmp_path: Path, path: Path) -> None:
    plan = find_plan(load_job(path))
    write_bundle(plan, tmp_path / "bundle")
    assert read_bundle(tmp_path / "bundle") == execution_spec(plan)
    assert unknown_keys(execution_spec(plan)) == set()


def test_a_bundle_is_the_files_that_are_documented(bundle: Path) -> None:
    assert {str(path.relative_to(bundle)) for path in bundle.rglob("*") if path.is_file()} == FILES


def copy_examples(folder: Path) -> Path:
    """The quickstart with its model and data in a tree of its own; gives the job file."""
    shutil.copytree(EXAMPLES / "models" / "sorter", folder / "models" / "sorter")
    shutil.copytree(EXAMPLES / "data", folder / "data")
    shutil.copy(QUICKSTART, folder)
    return folder / "quickstart.yaml"


def test_a_bundle_names_no_place_of_the_machine(tmp_path: Path) -> None:
    bundle = tmp_path / "here" / "bundle"
    write_bundle(find_plan(load_job(copy_examples(tmp_path / "here"))), bundle)
    for name in FILES:
        text = (bundle / name).read_text()
        for place in (str(ROOT), str(tmp_path), tmp_path.name, str(Path.home())):
            assert place not in text, f"{name} names {place}"
        assert not re.search(r'"/', text), name


def test_the_launch_script_can_be_started_and_runs_the_bundle_it_lies_in(bundle: Path) -> None:
    launch = bundle / "launch.sh"
    assert launch.stat().st_mode & stat.S_IXUSR
    assert launch.read_text().startswith("#!/usr/bin/env bash\n")
    assert 'exec rlplan run "$(dirname "$0")" "$@"' in launch.read_text()


def test_a_bundle_moved_with_its_tree_still_finds_its_files(tmp_path: Path) -> None:
    here = tmp_path / "here"
    write_bundle(find_plan(load_job(copy_examples(here))), here / "bundle")
    there = tmp_path / "there"
    shutil.move(here, there)
    assert read_bundle(there / "bundle").job.policy.path == str(there / "models" / "sorter")


def test_a_bundle_is_written_over_an_older_one_and_leaves_nothing_of_it(bundle: Path) -> None:
    (bundle / "deepspeed" / "value.json").write_text('{"zero_optimization": {"stage": 2}}')
    plan = make_plan(**{"workload.num_steps": 9})
    write_bundle(plan, bundle)
    assert read_bundle(bundle) == execution_spec(plan)


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(EmitError, match="is not empty and holds no bundle") as caught:
        write_bundle(make_plan(), tmp_path)
    assert caught.value.exit_code == 3
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_empty_folder_is_fine(tmp_path: Path) -> None:
    write_bundle(make_plan(), tmp_path)
    assert (tmp_path / "execution.json").is_file()


def test_a_place_that_is_a_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "bundle"):
        with pytest.raises(SpecError, match="cannot be written: Not a directory"):
            write_bundle(make_plan(), place)
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize(
    ("file", "key", "hint"),
    [
        ("deepspeed/policy.json", "gradient_cliping", "gradient_clipping"),
        ("deepspeed/policy.json", "zero_optimisation", "zero_optimization"),
        ("deepspeed/policy.json", "zero_optimization.reduce_buckett_size", "reduce_bucket_size"),
        ("vllm/policy.json", "max_num_seq", "max_num_seqs"),
        ("vllm/policy.json", "enforce_eagr", "enforce_eager"),
    ],
)
def test_a_misspelt_key_in_an_engine_s_file_is_refused_with_the_right_one(
    bundle: Path, file: str, key: str, hint: str
) -> None:
    edit(bundle / file, {key: 1})
    with pytest.raises(SpecError) as caught:
        read_bundle(bundle)
    assert caught.value.what.startswith(f"{file}: {key} is 1, the plan gives no such key.")
    assert f"Did you mean '{hint}'?" in caught.value.what


@pytest.mark.parametrize("value", [None, 2, "stage 2", [], True])
def test_a_zero_section_that_is_no_mapping_is_refused(bundle: Path, value: Any) -> None:
    edit(bundle / "deepspeed" / "policy.json", {"zero_optimization": value})
    with pytest.raises(SpecError, match="zero_optimization is"):
        read_bundle(bundle)


@pytest.mark.parametrize(
    ("file", "content", "kind"),
    [
        ("execution.json", "", SpecError),
        ("execution.json", "[]", SpecError),
        ("execution.json", '{"schema_version": 1}', SpecError),
        ("deepspeed/policy.json", "[]", SpecError),
        ("deepspeed/policy.json", "{", SpecError),
        ("vllm/policy.json", "null", SpecError),
        ("ray.json", "{}", SpecError),
        ("ray.json", "5", SpecError),
    ],
)
def test_a_damaged_file_is_refused_by_name(bundle: Path, file: str, content: str, kind: type[SpecError]) -> None:
    (bundle / file).write_text(content)
    with pytest.raises(kind) as caught:
        read_bundle(bundle)
    assert str(bundle) in caught.value.where


@pytest.mark.parametrize("gone", ["execution.json", "deepspeed", "vllm", "ray.json", "deepspeed/policy.json"])
def test_a_bundle_that_lacks_a_part_is_refused_by_its_name(bundle: Path, gone: str) -> None:
    path = bundle / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(SpecError) as caught:
        read_bundle(bundle)
    assert gone.split("/")[0].split(".")[0] in str(caught.value)
    assert "emit" in caught.value.way_out or "path" in caught.value.way_out


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("execution.json", "job.seed", "0"),
        ("execution.json", "job.sead", 0),
        ("execution.json", "schema_version", 2),
        ("execution.json", "schedule.colour", "blue"),
        ("ray.json", "object_store_memory", "128MiB"),
        ("ray.json", "spreads_islands", "yes"),
    ],
)
def test_a_wrong_value_in_our_own_files_is_refused_at_its_key(bundle: Path, file: str, key: str, value: Any) -> None:
    edit(bundle / file, {key: value})
    with pytest.raises(SpecError) as caught:
        read_bundle(bundle)
    assert caught.value.where == f"{bundle / file}: {key}"
    assert caught.value.way_out.startswith(f"`rlplan emit {bundle}/plan.json -o {bundle}` restores the file")


def test_emitting_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    plan: Plan = make_plan()
    for name in ("one", "two"):
        write_bundle(plan, tmp_path / name)
    for name in FILES:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
