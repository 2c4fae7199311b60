"""Run folders are read as they are: whole, killed, empty, or no run folder at all."""

import json
from pathlib import Path

import pytest

from rlplan.errors import SpecError
from rlplan.report.run_folder import read_run_folder, shorten_paths, unique_labels
from tests.report.factory import RunShape, make_empty_run, make_killed_run, make_run


def test_a_whole_run_gives_its_plan_trace_metrics_and_status(tmp_path: Path) -> None:
    run = read_run_folder(make_run(tmp_path / "run", RunShape(num_steps=3)))
    assert run.name == "run"
    assert run.plan.job.workload.num_steps == 3
    assert {span.step for span in run.trace.spans} == {0, 1, 2, 3, -1}
    assert [row["step"] for row in run.metrics] == [0, 1, 2, 3]
    assert (run.status.state, run.status.exit_code, run.status.seconds) == ("finished", 0, 93.5)


def test_a_killed_run_loses_only_its_torn_last_lines_and_has_an_unknown_end(tmp_path: Path) -> None:
    run = read_run_folder(make_killed_run(tmp_path))
    assert run.status.state == "unknown"
    assert [row["step"] for row in run.metrics] == [1]
    assert {span.step for span in run.trace.spans} == {0, 1, 2}


def test_a_run_that_wrote_nothing_but_its_plan_is_still_a_run(tmp_path: Path) -> None:
    run = read_run_folder(make_empty_run(tmp_path))
    assert run.trace.samples == []
    assert run.metrics == run.timings == ()
    assert run.status.state == "failed"


def test_a_bundle_is_no_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "bundle", RunShape(num_steps=1))
    (run / "execution.json").write_text("{}")
    with pytest.raises(SpecError, match="is not a run folder"):
        read_run_folder(run)


def test_half_a_status_counts_as_unknown(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    (folder / "status.json").write_text('{"state": "fin')
    assert read_run_folder(folder).status.state == "unknown"


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_folder_without_a_plan_is_refused_in_four_parts(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SpecError) as caught:
        read_run_folder(tmp_path / name)
    error = caught.value
    assert str(tmp_path / name) in error.what
    assert error.where == str(tmp_path / name / "plan.json")
    assert "rlplan run" in error.rule
    assert error.way_out


@pytest.mark.parametrize("name", ["trace.jsonl", "metrics.jsonl", "timings.jsonl"])
def test_damage_in_the_middle_of_a_file_names_file_and_line(tmp_path: Path, name: str) -> None:
    folder = make_run(tmp_path)
    lines = (folder / name).read_text().splitlines()
    lines[2] = '{"step": 1, "half'
    (folder / name).write_text("\n".join(lines) + "\n")
    with pytest.raises(SpecError) as caught:
        read_run_folder(folder)
    assert f"{name}, line 3" in caught.value.where


def test_a_row_without_a_step_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    (folder / "metrics.jsonl").write_text('{"reward/mean": 1}\n{"step": 1}\n')
    with pytest.raises(SpecError, match="step"):
        read_run_folder(folder)


def test_a_plan_of_another_schema_version_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    plan = json.loads((folder / "plan.json").read_text()) | {"schema_version": 99}
    (folder / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(SpecError, match="99"):
        read_run_folder(folder)


def test_labels_tell_seeds_and_controls_apart(tmp_path: Path) -> None:
    shapes = [
        RunShape(seed=0),
        RunShape(seed=1),
        RunShape(learning_rate=0),
        RunShape(shuffle_rewards=True),
        RunShape(seed=1),
    ]
    runs = tuple(read_run_folder(make_run(tmp_path / f"run{i}", shape)) for i, shape in enumerate(shapes))
    assert unique_labels(runs) == ("seed 0", "seed 1 (run1)", "learning rate 0", "shuffled rewards", "seed 1 (run4)")
    assert [run.is_control for run in runs] == [False, False, True, True, False]


def test_labels_name_the_job_where_jobs_differ(tmp_path: Path) -> None:
    runs = tuple(read_run_folder(make_run(tmp_path / name, RunShape(name=name))) for name in ("one", "two"))
    assert unique_labels(runs) == ("one, seed 0", "two, seed 0")


def test_absolute_paths_in_messages_are_cut_to_their_last_part() -> None:
    text = "where: /srv/main/runs/7/logs/a.log, line 3; kept: ratio 1/2, 9 tokens/s, runs/7/plan.json"
    assert shorten_paths(text) == (
        "where: …/a.log, line 3; kept: ratio 1/2, 9 tokens/s, runs/7/plan.json"
    )  # fmt: skip
