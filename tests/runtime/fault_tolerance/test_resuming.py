"""Resuming: the lines of a run that goes on, the folder that is meant, and messages that say how to go on."""

import json
import os
from pathlib import Path

import pytest

from rlplan.errors import EXIT_RESUMABLE, InterruptedRunError, RlplanError, RunError, SpecError
from rlplan.runtime.checkpoints.finding import Resumption, find_checkpoint
from rlplan.runtime.checkpoints.identity import MAY_CHANGE, compare, describe_identity
from rlplan.runtime.checkpoints.manifest import POINTER, checkpoints_folder
from rlplan.runtime.fault_tolerance.resuming import (
    add_resume_command,
    check_resumable,
    copy_checkpoint,
    find_latest_run,
    find_own_bundle,
    find_run_to_resume,
    return_to_checkpoint,
)
from rlplan.runtime.fault_tolerance.supervision import LostGroupError
from rlplan.runtime.measure.memory_meter import Measurement
from rlplan.runtime.run_folder.recorder import Recorder
from rlplan.spec.fingerprints import model_fingerprint
from rlplan.trace import Trace
from tests.factories import EXAMPLES, make_job, make_plan
from tests.memory.model.packed_base import packed_base
from tests.runtime.checkpoints.test_folder import save


def read_lines(folder: Path, name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_lines_of_steps_that_are_done_again_go_and_half_a_line_with_them(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, {})
    for step in (0, 1, 2, 3):
        recorder.write_row("metrics.jsonl", {"step": step, "reward/mean": 0.5})
    recorder.write_alarm(3, "leak", "grows")
    recorder.write_status("running", None)
    recorder.close()
    metrics = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(metrics + '{"step": 4, "rew')
    (tmp_path / "timings.jsonl").write_text('{"step": 2}\n{"step": -1}\nnonsense\n')
    recorder = Recorder(tmp_path, {}, after_step=2)
    recorder.write_row("metrics.jsonl", {"step": 3})
    recorder.sync()
    recorder.close()
    assert [row["step"] for row in read_lines(tmp_path, "metrics.jsonl")] == [0, 1, 2, 3]
    assert [row["step"] for row in read_lines(tmp_path, "timings.jsonl")] == [2]
    assert [row["kind"] for row in read_lines(tmp_path, "alarms.jsonl")] == ["leak"]
    assert read_lines(tmp_path, "trace.jsonl")[0]["type"] == "trace"
    assert recorder.origin_s == pytest.approx((tmp_path / "status.json").stat().st_mtime, abs=5)


def test_each_start_of_a_run_has_the_next_number_also_after_one_that_was_killed_half_way(tmp_path: Path) -> None:
    start = next(action for action in make_plan().schedule.start if action.processes)
    measured = Measurement(start.processes[0], 1.0, 2.0, 10, 10, {}, {})
    recorder = Recorder(tmp_path, {})
    recorder.record(start, 0, [measured])
    recorder.truncate_after(1)  # a lost group: the same driver goes on
    recorder.record(start, 0, [measured])
    recorder.close()
    for _ in range(2):  # killed before anything but one action was on record
        recorder = Recorder(tmp_path, {}, after_step=1)
        recorder.record(start, 0, [measured])
        recorder.close()
    Recorder(tmp_path, {}, after_step=1).close()  # killed before it started anything
    spans = Trace.read(tmp_path / "trace.jsonl").spans
    assert [span.attempt for span in spans] == [1, 2, 3, 4]


def test_the_latest_run_is_the_one_whose_checkpoint_is_the_newest(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no run below"):
        find_latest_run(tmp_path)
    for name in ("a/1", "b/2", "a/3"):
        save(tmp_path / name, 1)
    pointer = checkpoints_folder(tmp_path / "b/2") / POINTER
    later = pointer.stat().st_mtime_ns + 10**9
    os.utime(pointer, ns=(later, later))
    assert find_latest_run(tmp_path) == tmp_path / "b/2"


def test_a_finished_run_and_one_without_its_bundle_are_not_resumed_in_place(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="holds no bundle"):
        find_own_bundle(tmp_path)
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "execution.json").write_text("{}")
    assert find_own_bundle(tmp_path) == tmp_path / "bundle"
    (tmp_path / "status.json").write_text('{"state": "finished"}')
    with pytest.raises(SpecError, match="has finished"):
        find_own_bundle(tmp_path)


def test_a_checkpoint_taken_along_is_the_other_folders_own(tmp_path: Path) -> None:
    save(tmp_path / "earlier", 3)
    checkpoint = copy_checkpoint(find_checkpoint(tmp_path / "earlier"), tmp_path / "later")
    assert checkpoint.folder == tmp_path / "later" / "checkpoints" / "step-000003"
    save(tmp_path / "earlier", 4, keep_last=1)
    assert find_checkpoint(tmp_path / "later").step == 3


def resumption(job_step: int, identity: dict[str, str], tmp_path: Path) -> Resumption:
    save(tmp_path, job_step)
    checkpoint = find_checkpoint(tmp_path)
    manifest = checkpoint.manifest.model_copy(update={"identity": identity})
    return Resumption(checkpoint.folder, manifest, checkpoint.state)


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("seed", {"seed": 5}),
        ("workload.num_prompts_per_step", {"workload.num_prompts_per_step": 2, "workload.mini_batch_size": 8}),
        ("workload.num_samples_per_prompt", {"workload.num_samples_per_prompt": 2, "workload.mini_batch_size": 8}),
        ("training.lora", {"training.lora": {"rank": 4}}),
        ("algorithm's trained roles", {"algorithm": {"name": "ppo"}}),
        ("training.tp", {"training.tp": 2}),
        ("training.optimizer", {"training.optimizer": "adamw_8bit"}),
    ],
)
def test_a_checkpoint_of_another_job_is_refused_by_the_key_that_differs(key: str, overrides: dict[str, object]) -> None:
    with pytest.raises(SpecError, match=f"another job: {key} is"):
        compare(describe_identity(make_job(**overrides)), describe_identity(make_job()), Path("x"))
    same = make_job(**{"algorithm.learning_rate": 1e-3, "workload.num_steps": 99, "hardware.num_devices": 1})
    compare(describe_identity(same), describe_identity(make_job()), Path("x"))


