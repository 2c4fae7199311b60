"""Tests of the stages that a run still has to execute, and of their arguments."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from rlplan_cli.commands.running import stages
from rlplan_cli.commands.running.stages import STAGES, StagesRun, choose_folder, run_child
from rlplan_cli.sources import read_stages

from rlplan.errors import RunError, SpecError
from rlplan.planner.plan import write_plan
from rlplan.planner.search import find_best_plan
from rlplan.runtime.checkpoints.manifest import POINTER, checkpoints_folder
from rlplan.runtime.run_folder.run_lock import lock_run_folder
from rlplan.spec.files.job_file import load_job
from tests.cli.conftest import Call
from tests.factories import EXAMPLES
from tests.report.factory import RunShape, make_run

COMMIT = "0" * 40
FILE = EXAMPLES / "three-stage.yaml"


def run_in(folder: Path, *overrides: str) -> StagesRun:
    return StagesRun(FILE, overrides, folder, read_stages(FILE, ()))


def begun(folder: Path, *overrides: str) -> Path:
    """A stage's run folder that holds its plan alone."""
    (folder / "sft").mkdir(parents=True)
    write_plan(find_best_plan(load_job(FILE, ["stage=sft", *overrides])), folder / "sft" / "plan.json")
    return folder / "sft"


def words(run: StagesRun) -> list[str] | None:
    return run._build_words(run.stages[0])


def test_a_stage_that_was_never_begun_runs_in_its_own_folder(tmp_path: Path) -> None:
    assert words(run_in(tmp_path, "seed=1")) == [str(FILE), "stage=sft", "seed=1", "--out", str(tmp_path / "sft")]


def test_a_later_stage_takes_what_earlier_ones_have_left(tmp_path: Path) -> None:
    ppo = run_in(tmp_path).build_overrides(read_stages(FILE, ())[2])
    sft, reward = (json.dumps(str(tmp_path / name / "policy")) for name in ("sft", "reward"))
    expected = [f"policy.path={sft}", f"roles.reward.path={reward}", f"roles.value.path={reward}"]
    assert ppo == ["stage=ppo", *expected]


def test_a_model_that_is_named_is_not_taken_from_an_earlier_stage(tmp_path: Path) -> None:
    named = f"stages.reward.policy={EXAMPLES / 'models' / 'sorter'}"
    run = run_in(tmp_path, named)
    assert run.build_overrides(run.stages[1]) == ["stage=reward", named]


def test_a_stage_that_has_finished_is_not_run_again(tmp_path: Path) -> None:
    (begun(tmp_path) / "status.json").write_text('{"state": "finished"}')
    assert words(run_in(tmp_path)) is None


def test_an_interrupted_stage_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    checkpoints = checkpoints_folder(begun(tmp_path))
    checkpoints.mkdir()
    (checkpoints / POINTER).touch()
    assert words(run_in(tmp_path)) == ["--resume", str(tmp_path / "sft")]


def test_what_ended_without_a_checkpoint_is_put_aside(tmp_path: Path) -> None:
    begun(tmp_path)
    assert words(run_in(tmp_path)) == [str(FILE), "stage=sft", "--out", str(tmp_path / "sft")]
    (aside,) = tmp_path.iterdir()
    assert aside.name.startswith("sft-")


def test_a_stage_that_is_going_on_is_not_put_aside(tmp_path: Path) -> None:
    with (
        lock_run_folder(begun(tmp_path), is_resumed=True),
        pytest.raises(SpecError, match="is in use by another run"),
    ):
        words(run_in(tmp_path))
    assert (tmp_path / "sft" / "plan.json").is_file()


def test_a_stage_that_was_begun_as_another_job_is_refused(tmp_path: Path) -> None:
    begun(tmp_path)
    with pytest.raises(SpecError, match="was started with another job: seed"):
        words(run_in(tmp_path, "seed=1"))


def test_a_model_by_hub_id_is_the_same_job_when_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "hub" / "models--someone--sorter"
    snapshot = cache / "snapshots" / COMMIT
    shutil.copytree(EXAMPLES / "models" / "sorter", snapshot)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache.parent))
    (begun(tmp_path, f"policy.path={snapshot}") / "status.json").write_text('{"state": "finished"}')
    assert words(run_in(tmp_path, "policy.path=someone/sorter")) is None


