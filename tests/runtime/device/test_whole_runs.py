"""Plans for GPUs run from beginning to end on stand-ins for the GPUs: driver, Ray, workers and weight sync are real.

vLLM sleeps with its own code for GPUs over an allocator that really gives memory back; all processes on a GPU share its
bytes, and run out of them.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.jobs import JOB, PLACEMENTS
from rlplan.emit.bundle import write_bundle
from rlplan.planner.executable import require_executable
from rlplan.planner.plan import Plan
from rlplan.planner.search import find_best_plan
from rlplan.spec.base import validate
from rlplan.spec.job import JobSpec
from rlplan.units import MIB
from rlplan.vocabulary import Transport
from tests.factories import EXAMPLES
from tests.runtime.conftest import ROOT, FinishedRun, finish

pytestmark = pytest.mark.engine

TRAINER, ENGINE = "policy_trainer/0", "rollout_engine/0"
WITHOUT_REFERENCE = {"name": "grpo", "learning_rate": 1e-4, "kl_coef": 0.0}
NUM_STEPS = 2
CACHE = 8 * MIB
ROUNDING = 0.02
"""Mean difference of log-probs in bf16 between vLLM's kernels and torch's."""


def plan_of(placement: dict[str, Any], gpus: str = "1xh100-sxm", num_samples: int = 4, **parts: Any) -> Plan:
    """A tiny job's plan for real GPUs."""
    workload = {"num_steps": NUM_STEPS, "num_prompts_per_step": 4, "num_samples_per_prompt": num_samples}
    lengths = {"max_prompt_len": 16, "max_response_len": 24, "num_heldout_prompts": 8, "evaluate_every": NUM_STEPS}
    data = {
        **JOB,
        "policy": {"path": "models/sorter", "init": "random"},
        "hardware": gpus,
        "workload": workload | lengths,
        "rollout": {"has_cuda_graphs": False, "kv_cache_memory": CACHE, "block_size": 32},  # a CPU has no block of 16
        "placement": placement,
        **parts,
    }
    return require_executable(find_best_plan(validate(JobSpec, data, file="tiny.yaml").resolve_paths(EXAMPLES)))


