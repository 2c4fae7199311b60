"""Real runs, shared between tests: each is made once, by the command line, as a user would."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from rlplan.planner.plan import Plan, read_plan
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.trace import Trace
from tests.runtime.runs.architectures import make_job

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART_STEPS = 8
"""Steps of `quickstart_run`."""
RLPLAN = str(Path(sys.executable).parent / "rlplan")
DEADLINE_S = 400
OTHER_LAYOUT = (
    "placement.placement=disaggregated",
    "hardware.num_devices=3",
    "training.zero_stage=1",
    "workload.mini_batch_size=128",
    "workload.micro_batch_size_per_gpu=32",
    "workload.num_steps=3",
    "workload.evaluate_every=2",
    "algorithm.learning_rate=1e-3",
    "controls.skip_sync_after_step=1",
)
"""Overrides of `other_layout_run`."""
COLOCATED = (
    "algorithm.kl_coef=0.005",
    "placement.placement=colocated",
    "placement.offload=disk",
    "workload.num_prompts_per_step=8",
    "workload.num_samples_per_prompt=8",
    "workload.mini_batch_size=32",
    "workload.micro_batch_size_per_gpu=32",
    "rollout.kv_cache_memory=256MiB",
    "checkpoints.every=1",
)
"""Overrides of `colocated_run`."""
ASYNC = (
    "examples/rewards/code-executor.yaml",
    "algorithm.kl_coef=0",
    "workload.num_steps=3",
    "workload.evaluate_every=3",
    "workload.num_heldout_prompts=16",
    "workload.num_prompts_per_step=8",
    "workload.mini_batch_size=64",
    "workload.micro_batch_size_per_gpu=32",
    "workload.max_response_len=240",
    "workload.mean_response_len=44",
    "workload.response_lengths={kind: lognormal, median: 30, sigma: 0.9}",
    "rollout.kv_cache_memory=64MiB",
    "rollout.max_num_seqs=2",  # generation of a step takes longer than judging the last one, on a busy machine too
    "placement.placement=disaggregated",
    "placement.transport=shared_memory",
    "placement.max_staleness=1",
    "controls.forces_lengths=true",
    "preflight.rehearses=false",
)
"""`async_run`: as examples/maturity/5-async.yaml, on programs."""
FEW_PROCESSES = ("hardware.num_devices=1", "algorithm.kl_coef=0")
"""One trainer, one engine and no scorer: half of what a run costs is starting its processes."""


@dataclass(frozen=True)
class FinishedRun:
    """A run folder after the run has ended, and how the command ended."""

    folder: Path
    exit_code: int
    stdout: str
    stderr: str

    @property
    def plan(self) -> Plan:
        return read_plan(self.folder / "plan.json")

    @property
    def trace(self) -> Trace:
        return Trace.read(self.folder / "trace.jsonl")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads((self.folder / "status.json").read_text())
        return status


def start(*arguments: str) -> subprocess.Popen[str]:
    """Begin an `rlplan` command in the repository's root, in a process group of its own."""
    return subprocess.Popen(
        [RLPLAN, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], folder: Path) -> FinishedRun:
    """Wait for a command; its whole process group is killed when it does not end in time."""
    try:
        stdout, stderr = process.communicate(timeout=scale_seconds(DEADLINE_S))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return FinishedRun(folder, process.returncode, stdout, stderr)


def list_descendants(pid: int) -> list[int]:
    """Process ids of everything below a process."""
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def alive(pids: list[int]) -> list[int]:
    """Those of the processes that are still there and no zombies."""
    import psutil

    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


Runner = Callable[..., FinishedRun]


@pytest.fixture(scope="session")
def run_job(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """`run_job(job, *overrides)`: a run in a new folder."""

    def run(job: str, *arguments: str) -> FinishedRun:
        folder = tmp_path_factory.mktemp("run") / "run"
        return finish(start("run", job, *arguments, "--out", str(folder)), folder)

    return run


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the processes of one `make test` share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def run_once(run_job: Runner, shared: Path) -> Runner:
    """`run_once(job, *overrides)`: a run that the processes of one `make test` share; the first that asks makes it."""

    def run(job: str, *arguments: str) -> FinishedRun:
        record = shared / f"run-{hashlib.sha256(repr((job, arguments)).encode()).hexdigest()[:16]}.json"
        with FileLock(record.with_suffix(".lock"), timeout=scale_seconds(2 * DEADLINE_S)):
            if not record.exists():
                finished = run_job(job, *arguments)
                record.write_text(
                    json.dumps([str(finished.folder), finished.exit_code, finished.stdout, finished.stderr])
                )
        folder, exit_code, stdout, stderr = json.loads(record.read_text())
        return FinishedRun(Path(folder), exit_code, stdout, stderr)

    return run


@pytest.fixture(scope="session")
def quickstart_run(run_once: Runner) -> FinishedRun:
    """The quickstart with its report, as `make run` makes it, at a rate with which few steps show that it learns."""
    quick = (f"workload.num_steps={QUICKSTART_STEPS}", "workload.evaluate_every=4", "algorithm.learning_rate=1e-4")
    return run_once("examples/quickstart.yaml", "--report", *quick)


@pytest.fixture(scope="session")
def memory_bound_run(run_once: Runner) -> FinishedRun:
    """The job whose memory is in its models."""
    return run_once("examples/memory-bound.yaml")


@pytest.fixture(scope="session")
def other_layout_run(run_once: Runner) -> FinishedRun:
    """Disaggregated, three devices, two optimizer steps of two micro-batches each."""
    return run_once("examples/quickstart.yaml", *OTHER_LAYOUT)


@pytest.fixture(scope="session")
def colocated_job(shared: Path) -> tuple[str, ...]:
    """Three steps of a Gemma 2: its window, caps and multipliers are seen in the same run."""
    folder = shared / "gemma2"
    with FileLock(folder.with_suffix(".lock")):
        job = folder / "job.yaml" if folder.exists() else make_job("Gemma2ForCausalLM", folder)
    return str(job), *COLOCATED


@pytest.fixture(scope="session")
def colocated_run(run_once: Runner, colocated_job: tuple[str, ...]) -> FinishedRun:
    """Trainer, scorer and engine time-share a device; the KV cache is large enough to be seen when it goes."""
    return run_once(*colocated_job)


@pytest.fixture(scope="session")
def async_run(run_once: Runner) -> FinishedRun:
    """Generation runs ahead of training, with lengths that have a long tail; programs are judged meanwhile."""
    return run_once(*ASYNC)
