"""Engines on GPUs are emitted as they are timed: of vLLM's ways to all-reduce NCCL's alone is on."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlplan.emit.execution import ExecutionSpec, execution_spec
from rlplan.planner.executable import require_executable
from rlplan.planner.plan import Plan
from rlplan.planner.search import find_best_plan
from rlplan.planner.setting import read_setting
from rlplan.spec.files.job_file import load_job
from rlplan.timing.serving.generation import EngineSpeed
from tests.factories import EXAMPLES

TIMED = "PYNCCL"
SWITCHES = {
    "SYMM_MEM": "VLLM_ALLREDUCE_USE_SYMM_MEM",
    "FLASHINFER": "VLLM_ALLREDUCE_USE_FLASHINFER",
    "FLASHINFER_PCIE_IPC": "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC",
    "NCCL_SYMM_MEM": "VLLM_USE_NCCL_SYMM_MEM",
}
WITH_CUSTOM = {"CUSTOM", "QUICK_REDUCE", "AITER_CUSTOM"}
"""There only where `disable_custom_all_reduce` is false; the last two on AMD."""


@pytest.fixture(scope="module")
def plan() -> Plan:
    return find_best_plan(load_job(EXAMPLES / "grpo-7b-8xh100.yaml"))


@pytest.fixture(scope="module")
def execution(plan: Plan) -> ExecutionSpec:
    return execution_spec(require_executable(plan))


def read_source(name: str) -> str:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    return (Path(spec.submodule_search_locations[0]) / name).read_text("utf-8")


def test_the_ways_to_all_reduce_are_those_of_the_pinned_vllm() -> None:
    text = read_source("distributed/device_communicators/cuda_communicator.py")
    ways = re.search(r"all_potential_ar_backends = \[(.*?)\]", text, re.DOTALL)
    assert ways
    assert set(re.findall(r'"(\w+)"', ways[1])) == {TIMED, *SWITCHES, *WITH_CUSTOM}
    names = read_source("envs.py")
    assert all(f'"{name}"' in names for name in SWITCHES.values())


def test_every_way_but_the_one_that_is_timed_is_off(plan: Plan, execution: ExecutionSpec) -> None:
    setting = read_setting(plan.job)
    timed = EngineSpeed.from_job(plan.job, setting.policy, plan.choice.engine, setting.get_cluster("shared"))
    arguments = execution.vllm["policy"]
    assert timed.has_custom_all_reduce is not arguments["disable_custom_all_reduce"]
    assert timed.has_custom_all_reduce is False
    assert arguments["compilation_config"] == {"pass_config": {"fuse_allreduce_rms": False}}
    engines = [worker for worker in execution.ray.workers if worker.worker == "rollout_engine"]
    assert engines
    for worker in engines:
        assert {name: worker.environment.get(name) for name in SWITCHES.values()} == dict.fromkeys(
            SWITCHES.values(), "0"
        )


def test_cuda_graphs_are_captured_where_they_are_timed(plan: Plan, execution: ExecutionSpec) -> None:
    assert execution.vllm["policy"]["enforce_eager"] is not plan.job.rollout.has_cuda_graphs