def test_what_may_be_otherwise_in_a_resumed_run_is_said() -> None:
    other = make_job(**{"workload.temperature": 0.5, "algorithm.name": "rloo", "algorithm.learning_rate": 1e-3})
    assert compare(describe_identity(other), describe_identity(make_job()), Path("x")) == [
        "algorithm is now rloo, was grpo",
        "workload.temperature is now 0.5, was 1.0",
    ]
    older = {key: value for key, value in describe_identity(make_job()).items() if key not in MAY_CHANGE}
    assert compare(describe_identity(other), older, Path("x")) == []


def test_a_resumed_run_says_that_its_engines_load_another_base(tmp_path: Path) -> None:
    plain = {"training.lora": {"rank": 4}, "placement.sync_content": "adapter", "rollout.dtype": "bfloat16"}
    base = packed_base(tmp_path / "base")
    packed = describe_identity(make_job(**plain, **{"rollout.base_path": str(base)}))
    (words,) = compare(packed, describe_identity(make_job(**plain)), Path("x"))
    assert words == f"rollout.base_path is now {model_fingerprint(base)}, was none"


def test_an_edit_of_the_same_size_makes_other_data(tmp_path: Path) -> None:
    rows = tmp_path / "prompts"
    rows.mkdir()
    source = (EXAMPLES / "data" / "sort_digits" / "train.jsonl").read_bytes()
    (rows / "train.jsonl").write_bytes(source)
    job = make_job(**{"data.prompts": str(rows)})
    before = describe_identity(job)
    (rows / "train.jsonl").write_bytes(source.replace(b"1", b"2", 1))
    with pytest.raises(SpecError, match=r"another job: data\.prompts"):
        compare(describe_identity(job), before, Path("x"))


