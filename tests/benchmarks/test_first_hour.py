"""The first hour on a GPU, dry-run on a CPU with torch alone: the riskiest parts first, everything kept after each."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.cases import FIRST_HOUR, Case, list_cases
from benchmarks.gpu.first_hour import PART_LIMIT_S
from benchmarks.gpu.jobs import run_step
from rlplan.runtime.processes.machine_speed import scale_seconds

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, str(ROOT / "benchmarks" / "gpu" / "first_hour.py"), "--tiny", "--device", "cpu"]
ABSENT = ("transformers", "vllm", "deepspeed", "ray")
TORCH_ALONE = {"hand-over", "sync", "offload", "matmul", "copy"}
STEPS = ("step-colocated", "step-hybrid")


def dry_run(folder: Path, absent: Path, *parts: str) -> subprocess.CompletedProcess[str]:
    """The parts in an environment that has torch and lacks what trains and serves."""
    for name in ABSENT:
        (absent / f"{name}.py").write_text(f"raise ModuleNotFoundError('no module named {name}', name='{name}')\n")
    chosen = [word for part in parts for word in ("--part", part)]
    return subprocess.run(
        [*COMMAND, *chosen, "--out", str(folder)],
        capture_output=True,
        text=True,
        timeout=scale_seconds(300),
        check=False,
        env=os.environ | {"PYTHONPATH": str(absent), "OMP_NUM_THREADS": "1"},
    )


def read_cases(folder: Path) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((folder / "first_hour.json").read_text("utf-8"))["cases"]
    return cases


def test_what_is_most_likely_to_fail_comes_first_and_no_part_takes_two_minutes() -> None:
    assert FIRST_HOUR[:5] == ("hand-over", "sleep", "sync", *STEPS)
    assert PART_LIMIT_S < 120


@pytest.mark.nightly
def test_with_torch_alone_all_that_needs_no_engine_is_measured_and_the_rest_says_what_it_needs(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder, absent = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("absent")
    parts = [part for part in FIRST_HOUR if part not in STEPS]
    done = dry_run(folder, absent, *parts)
    assert done.returncode == 0, done.stdout + done.stderr
    by_id = {case["id"]: case for case in read_cases(folder)}
    assert list(by_id) == [case.id for part in parts for case in list_cases(part, is_tiny=True)]
    measured = {case["case"]["action"] for case in by_id.values() if case["status"] == "measured"}
    assert measured == TORCH_ALONE, done.stderr
    reasons = {case["case"]["action"]: case["reason"] for case in by_id.values() if case["status"] != "measured"}
    assert reasons == {
        "sleep": "needs CUDA",
        "train": "needs transformers",
        "host-link": "needs CUDA",
        "memory": "needs CUDA",
    }
    sync = by_id["sync-sync-tiny"]["measured"]
    assert sync["logprob_difference_max"] == 0
    assert sync["sent_bytes"] > 0
    again = dry_run(folder, absent, "hand-over", "sync", "peaks")
    lines = again.stderr.splitlines()
    assert [line.split(":")[1] for line in lines] == [" not_reached needs transformers"] * 2, again.stderr
    assert [case["id"] for case in read_cases(folder)] == list(by_id)


def test_a_whole_step_is_not_begun_where_engines_are_missing(tmp_path: Path) -> None:
    for name in STEPS:
        result = run_step(Case(name, name), "cuda", tmp_path, 60.0)
        assert result.status in ("not_reached", "failed")
        assert not any(tmp_path.iterdir())


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.parametrize("name", STEPS)
def test_a_whole_step_runs_in_each_placement(tmp_path: Path, name: str) -> None:
    result = run_step(Case(name, name, is_tiny=True), "cpu", tmp_path / "run", scale_seconds(110))
    assert (result.status, result.measured["num_steps"]) == ("measured", 1), result.reason