def run_on_stand_ins(plan: Plan, folder: Path, num_bytes: int) -> FinishedRun:
    """Run a plan where each GPU has so many bytes."""
    write_bundle(plan, folder / "bundle")
    command = [sys.executable, "-m", "tests.runtime.device.run_on_stand_ins", str(num_bytes)]
    process = subprocess.Popen(
        [*command, str(folder / "bundle"), str(folder / "run")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    return finish(process, folder / "run")


def agrees(run: FinishedRun) -> None:
    """It ended well, and what was trained on had been sampled from the weights that were trained."""
    assert run.exit_code == 0, run.stderr
    rows = [row for row in run.metrics if row["step"] > 0]
    assert len(rows) == NUM_STEPS
    assert max(row["sync/logprob_difference_mean"] for row in rows) < ROUNDING


def held(run: FinishedRun, process: str, action: str, statistic: str = "resident") -> int:
    """The most bytes of tensors on its GPU that a process held after an action, or (`peak`) in it."""
    wanted = (process, action, "device_allocated", statistic)
    return max(s.num_bytes for s in run.trace.samples if (s.process, s.action_id, s.kind, s.statistic) == wanted)


def test_one_side_at_a_time_fits_after_a_rehearsal_that_ran_out_took_smaller_micro_batches(tmp_path: Path) -> None:
    """Colocated: the engine sleeps, roles are offloaded, and weights go by IPC."""
    num_bytes, plan = 30 * MIB, plan_of(PLACEMENTS["colocated"])
    assert plan.job.placement.transport is Transport.CUDA_IPC
    run = run_on_stand_ins(plan, tmp_path, num_bytes)
    agrees(run)
    took_smaller_micro_batches(run, plan)
    awake = held(run, ENGINE, "generate", "peak")
    assert awake + held(run, TRAINER, "train_forward_backward", "peak") > num_bytes, "both at once would not fit"
    asleep, with_weights = held(run, ENGINE, "sleep_engine"), held(run, ENGINE, "wake_weights")
    weights = sum(parameter.numel for parameter in run.plan.job.load_model().parameters) * 2
    assert asleep <= awake - CACHE - weights
    assert asleep + weights <= with_weights <= awake - CACHE
    assert held(run, TRAINER, "offload_role/policy") < held(run, TRAINER, "optimizer_step") / 4


def took_smaller_micro_batches(run: FinishedRun, plan: Plan) -> None:
    """The plan changed exactly once."""
    alarms = [json.loads(line) for line in (run.folder / "alarms.jsonl").read_text().splitlines()]
    changes = [alarm["change"] for alarm in alarms if alarm["kind"] == "change"]
    assert changes == [f"training.max_tokens_per_micro_batch={run.plan.job.max_tokens_per_micro_batch}"]
    assert run.plan.job.max_tokens_per_micro_batch < plan.job.max_tokens_per_micro_batch


@pytest.mark.nightly
def test_hybrid_weights_go_by_ipc_and_a_rehearsal_that_runs_out_takes_smaller_micro_batches(tmp_path: Path) -> None:
    plan = plan_of(PLACEMENTS["hybrid"], algorithm=WITHOUT_REFERENCE)
    assert plan.job.placement.transport is Transport.CUDA_IPC
    run = run_on_stand_ins(plan, tmp_path, 36 * MIB)
    agrees(run)
    took_smaller_micro_batches(run, plan)


@pytest.mark.nightly
def test_an_engine_computes_with_the_base_that_the_trainer_holds_on_its_gpu(tmp_path: Path) -> None:
    """Weights go through the IPC handle too; the engine has its caches and no weights."""
    adapters = {"placement": "hybrid", "sync_content": "adapter"}
    rollout = {"has_cuda_graphs": False, "kv_cache_memory": CACHE, "block_size": 32}

    def run(name: str, *, shares_base: bool) -> FinishedRun:
        parts = {"training": {"lora": {"rank": 4}}, "rollout": rollout | {"shares_base": shares_base}}
        return run_on_stand_ins(plan_of(adapters, **parts), tmp_path / name, 64 * MIB)

    apart, shared = run("apart", shares_base=False), run("shared", shares_base=True)
    for each in (apart, shared):
        agrees(each)
    weights = sum(parameter.numel for parameter in shared.plan.job.load_model().parameters) * 2
    freed = held(apart, ENGINE, "generate") - held(shared, ENGINE, "generate")
    assert weights <= freed <= weights * 1.02


@pytest.mark.nightly
def test_disaggregated_weights_are_broadcast_to_another_gpu(tmp_path: Path) -> None:
    plan = plan_of({"placement": "disaggregated"}, "2xh100-sxm", algorithm=WITHOUT_REFERENCE)
    assert plan.job.placement.transport is Transport.NCCL
    run = run_on_stand_ins(plan, tmp_path, 30 * MIB)
    agrees(run)
    assert {span.device for span in run.trace.spans if span.process == ENGINE} == {"cuda:1"}


@pytest.mark.nightly
def test_preferences_are_trained_on_without_an_engine(tmp_path: Path) -> None:
    pairs = {"prompts": "data/sort_digits/pairs.jsonl", "heldout": "data/sort_digits/heldout.jsonl"}
    preferences = {"name": "dpo", "learning_rate": 1e-4}
    plan = plan_of({"placement": "auto"}, num_samples=2, algorithm=preferences, data=pairs, rewards=[])
    run = run_on_stand_ins(plan, tmp_path, 64 * MIB)
    assert run.exit_code == 0, run.stderr
    assert {span.process for span in run.trace.spans} == {TRAINER, "scorer/reference/0", "driver/0"}
    assert (run.folder / "policy" / "model.safetensors").is_file()