def test_prompts_that_cannot_be_read_have_no_identity(tmp_path: Path) -> None:
    rows = tmp_path / "train.jsonl"
    rows.write_bytes((EXAMPLES / "data" / "sort_digits" / "train.jsonl").read_bytes())
    job = make_job(**{"data.prompts": str(rows)})
    rows.unlink()
    with pytest.raises(SpecError, match="the data is missing"):
        describe_identity(job)


def test_a_checkpoint_behind_the_jobs_last_step_is_refused(tmp_path: Path) -> None:
    job = make_job()
    check_resumable(job, resumption(3, describe_identity(job), tmp_path), is_async=False)
    with pytest.raises(SpecError, match="of step 4, the job has 3 steps"):
        check_resumable(job, resumption(4, describe_identity(job), tmp_path), is_async=False)


def test_a_role_that_is_not_in_the_checkpoint_is_said_before_the_start(tmp_path: Path) -> None:
    job = make_job(algorithm={"name": "ppo"})
    with pytest.raises(SpecError, match="it has no value"):
        check_resumable(job, resumption(1, describe_identity(job), tmp_path), is_async=True)


def test_what_was_passed_over_is_not_taken_after_a_lost_rank_either(tmp_path: Path) -> None:
    save(tmp_path, 1, identity={"seed": "0"})
    save(tmp_path, 2, identity={"seed": "5"})
    words: list[str] = []
    lost = LostGroupError("a rank is gone", where="x", rule="y", way_out="z")
    recorder = Recorder(tmp_path, {}, after_step=1)
    recorder.show_alarm = lambda step, text: words.append(text)
    checkpoint = return_to_checkpoint(lost, {"seed": "0"}, recorder)
    recorder.close()
    assert checkpoint.step == 1
    problem = "step-000002: the checkpoint belongs to another job: seed is 0, in the checkpoint 5"
    assert f"{problem}; it is skipped" in words


@pytest.mark.parametrize("is_file", [True, False])
def test_a_run_folder_that_is_none_is_said_to_be_none(tmp_path: Path, is_file: bool) -> None:
    folder, words = tmp_path / "run", "is no folder" if is_file else "does not exist"
    if is_file:
        folder.write_text("x")
    for ask in (find_own_bundle, find_checkpoint, lambda path: find_run_to_resume(str(path))):
        with pytest.raises(SpecError, match=f"the run folder .*run {words}"):
            ask(folder)
    with pytest.raises(SpecError, match="cannot be read: File name too long"):
        find_run_to_resume("x" * 5000)


def test_a_run_that_ends_says_how_to_go_on_where_there_is_a_checkpoint(tmp_path: Path) -> None:
    stopped = InterruptedRunError("stopped by SIGTERM", where="rlplan run", rule="on", way_out="again")
    stopped.exit_code = 143
    failed = RunError("a call failed", where="x", rule="y", way_out="read the log")
    for error in (stopped, failed):
        assert add_resume_command(error, tmp_path) is error
    save(tmp_path, 1)
    (tmp_path / "bundle").mkdir()
    way_back = f"resume with `rlplan run --resume {tmp_path}`"
    assert (add_resume_command(stopped, tmp_path).exit_code, add_resume_command(stopped, tmp_path).way_out) == (
        EXIT_RESUMABLE,
        way_back,
    )
    words = add_resume_command(failed, tmp_path)
    assert (words.exit_code, words.way_out) == (5, f"read the log; {way_back}")
    wrong: RlplanError = SpecError("the plan is wrong")
    assert add_resume_command(wrong, tmp_path) is wrong
