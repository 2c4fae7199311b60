"""Plans for GPUs run from beginning to end on stand-ins for the GPUs: driver, Ray, workers and weight sync are real.

vLLM sleeps with its own code for GPUs over an allocator that really gives memory back; all processes on a GPU share its
bytes, and run out of them.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.jobs import JOB, PLACEMENTS
from rlplan.emit.bundle import write_bundle
from rlplan.planner.executable import executable_plan
from rlplan.planner.plan import Plan
from rlplan.planner.search import best_plan
from rlplan.spec.base import validate
from rlplan.spec.job import JobSpec
from rlplan.units import MIB
from tests.factories import EXAMPLES
from tests.runtime.conftest import ROOT, FinishedRun, finish

pytestmark = pytest.mark.engine

NUM_STEPS = 2
ROUNDING = 0.02
"""Mean difference of log-probs in bf16 between vLLM's kernels and torch's."""


def plan_of(placement: dict[str, Any], gpus: str = "1xh100-sxm", **parts: Any) -> Plan:
    """A tiny job's plan for real GPUs."""
    workload = {"num_steps": NUM_STEPS, "num_prompts_per_step": 4, "num_samples_per_prompt": 4}
    lengths = {"max_prompt_len": 16, "max_response_len": 24, "num_heldout_prompts": 8, "evaluate_every": NUM_STEPS}
    data = {
        **JOB,
        "policy": {"path": "models/sorter", "init": "random"},
        "hardware": gpus,
        "workload": workload | lengths,
        "rollout": {"has_cuda_graphs": False, "kv_cache_memory": "8MiB"},
        "placement": placement,
        **parts,
    }
    return executable_plan(best_plan(validate(JobSpec, data, file="tiny.yaml").resolved(EXAMPLES)))


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


def held_after(run: FinishedRun, process: str, action: str) -> list[int]:
    """Bytes on the GPU of a process after an action, step by step."""
    kinds = ("device_allocated", "resident")
    return [
        sample.num_bytes
        for sample in run.trace.samples
        if (sample.process, sample.action_id, sample.kind, sample.statistic) == (process, action, *kinds)
    ]
