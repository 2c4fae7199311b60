"""Runs that are killed and go on: the same metrics, samples and weights as of one that nobody touched, to the bit."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlplan.runtime.checkpoints.finding import find_checkpoint
from rlplan.runtime.checkpoints.manifest import POINTER, checkpoints_folder
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.run_folder.rollout_files import FOLDER, list_step_files
from tests.factories import EXAMPLES
from tests.runtime.conftest import FinishedRun, alive, finish, list_descendants, start
from tests.waiting import wait_until

pytestmark = pytest.mark.engine

NUM_STEPS = 11
PROMPTS_PER_EPOCH = 24
"""Epochs of 8 prompts per step end with steps 3, 6 and 9: each save point lies at most one step from such an end."""

SIZES = (
    "workload.num_prompts_per_step=8",
    "workload.mini_batch_size=64",
    "workload.evaluate_every=3",
    "algorithm.learning_rate=1e-3",
    "preflight.rehearses=false",
    "checkpoints.every=1",
)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = (EXAMPLES / "data" / "sort_digits" / "train.jsonl").read_text().splitlines()[:PROMPTS_PER_EPOCH]
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    path.write_text("\n".join(rows) + "\n")
    return path


def job(prompts: Path, *overrides: str, num_steps: int = NUM_STEPS) -> tuple[str, ...]:
    data = (f"data.prompts={prompts}", f"workload.num_steps={num_steps}")
    return ("run", "examples/quickstart.yaml", *SIZES, *data, *overrides)


@pytest.fixture(scope="module")
def uninterrupted_run(prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    folder = tmp_path_factory.mktemp("run") / "run"
    run = finish(start(*job(prompts, "checkpoints.keep_last=100"), "--out", str(folder)), folder)
    assert run.exit_code == 0, run.stderr
    return run


def find_committed(folder: Path) -> int:
    """The step that the pointer names, 0 without one."""
    pointer = checkpoints_folder(folder) / POINTER
    return int(json.loads(pointer.read_text())["checkpoint"].removeprefix("step-")) if pointer.exists() else 0


def finished_steps(folder: Path) -> int:
    """Steps whose metrics are written."""
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") - 1 if path.exists() else -1


def kill_run(command: tuple[str, ...], folder: Path, reached: Callable[[], bool], delay_s: float) -> None:
    """Begin or resume a run, and kill its driver some time after a moment; everything that it started goes with it."""
    process = start(*command)
    wait_until(lambda: reached() or process.poll() is not None, 200)
    time.sleep(delay_s)
    kill(process)


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a driver outright; its workers go with it. Small agents of Ray take longer, and hold nothing of the run."""
    workers = [pid for pid in list_descendants(process.pid) if is_worker(pid)] if process.poll() is None else []
    process.kill()
    process.communicate(timeout=scale_seconds(30))
    wait_until(lambda: alive(workers) == [], 60)


def is_worker(pid: int) -> bool:
    import psutil

    return psutil.pid_exists(pid) and " ".join(psutil.Process(pid).cmdline()).startswith("ray::WorkerProcess")


def assert_nothing_is_lost(folder: Path) -> None:
    """Assert that at most one finished step is repeated, and none that was committed."""
    checkpoint = find_checkpoint(folder)
    assert checkpoint.problems == ()
    assert checkpoint.step >= find_committed(folder)
    assert checkpoint.step >= finished_steps(folder) - 1


def assert_same(run: FinishedRun, other: FinishedRun) -> None:
    names = ["metrics.jsonl", "prompts.jsonl", "policy/model.safetensors"]
    kept, others = (list_step_files(folder) for folder in (run.folder, other.folder))
    assert kept.keys() == others.keys() == set(range(1, max(others) + 1))
    for name in (*names, *(path.relative_to(run.folder) for path in kept.values())):
        assert (run.folder / name).read_bytes() == (other.folder / name).read_bytes(), name
    assert states(run.folder) == states(other.folder)


def assert_goes_on_to_the_bit(command: tuple[str, ...], step: int, whole: FinishedRun, folder: Path) -> None:
    """Killed after a step's checkpoint and resumed, it ends as the run that nobody touched."""
    kill_run((*command, "--out", str(folder)), folder, lambda: find_committed(folder) >= step, 0.2)
    assert_nothing_is_lost(folder)
    run = finish(start("run", "--resume", str(folder)), folder)
    assert run.exit_code == 0, run.stderr
    assert_same(run, whole)