@pytest.mark.parametrize("wrong", ["name=../../outside", "stages.ppo.workload.num_step=1"])
def test_every_stage_is_read_before_the_first_one_begins(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(SpecError, match=r"name|num_step"):
        run_in(tmp_path / "run", wrong).run()
    assert not (tmp_path / "run").exists()


def test_what_is_printed_to_go_on_is_the_whole_command(tmp_path: Path) -> None:
    more = ("--sandbox", "none", "--address", "host:1")
    run = replace(run_in(tmp_path / "a run", "data.system_prompt=be brief"), more=more)
    _, command, _ = run._suggest_resume(5).split("`")
    options = [*more, "--resume", str(tmp_path / "a run")]
    assert shlex.split(command) == ["rlplan", "run", str(FILE), "data.system_prompt=be brief", *options]
    assert run._suggest_resume(75) == run._suggest_resume(5)
    assert run._suggest_resume(2) == ""


def test_a_stage_that_a_signal_has_ended_is_a_run_that_failed() -> None:
    assert run_child([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]) == RunError.exit_code
    assert run_child([sys.executable, "-c", "raise SystemExit(75)"]) == 75


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_end_reaches_a_stage_that_is_only_being_made(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = subprocess.Popen

    def slowly(command: list[str], **more: Any) -> subprocess.Popen[bytes]:
        os.kill(os.getpid(), number)
        return make(command, **more)

    hang_up = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # this test may itself run under nohup
    before = signal.getsignal(number)
    monkeypatch.setattr(subprocess, "Popen", slowly)
    assert run_child(["sleep", "60"]) == RunError.exit_code
    assert signal.getsignal(number) is before
    signal.signal(signal.SIGHUP, hang_up)


def answers_its_words(monkeypatch: pytest.MonkeyPatch, exit_code: int = 0) -> None:
    """Replace `rlplan run` by a program that prints its arguments as JSON."""
    program = f"import json, sys; print(json.dumps(sys.argv[1:])); sys.exit({exit_code})"
    monkeypatch.setattr(stages, "RUN", (sys.executable, "-c", program))


def test_a_rehearsal_passes_options_on_and_answers_for_all_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers_its_words(monkeypatch)
    run = replace(run_in(tmp_path), more=("--sandbox", "none", "--json"))
    assert run.rehearse() == 0
    where = ["--out", str(tmp_path / "sft")]  # as the run itself
    assert run.outputs["sft"] == [str(FILE), "stage=sft", "--dry-run", *where, "--sandbox", "none", "--json"]
    read = run.outputs["ppo"].pop("read")
    assert [line.partition(":")[0] for line in read] == ["train.jsonl", "heldout.jsonl"]
    assert run.outputs["ppo"] == {"schema_version": 1, "state": "fits", "needs": ["sft", "reward"]}
    answers_its_words(monkeypatch, exit_code=4)
    assert run.rehearse() == 4


def test_all_stages_print_one_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers_its_words(monkeypatch)
    (begun(tmp_path) / "status.json").write_text('{"state": "finished"}')
    run = replace(run_in(tmp_path), more=("--json",))
    assert run.run() == 0
    assert run.outputs["sft"] == {"schema_version": 1, "run_folder": str(tmp_path / "sft"), "state": "finished"}
    assert run.outputs["ppo"][:2] == [str(FILE), "stage=ppo"]


def test_reports_of_several_stages_are_one_answer(tmp_path: Path, rlplan: Call) -> None:
    (tmp_path / STAGES).write_text('{"schema_version": 1, "stages": ["sft", "reward", "ppo"]}')
    for name in ("sft", "reward"):
        make_run(tmp_path / name, RunShape())
    answer = rlplan("report", tmp_path, "--json")
    assert list(json.loads(answer.out)["stages"]) == ["sft", "reward"], answer.err


def test_several_plans_go_into_no_file_and_none_is_searched_for(tmp_path: Path, rlplan: Call) -> None:
    answer = rlplan("plan", FILE, "workload.num_step=1", "-o", tmp_path / "plan.json")
    assert answer.exit_code == 2
    assert "would hold one plan, but the file has several stages" in answer.err


def test_stages_run_in_an_empty_folder_or_go_on_in_theirs(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="has no stages"):
        choose_folder("job", None, str(tmp_path))
    (tmp_path / STAGES).write_text("{}")
    assert choose_folder("job", None, str(tmp_path)) == tmp_path
    with pytest.raises(SpecError, match="is not empty"):
        choose_folder("job", tmp_path, None)


def test_a_place_that_cannot_hold_the_stages_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers_its_words(monkeypatch)
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match="cannot be written: Not a directory"):
        run_in(tmp_path / "file" / "runs").run()


def test_the_data_of_the_last_stage_is_checked_before_the_first_one_trains(rlplan: Call, tmp_path: Path) -> None:
    rows = (EXAMPLES / "data" / "sort_digits" / "train.jsonl").read_text().splitlines()[:200]
    (tmp_path / "rows.jsonl").write_text("\n".join([*rows, '{"id": "y", "prompt": 5']))
    folder = tmp_path / "run"
    answer = rlplan("run", FILE, f"stages.ppo.data.prompts={tmp_path / 'rows.jsonl'}", "--out", folder)
    assert answer.exit_code == 2
    assert "stage ppo, after sft, reward:" in answer.err
    assert "row 201: the line is not JSON" in answer.err
    assert str(tmp_path / "rows.jsonl") in answer.err
    assert "fix or remove those rows" in answer.err
    assert not folder.exists()
