"""Launchers of SLURM, SkyPilot and KubeRay: known fields, hosts as planned, and the complete bundle."""

import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from rlplan.emit.bundle import read_bundle
from rlplan.emit.execution import execution_spec
from rlplan.emit.launchers import LAUNCHERS, read_launcher, write_launcher
from rlplan.errors import EmitError
from rlplan.planner.plan import Plan
from rlplan.planner.search import find_best_plan
from rlplan.spec.files.job_file import load_job
from tests.factories import EXAMPLES, make_plan
from tests.repository.at_night import mark_nightly

KNOWN = YAML(typ="safe").load(Path(__file__).parent / "launcher_fields.yaml")


@pytest.fixture(scope="module", params=["grpo-7b-8xh100", "ppo-70b-64xh100", "small"])
def plan(request: pytest.FixtureRequest) -> Plan:
    """One host of GPUs, eight of them, and one of a CPU."""
    return make_plan() if request.param == "small" else find_best_plan(load_job(EXAMPLES / f"{request.param}.yaml"))


def check_fields(data: dict[str, Any], known: dict[str, str]) -> None:
    for key, value in data.items():
        assert key in known
        assert type(value).__name__ == known[key], key


def read(path: Path) -> dict[str, Any]:
    fields: dict[str, Any] = YAML(typ="safe").load(path)
    return fields


@pytest.mark.parametrize("target", mark_nightly(LAUNCHERS, but=3))
def test_the_bundle_in_it_is_the_plan_s(target: str, plan: Plan, tmp_path: Path) -> None:
    write_launcher(plan, target, tmp_path)
    assert read_bundle(tmp_path / "bundle") == execution_spec(plan)
    assert f"`{read_launcher(target)['command']}`" in (tmp_path / "README.md").read_text()


def test_slurm_is_asked_for_the_plan_s_hosts_in_its_own_options(plan: Plan, tmp_path: Path) -> None:
    write_launcher(plan, "slurm", tmp_path)
    script = tmp_path / "train.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    asked = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in script.read_text().splitlines()
        if line.startswith("#SBATCH")
    )
    assert set(asked) <= set(KNOWN["slurm"]["options"])
    assert int(asked["nodes"]) == plan.job.hardware.num_hosts
    assert int(asked.get("gpus-per-node", 0)) == (8 if plan.job.device_kind == "cuda" else 0)


def test_skypilot_knows_every_field_and_the_gpu_s_name(plan: Plan, tmp_path: Path) -> None:
    write_launcher(plan, "skypilot", tmp_path)
    task = read(tmp_path / "task.yaml")
    check_fields(task, KNOWN["skypilot"]["task"])
    check_fields(task["resources"], KNOWN["skypilot"]["resources"])
    assert task["num_nodes"] == plan.job.hardware.num_hosts
    assert task["resources"].get("accelerators", "H100:8") == "H100:8"
    subprocess.run(["bash", "-n"], input=task["run"], text=True, check=True)


def test_kuberay_s_schema_accepts_it_with_a_pod_for_each_host(plan: Plan, tmp_path: Path) -> None:
    write_launcher(plan, "kuberay", tmp_path)
    job = read(tmp_path / "rayjob.yaml")
    jsonschema.validate(job, json.loads((Path(__file__).parent / "rayjob_schema.json").read_text("utf-8")))
    cluster = job["spec"]["rayClusterSpec"]
    groups = cluster.get("workerGroupSpecs", [])
    assert 1 + sum(group["replicas"] for group in groups) == plan.job.hardware.num_hosts
    limits = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits.get("nvidia.com/gpu", 8) == 8


APART = ("placement.placement=disaggregated", "placement.num_generation_devices=8")
"""Both kinds of GPUs are used."""


def test_hosts_that_differ_and_gpus_without_a_name_are_refused(tmp_path: Path) -> None:
    job = load_job(EXAMPLES / "grpo-7b-8xh100.yaml", ["hardware=8xH100 + 8xL40S", *APART])
    with pytest.raises(EmitError, match="hosts that are all alike"):
        write_launcher(find_best_plan(job), "slurm", tmp_path / "a")
    other = find_best_plan(load_job(EXAMPLES / "grpo-7b-8xh100.yaml", ["hardware=8xH20"]))
    with pytest.raises(EmitError, match="SkyPilot's name of h20 is not known"):
        write_launcher(other, "skypilot", tmp_path / "b")
    assert list(tmp_path.iterdir()) == []
