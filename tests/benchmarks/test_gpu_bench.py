"""The GPU benchmark, dry-run on a CPU: every part that can run there does, and what needs CUDA says so."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.cases import PARTS, TRAINED, Case, list_cases
from benchmarks.gpu.predict import predict
from benchmarks.gpu.records import SERVING_POINTS, TRAINING_POINTS, make_points
from rlplan.accuracy.compare import compare
from rlplan.accuracy.files.reading import read_points
from rlplan.accuracy.points import MeasuredPoint
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.spec.hardware.catalogue import get_gpu, read_profile
from rlplan.spec.hardware.profile import ComputeDtype, GpuProfile
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
RUN = [sys.executable, str(ROOT / "benchmarks" / "gpu" / "run.py"), "--tiny", "--device", "cpu"]
DEADLINE_S = 180
TRAINING_PARTS = ("device", "train-0.5b", "zero", "logprob")
EIGHT_BILLION = Case("train-8b", "train", TRAINED["train-8b"], "full", False, "plain", 32_768)


def dry_run(folder: Path, *parts: str) -> subprocess.CompletedProcess[str]:
    """Run parts of the benchmark into a folder."""
    chosen = [word for part in parts for word in ("--part", part)]
    command = [*RUN, *chosen, "--out", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=scale_seconds(DEADLINE_S), check=False, env=environment
    )


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The records, in the order in which they were written."""
    return [json.loads(line) for line in (folder / "results.jsonl").read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def dry_run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a dry run of every part but vLLM's."""
    folder = tmp_path_factory.mktemp("gpu-bench")
    done = dry_run(folder, *TRAINING_PARTS)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.engine
@pytest.mark.nightly
def test_every_case_is_measured_or_says_that_it_needs_cuda(dry_run_folder: Path) -> None:
    results = [line for line in read_records(dry_run_folder) if line["record"] == "result"]
    assert [line["id"] for line in results] == [
        case.id for part in TRAINING_PARTS for case in list_cases(part, is_tiny=True)
    ]
    skipped = {line["id"]: line["reason"] for line in results if line["status"] != "measured"}
    assert skipped == {"device-memory-tiny": "needs CUDA", "device-host-link-tiny": "needs CUDA"}


@pytest.mark.engine
@pytest.mark.nightly
def test_every_prediction_is_written_before_its_measurement(dry_run_folder: Path) -> None:
    seen = set()
    for line in read_records(dry_run_folder):
        if line["record"] == "prediction":
            seen.add(line["id"])
        elif line["record"] == "result":
            assert line["id"] in seen


@pytest.mark.engine
@pytest.mark.nightly
def test_tiny_training_steps_take_what_was_predicted(dry_run_folder: Path) -> None:
    predicted = {
        line["id"]: line["predicted"] for line in read_records(dry_run_folder) if line["record"] == "prediction"
    }
    for line in read_records(dry_run_folder):
        if line["record"] == "result" and line["case"]["action"] == "train":
            compared = set(predicted[line["id"]]) & set(line["measured"])
            assert compared
            for name in compared:
                assert predicted[line["id"]][name] == pytest.approx(line["measured"][name], rel=0.03), line["id"]


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.parametrize("part", ["train-0.5b", "zero", "logprob", "serving"])
def test_no_setting_that_the_benchmark_writes_is_unknown_to_rlplan_accuracy(part: str) -> None:
    machine = {
        "gpu": "NVIDIA H100 80GB HBM3",
        "total_bytes": 85_000_000_000,
        "date": "",
        "versions": {"vllm": "0.32.0"},
    }
    values = dict.fromkeys([*TRAINING_POINTS, *SERVING_POINTS], 2e10)
    cases = [dataclasses.asdict(case) for case in list_cases(part) if case.model][::5]
    written = [point for case in cases for point in make_points({"case": case, "machine": machine, "measured": values})]
    compared = compare(MeasuredPoint.model_validate(point) for point in written).points
    assert {point.reason for point in compared} == {None}


@pytest.mark.engine
@pytest.mark.nightly
def test_points_can_be_read_by_rlplan_accuracy_and_name_the_dry_run(dry_run_folder: Path) -> None:
    points = json.loads((dry_run_folder / "points.json").read_text("utf-8"))["points"]
    assert {"train_peak", "train_steady", "logprob_peak"} <= {point["kind"] for point in points}
    assert all(point["model"].endswith("(tiny)") and point["provenance"] == "measured" for point in points)
    read = read_points(dry_run_folder / "points.json")
    peaks = [point for point in read if point.kind == "train_peak"]
    assert {point.measured.statistic.value for point in peaks} == {"allocated"}
    assert all(point.measured.bytes_per_unit == 1 for point in peaks)


@pytest.mark.engine
@pytest.mark.nightly
def test_a_second_run_goes_on_where_the_first_was_cut_off(dry_run_folder: Path, tmp_path: Path) -> None:
    last = list_cases("logprob", is_tiny=True)[-1].id
    kept = [line for line in read_records(dry_run_folder) if not (line["record"] == "result" and line["id"] == last)]
    assert len(kept) == len(read_records(dry_run_folder)) - 1
    text = "\n".join(json.dumps(line) for line in kept) + '\n{"record": "result", "id'
    (tmp_path / "results.jsonl").write_text(text + "\n", encoding="utf-8")
    done = dry_run(tmp_path, "logprob")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [f"{last}: measured"]


@pytest.mark.engine
@pytest.mark.nightly
def test_vllm_starts_with_random_weights_and_has_the_tokens_that_were_predicted(tmp_path: Path) -> None:
    done = dry_run(tmp_path, "serving")
    assert done.returncode == 0, done.stdout + done.stderr
    results = {line["id"]: line for line in read_records(tmp_path) if line["record"] == "result"}
    (engine,) = (line for line in results.values() if line["case"]["action"] == "engine")
    predicted = predict(Case(**engine["case"]), None)
    assert engine["measured"]["kv_tokens"] == predicted["kv_tokens"]
    assert engine["measured"]["kv_bytes_per_token"] == predicted["kv_bytes_per_token"]
    assert {line["case"]["action"]: line["status"] for line in results.values()} == {
        "hand-over": "measured",
        "engine": "measured",
        "sleep": "skipped",
    }


@pytest.mark.nightly
def test_running_out_of_memory_is_a_result(tmp_path: Path) -> None:
    children = importlib.import_module("benchmarks.gpu.children")
    case = dataclasses.replace(list_cases("logprob", is_tiny=True)[0], num_tokens=10**14)
    result = children.run_case(case, "cpu", None, scale_seconds(60), tmp_path / "log")
    assert result.status == "out_of_memory", result


def test_a_case_that_does_not_answer_is_ended(tmp_path: Path) -> None:
    children = importlib.import_module("benchmarks.gpu.children")
    result = children.run_case(list_cases("zero", is_tiny=True)[0], "cpu", None, 0.01, tmp_path / "log")
    assert result.status == "timed_out"


@pytest.mark.engine
@pytest.mark.nightly
def test_a_case_ends_with_the_command_that_began_it(tmp_path: Path) -> None:
    command = [*RUN, "--part", "zero", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: cases_running(tmp_path), 60)
    finally:
        process.kill()
        process.wait(timeout=scale_seconds(30))
    wait_until(lambda: not cases_running(tmp_path), 60)


def cases_running(folder: Path) -> list[str]:
    """Processes whose output goes to a log in the folder: the cases that are being measured."""
    running = []
    for link in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            target = link.readlink()
        except OSError:  # another user's, or gone
            continue
        if target.parent == folder:
            running.append(link.parts[2])
    return running


def test_without_a_gpu_the_command_says_what_to_do(tmp_path: Path) -> None:
    run = importlib.import_module("benchmarks.gpu.run")
    detected = dataclasses.replace(run.detect(), gpus=())
    with pytest.raises(run.HostError, match="no CUDA device answered"):
        run.describe_machine(detected, "cuda")


def test_a_case_that_is_predicted_not_to_fit_is_not_tried() -> None:
    run = importlib.import_module("benchmarks.gpu.run")
    profile = get_gpu("h100-sxm", where="test")
    machine = {"total_bytes": profile.memory.value, "host_bytes": 1 << 40}
    assert "on the device, which has" in run.why_it_will_not_fit(EIGHT_BILLION, profile, machine)
    small = list_cases("train-0.5b")[0]
    assert run.why_it_will_not_fit(small, profile, machine) == ""
    offloaded = next(case for case in list_cases("zero") if case.offload == "all" and "7B" in case.model)
    machine["host_bytes"] = 1 << 30
    assert "on the host, which has" in run.why_it_will_not_fit(offloaded, profile, machine)


@pytest.mark.parametrize("is_tiny", [False, True])
def test_every_case_has_a_name_of_its_own_and_what_uses_a_model_has_a_prediction(is_tiny: bool) -> None:
    cases = [case for part in PARTS for case in list_cases(part, is_tiny=is_tiny)]
    assert len({case.id for case in cases}) == len(cases)
    for case in cases:
        predicted = predict(case, None)
        assert bool(predicted) == bool(case.model), case.id
        if "resident_bytes" in predicted:
            assert predicted["resident_bytes"] < predicted["allocated_bytes"]


def test_what_was_measured_of_a_device_is_a_hardware_profile(tmp_path: Path) -> None:
    device = importlib.import_module("benchmarks.gpu.device")
    measured = {
        "total_bytes": 85_017_493_504,
        "context_with_cublas_bytes": 600 << 20,
        "granularity_bytes": 2 << 20,
        "device_bytes_per_s": 2.9e12,
        "bfloat16_best_flops_per_s": 7.01e14,
        "host_to_device_pinned_bytes_per_s": 5.5e10,
    }
    gpu = {"name": "NVIDIA H100 80GB HBM3", "architecture": "9.0", "source": "a test"}
    text = device.profile_yaml(measured, gpu, "2026-11-20")
    path = tmp_path / "h100-80gb-hbm3-measured.yaml"
    path.write_text(text, encoding="utf-8")
    profile = read_profile(path)
    assert isinstance(profile, GpuProfile)
    assert profile.memory.value == 85_017_493_504
    assert profile.flops_per_s(ComputeDtype.BFLOAT16) == 701_000_000_000_000
    assert profile.host_link is not None
    assert profile.host_link.bytes_per_s.value == 55_000_000_000


def test_a_whole_job_is_planned_for_the_gpu_in_each_placement() -> None:
    from benchmarks.gpu.jobs import PLACEMENTS, plan_on_cpu, plan_on_gpu
    from rlplan.vocabulary import ActionKind

    for name, wanted in PLACEMENTS.items():
        plan, dry = plan_on_gpu(name, "h200-sxm"), plan_on_cpu(name)
        assert plan.schedule.placement == dry.schedule.placement == wanted["placement"]
        kinds, dry_kinds = ({action.kind for action in each.schedule.step} for each in (plan, dry))
        sleeps = wanted["placement"] == "colocated"
        assert (ActionKind.SLEEP_ENGINE in kinds, ActionKind.STOP_ENGINE in dry_kinds) == (sleeps, sleeps)
        assert plan.job.placement.sync_senders == "one"


def test_whole_jobs_say_that_there_is_no_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from benchmarks.gpu import jobs
    from rlplan.runtime.host.detect import detect

    if detect().gpus:
        assert jobs.found_gpu()
        return
    assert jobs.main(["--out", str(tmp_path)]) == 4
    assert "no GPU with a profile answered" in capsys.readouterr().err