def trained_prompts(run: FinishedRun) -> list[str]:
    """Ids of all prompts of all steps."""
    rows = [json.loads(line) for line in (run.folder / "prompts.jsonl").read_text().splitlines()]
    assert [(row["step"], len(row["prompts"])) for row in rows] == [(step, 8) for step in range(1, NUM_STEPS + 1)]
    return [prompt for row in rows for prompt in row["prompts"]]


def states(folder: Path) -> dict[str, Any]:
    """Digests of the last checkpoint's tensors, and where the run stood."""
    checkpoint = find_checkpoint(folder)
    files = {name: file.sha256 for name, file in checkpoint.manifest.files.items() if name.endswith(".safetensors")}
    return {"step": checkpoint.step, "files": files, "state": checkpoint.state}


def as_if_killed(whole: FinishedRun, step: int, folder: Path) -> None:
    """A copy of a run's folder as a kill leaves it after a step: one checkpoint counts, later rows have no other."""
    shutil.copytree(whole.folder, folder)
    kept = f"step-{step:06d}"
    for path in checkpoints_folder(folder).glob("step-*"):
        if path.name != kept:
            shutil.rmtree(path)
    pointer = checkpoints_folder(folder) / POINTER
    pointer.write_text(json.dumps(json.loads(pointer.read_text()) | {"checkpoint": kept}))
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(status | {"state": "running", "exit_code": None}))
    shutil.rmtree(folder / "policy")
    (folder / FOLDER / f"step-{step + 1:06d}.partial").write_bytes(b"half a fi")
    for name in ("metrics.jsonl", "trace.jsonl"):
        with (folder / name).open("a") as rows:
            rows.write('{"step": 3, "half a ro')


def test_a_killed_run_goes_on_to_the_bit(colocated_run: FinishedRun, tmp_path: Path) -> None:
    """The state after a kill is made by hand here, to start one run less; the tests that follow kill real ones.

    That workers go with a driver that is killed: tests/runtime/processes/test_own_host.py.
    """
    folder = tmp_path / "run"
    as_if_killed(colocated_run, 2, folder)
    assert_nothing_is_lost(folder)
    run = finish(start("run", "--resume", str(folder)), folder)
    assert run.exit_code == 0, run.stderr
    assert_same(run, colocated_run)
    starts = [span.attempt for span in run.trace.spans if span.action_id == "start_trainer"]
    assert starts == [1, 2], "it began anew"


@pytest.mark.nightly
def test_a_lost_rank_and_two_kills_leave_no_trace(
    uninterrupted_run: FinishedRun, prompts: Path, tmp_path: Path
) -> None:
    folder, draw = tmp_path / "run", random.Random(0)
    process = start(*job(prompts), "--out", str(folder))
    wait_until(lambda: find_committed(folder) >= 1, 200)
    log = (folder / "logs" / "policy_trainer-1.log").read_text()
    os.kill(int(re.findall(r"is process (\d+)", log)[-1]), signal.SIGKILL)
    wait_until(lambda: '"kind": "resume"' in (folder / "alarms.jsonl").read_text(), 60)
    wait_until(lambda: finished_steps(folder) >= 3, 200)
    time.sleep(draw.random())
    kill(process)
    assert_nothing_is_lost(folder)
    before = finished_steps(folder)
    kill_run(("run", "--resume", str(folder)), folder, lambda: finished_steps(folder) > before, draw.random())
    assert_nothing_is_lost(folder)
    run = finish(start("run", "--resume", str(folder)), folder)
    assert run.exit_code == 0, run.stderr
    assert_same(run, uninterrupted_run)
    starts = [
        span for span in run.trace.spans if span.action_id == "start_trainer" and span.process == "policy_trainer/0"
    ]
    assert [span.attempt for span in starts] == [1, 2, 3, 4]
    again = finish(start("run", "--resume", str(folder)), folder)
    assert again.exit_code == 2
    assert "has finished" in again.stderr


MANY_STEPS = 150
"""More than are done between twenty kills."""


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_twenty_kills_at_random_moments_leave_no_trace(prompts: Path, tmp_path: Path) -> None:
    """Each some time after a step that was new, or after so many seconds, while the run may still be starting."""
    many = job(prompts, "workload.evaluate_every=50", num_steps=MANY_STEPS)
    whole = finish(start(*many, "--out", str(tmp_path / "whole")), tmp_path / "whole")
    folder, draw = tmp_path / "run", random.Random(1)
    command: tuple[str, ...] = (*many, "--out", str(folder))
    for _ in range(20):
        before, at_once = finished_steps(folder), draw.random() < 0.25
        reached = (lambda: True) if at_once else (lambda: finished_steps(folder) > before)  # noqa: B023
        kill_run(command, folder, reached, draw.uniform(0, 20 if at_once else 3))
        if find_committed(folder):
            assert_nothing_is_lost(folder)
            command = ("run", "--resume", str(folder))
        else:
            shutil.rmtree(folder)
    assert 0 < find_committed(folder) < MANY_STEPS
    run = finish(start("run", "--resume", str(folder)), folder)
    assert run.exit_code == 0, run.stderr
    assert_same(run, whole)


