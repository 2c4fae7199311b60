"""Ten minutes on a GPU, dry-run on a CPU: the riskiest parts first, everything kept after each case."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import cases, ten_minutes
from benchmarks.gpu.cases import TEN_MINUTES, Case, list_cases
from benchmarks.gpu.jobs import run_step
from rlplan.runtime.processes.machine_speed import scale_seconds

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, str(ROOT / "benchmarks" / "gpu" / "ten_minutes.py"), "--tiny", "--device", "cpu"]
ABSENT = ("transformers", "vllm", "deepspeed", "ray")
TORCH_ALONE = {"attention", "head", "sync", "checksums", "offload", "matmul", "copy"}
STEPS = ("step-colocated", "step-hybrid")


def dry_run(folder: Path, part: str, budget_s: float, absent: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a part. absent: a folder for stand-ins of the packages that are to be missing."""
    for name in ABSENT if absent else ():
        text = f"raise ModuleNotFoundError('no module named {name}', name='{name}')\n"
        (folder.parent / "absent" / f"{name}.py").write_text(text)
    budget = scale_seconds(budget_s)
    paths = {"PYTHONPATH": str(absent)} if absent else {}
    return subprocess.run(
        [*COMMAND, "--part", part, "--out", str(folder), "--budget-s", str(budget)],
        capture_output=True,
        text=True,
        timeout=budget + scale_seconds(60),
        check=False,
        env=os.environ | paths | {"OMP_NUM_THREADS": "1"},
    )


def read_cases(folder: Path) -> dict[str, dict[str, Any]]:
    """The cases of the result file by id, in the order in which they ran."""
    rows = json.loads((folder / "ten_minutes.json").read_text("utf-8"))["cases"]
    return {row["id"]: row for row in rows}


def test_three_calls_fit_into_ten_minutes_and_what_needs_torch_alone_comes_first() -> None:
    assert TEN_MINUTES == ("torch", "vllm", "steps")
    assert ten_minutes.CALL_LIMIT_S <= 170
    assert 2 * ten_minutes.CASE_LIMIT_S <= ten_minutes.CALL_LIMIT_S
    assert [case.action for case in list_cases("torch")][:3] == ["attention", "head", "sync"]
    assert [case.action for case in list_cases("steps")][:2] == list(STEPS)


def test_with_torch_alone_the_kernels_are_measured_and_the_rest_says_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "absent").mkdir()
    done = dry_run(tmp_path / "out", "torch", 240, tmp_path / "absent")
    assert done.returncode == 0, done.stdout + done.stderr
    by_id = read_cases(tmp_path / "out")
    assert list(by_id) == [case.id for case in list_cases("torch", is_tiny=True)]
    measured = {row["case"]["action"]: row["measured"] for row in by_id.values() if row["status"] == "measured"}
    assert measured.keys() == TORCH_ALONE, done.stderr
    reasons = {row["case"]["action"]: row["reason"] for row in by_id.values() if row["status"] != "measured"}
    assert reasons == {"packed-step": "needs transformers", "memory": "needs CUDA", "host-link": "needs CUDA"}
    assert 0 < measured["attention"]["key_difference"] < 0.02
    assert 0 < measured["head"]["hidden_difference"] < 0.02
    assert measured["sync"]["logprob_difference_max"] == 0


def test_the_same_command_goes_on_with_what_was_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [Case("torch", "copy", is_tiny=True), Case("torch", "checksums", is_tiny=True)]
    tried: list[str] = []

    def run_one(case: Case, *_: object) -> Any:
        from benchmarks.gpu.children import Result

        tried.append(case.action)
        is_late = case.action == "checksums" and len(tried) == 2
        return Result("not_reached", "the part's time was up") if is_late else Result("measured")

    monkeypatch.setattr("benchmarks.gpu.run._run_case", run_one)
    monkeypatch.setattr("benchmarks.gpu.run.list_cases", lambda *_, **__: few)
    command = ["--tiny", "--device", "cpu", "--part", "torch", "--out", str(tmp_path)]
    for _ in range(3):
        assert ten_minutes.main(command) == 0
    assert tried == ["copy", "checksums", "checksums"]
    assert {row["status"] for row in read_cases(tmp_path).values()} == {"measured"}


def test_a_whole_step_is_not_begun_where_engines_are_missing(tmp_path: Path) -> None:
    for name in STEPS:
        result = run_step(Case("steps", name), "cuda", tmp_path, 60.0)
        assert result.status in ("not_reached", "failed")
        assert not any(tmp_path.iterdir())


@pytest.mark.engine
@pytest.mark.nightly
def test_the_trainer_steps_on_packed_sequences_and_its_states_are_as_predicted(tmp_path: Path) -> None:
    done = dry_run(tmp_path, "torch", 240)
    assert done.returncode == 0, done.stdout + done.stderr
    (step,) = (row for row in read_cases(tmp_path).values() if row["case"]["action"] == "packed-step")
    assert step["measured"]["resident_bytes"] == pytest.approx(step["predicted"]["resident_bytes"], rel=0.03)
    assert step["measured"]["tokens_per_s"] > 0


@pytest.mark.engine
@pytest.mark.nightly
def test_an_engine_decodes_and_has_the_predicted_number_of_tokens(tmp_path: Path) -> None:
    done = dry_run(tmp_path, "vllm", 300)
    assert done.returncode == 0, done.stdout + done.stderr
    (engine,) = (row for row in read_cases(tmp_path).values() if row["case"]["action"] == "engine")
    assert engine["measured"]["decode_1_s"] > 0
    assert engine["measured"]["kv_tokens"] == engine["predicted"]["kv_tokens"]


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.parametrize("name", STEPS)
def test_a_whole_step_runs_in_each_placement(tmp_path: Path, name: str) -> None:
    result = run_step(Case("steps", name, is_tiny=True), "cpu", tmp_path / "run", scale_seconds(110))
    assert (result.status, result.measured["num_steps"]) == ("measured", 1), result.reason


def test_every_case_has_an_action_that_measures_it() -> None:
    from benchmarks.gpu.children import _action

    for part in (*cases.PARTS, *TEN_MINUTES):
        for case in list_cases(part):
            assert case.action.startswith("step-") or callable(_action(case))