@pytest.mark.nightly
@pytest.mark.parametrize("step", range(1, NUM_STEPS))
def test_every_save_point_leads_to_the_same_end(
    uninterrupted_run: FinishedRun, prompts: Path, step: int, tmp_path: Path
) -> None:
    """The run resumes in a new folder from each step's checkpoint: ten save points, three of them ends of epochs."""
    earlier, folder = tmp_path / "earlier", tmp_path / "run"
    name = f"step-{step:06d}"
    shutil.copytree(checkpoints_folder(uninterrupted_run.folder) / name, checkpoints_folder(earlier) / name)
    run = finish(start(*job(prompts), "--resume", str(earlier), "--out", str(folder)), folder)
    assert run.exit_code == 0, run.stderr
    assert run.metrics == uninterrupted_run.metrics[step + 1 :]
    assert states(folder) == states(uninterrupted_run.folder)
    policy = "policy/model.safetensors"
    assert (folder / policy).read_bytes() == (uninterrupted_run.folder / policy).read_bytes()


OTHERS = {
    "time sharing": ("placement.placement=colocated", "placement.offload=disk", "rollout.kv_cache_memory=64MiB"),
    "values": ("algorithm.name=ppo",),
    "adapters": ("training.lora={rank: 4}", "placement.sync_content=adapter"),
    "a shared base": ("training.lora={rank: 4}", "placement.sync_content=adapter", "rollout.shares_base=true"),
    "deltas": ("placement.sync_content=delta", "training.dtype=bfloat16", "rollout.dtype=bfloat16"),
    "shares": ("training.zero_stage=3",),
    "two engines": ("rollout.num_engines=2",),
    "replaced groups": ("algorithm.name=dapo", "algorithm.max_refills=2"),
    "baselines": ("algorithm.name=remax",),
    "pairs": ("algorithm.name=online_dpo", "algorithm.kl_coef=0.1"),
    "corrected": ("algorithm.importance=truncate", "workload.mini_batch_size=32"),
    "a recipe": (
        "algorithm.lr_scheduler_type=cosine",
        "algorithm.lr_warmup_steps=2",
        "workload.mini_batch_size=32",
        "workload.num_epochs_per_step=2",
        "workload.evaluate_every=1",
        "workload.num_evaluation_samples=2",
        "workload.evaluation_temperature=1.0",
        "early_stopping={metric: reward/mean, patience: 100}",
        "checkpoints.best_metric=evaluate/accuracy/avg@2",
    ),
    "values that warm up": ("algorithm.name=ppo", "algorithm.value_warmup_steps=3"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("overrides", OTHERS.values(), ids=OTHERS)
def test_every_kind_of_run_goes_on_to_the_bit(overrides: tuple[str, ...], prompts: Path, tmp_path: Path) -> None:
    whole = finish(start(*job(prompts, *overrides, num_steps=4), "--out", str(tmp_path / "whole")), tmp_path / "whole")
    assert whole.exit_code == 0, whole.stderr
    assert_goes_on_to_the_bit(job(prompts, *overrides, num_steps=4), 2, whole, tmp_path / "run")


@pytest.mark.nightly
def test_a_run_that_runs_ahead_goes_on_and_trains_each_prompt_once(
    uninterrupted_run: FinishedRun, prompts: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    ahead = ("placement.placement=disaggregated", "placement.max_staleness=1")
    kill_run((*job(prompts, *ahead), "--out", str(folder)), folder, lambda: find_committed(folder) >= 2, 0.3)
    run = finish(start("run", "--resume", str(folder)), folder)
    assert run.exit_code == 0, run.stderr
    assert [row["step"] for row in run.metrics if row["step"] > 0] == list(range(1, NUM_STEPS + 1))
    assert max(row["staleness/max"] for row in run.metrics if row["step"] > 0) <= 1
    assert Counter(trained_prompts(run)) == Counter(trained_prompts(uninterrupted_run))
