"""`import rlplan`: the verbs as functions say what the command line says, and the import stays light."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import rlplan
from rlplan.errors import HostError, NoFeasiblePlanError, SpecError
from rlplan.results import EmitResult
from tests.factories import QUICKSTART
from tests.report.factory import make_killed_run, make_run

WORDS = {"model": "Qwen/Qwen2.5-0.5B", "algorithm": "grpo", "gpus": "1xH100"}


def list_modules(program: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{program}; import sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def test_importing_the_package_imports_nothing_else_of_ours() -> None:
    assert {name for name in list_modules("import rlplan") if name.startswith("rlplan")} == {"rlplan", "rlplan.version"}


def test_functions_and_results_come_without_what_only_frames_need() -> None:
    assert list_modules("import rlplan; rlplan.plan, rlplan.load_run").isdisjoint(
        {"pandas", "numpy", "matplotlib", "torch"}
    )


def test_a_folder_of_the_same_name_does_not_hide_a_function() -> None:
    list_modules(
        "import rlplan.simulate.run, rlplan.emit.bundle; assert callable(rlplan.simulate) and callable(rlplan.emit)"
    )


def test_a_name_that_is_none_is_an_attribute_error_that_lists_them() -> None:
    name = "estimat"
    with pytest.raises(AttributeError, match="estimate"):
        getattr(rlplan, name)


def test_an_estimate_says_what_the_command_line_says() -> None:
    asked = ("--model", WORDS["model"], "--algorithm", "grpo", "--gpus", "1xH100", "--json", "rollout.tp=1")
    printed = subprocess.run([sys.executable, "-m", "rlplan_cli", "estimate", *asked], capture_output=True, check=True)
    assert rlplan.estimate(**WORDS, overrides={"rollout.tp": 1}).as_json() == json.loads(printed.stdout)


def test_a_file_a_mapping_and_names_lead_to_one_plan(tmp_path: Path) -> None:
    job = {"policy": WORDS["model"], "algorithm": "grpo", "hardware": "1xH100"}
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(job))
    by_mapping = rlplan.plan(job)
    assert job == {"policy": WORDS["model"], "algorithm": "grpo", "hardware": "1xH100"}  # and stays as it was
    assert by_mapping.rows() == rlplan.plan(path).rows() == rlplan.plan(**WORDS).rows()


def test_a_written_plan_and_a_result_are_asked_like_a_job(tmp_path: Path) -> None:
    plan = rlplan.plan(QUICKSTART)
    again = rlplan.plan(plan.write(tmp_path / "plan.json"))
    assert again.rows() == plan.rows() == rlplan.plan(plan).rows()
    assert rlplan.simulate(again, steps=2).rows() == rlplan.simulate(plan, steps=2).rows()
    with pytest.raises(SpecError, match="cannot change a plan"):
        rlplan.plan(plan, ["seed=1"])


def test_what_does_not_fit_is_an_answer_until_the_plan_is_needed() -> None:
    small = rlplan.estimate(QUICKSTART, {"hardware.memory": "2GiB"})
    assert (small.fits, small.verdict) == (False, "does not fit")
    assert small.remedies
    assert small.peak_bytes > small.capacity_bytes
    with pytest.raises(NoFeasiblePlanError):
        rlplan.simulate(small)


def test_a_change_is_explained_alone_and_with_the_others() -> None:
    asked = rlplan.explain(**WORDS, changes=["workload.max_response_len=512", "workload.num_samples_per_prompt=4"])
    assert [row["words"] for row in asked.rows()[:3]] == ["", "", "together"]


def test_plans_simulations_and_runs_stand_side_by_side(tmp_path: Path) -> None:
    plan = rlplan.plan(QUICKSTART)
    table = rlplan.compare(plan, rlplan.simulate(plan, steps=2), make_run(tmp_path / "run")).to_frame()
    assert list(table["kind"]) == ["planned", "simulated", "measured"]
    assert (table["peak_bytes"] > 0).all()
    assert (table["step_s"] > 0).all()


def test_one_job_on_several_clusters_has_dollars_and_a_front() -> None:
    small = {"policy": "Qwen/Qwen2.5-0.5B", "algorithm": "grpo"}
    comparison = rlplan.compare(small, hardware="1xH100,2xL40S", prices=[{"h100": 2, "l40s": 1}])
    rows = comparison.rows()
    assert [row["dollars_per_hour"] for row in rows] == [2.0, 2.0]
    assert [row["is_on_front"] for row in rows].count(True) == 1  # as dear an hour: the faster one
    assert "most tokens for a dollar" in comparison.facts()
    planned = rlplan.plan(small, {"hardware": "1xH100"})
    again = rlplan.compare(planned, hardware=["1xH100"], overrides={"workload.num_prompts_per_step": 64})
    assert again.rows()[0]["step_s"] < planned.step_s


def test_the_largest_value_that_fits_is_a_number_with_its_plan() -> None:
    solution = rlplan.solve("max_response_len", QUICKSTART)
    assert solution.fits
    assert solution.plan.job.workload.max_response_len == solution.value
    assert solution.value in [int(row["change"].rpartition("=")[2]) for row in solution.rows()]


def test_a_measured_step_is_laid_beside_the_plan(tmp_path: Path) -> None:
    plan = rlplan.plan(**WORDS)
    assert plan.step_s is not None
    log = tmp_path / "metrics.jsonl"
    log.write_text(f'{{"step_time": {9 * plan.step_s}}}')
    report = rlplan.explain_step(log, plan)
    assert not report.is_normal
    assert report.rows()[0]["ratio"] == pytest.approx(9)


def test_a_run_is_read_whether_it_ended_or_not(tmp_path: Path) -> None:
    run = rlplan.load_run(make_run(tmp_path / "run"))
    assert (run.state, list(run.to_frame()["step"])) == ("finished", [0, 1, 2, 3, 4, 5, 6])
    assert {"predicted_bytes", "measured_bytes"} <= set(run.memory_frame())
    assert rlplan.load_run(make_killed_run(tmp_path / "killed")).state == "unknown"
    with pytest.raises(SpecError, match="no folder"):
        rlplan.load_run(tmp_path / "none")


def test_what_was_emitted_is_listed(tmp_path: Path) -> None:
    written = rlplan.emit(QUICKSTART, tmp_path / "bundle")
    assert "plan.json" in written.files
    assert all(row["bytes"] > 0 for row in written.rows())


def test_without_pandas_everything_but_a_frame_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = rlplan.plan(**WORDS)
    for name in [name for name in sys.modules if name.startswith("rlplan.report")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert plan.rows()
    assert "1x h100-sxm" in plan._repr_html_()
    with pytest.raises(HostError, match="pandas"):
        plan.to_frame()


def test_a_view_for_notebooks_is_escaped() -> None:
    assert "&lt;b&gt;" in EmitResult(Path("<b>"), ())._repr_html_()


def test_nothing_asked_and_a_wrong_key_are_errors_of_the_library() -> None:
    with pytest.raises(SpecError, match=r"rlplan\.plan\(model="):
        rlplan.plan()
    with pytest.raises(SpecError, match="the job: polcy"):
        rlplan.plan({"policy": WORDS["model"], "hardware": "1xH100", "polcy": "x"})


def test_a_result_prints_what_it_says_first() -> None:
    text = repr(rlplan.estimate(**WORDS))
    assert text.startswith("EstimateResult(job: Qwen/Qwen2.5-0.5B, grpo, 1x h100-sxm; verdict: fits; ")
    assert len(text) < 1_000


def test_a_model_and_gpus_in_words_are_a_question() -> None:
    plan = rlplan.plan("Qwen/Qwen2.5-0.5B", "1xH100")
    assert plan.rows() == rlplan.plan(**WORDS).rows()
    assert "default batch and lengths" in plan.assumed
    assert [row["devices"] for row in rlplan.compare("Qwen/Qwen2.5-0.5B", "1xH100,2xL40S").rows()] == [
        "1x h100-sxm", "2x l40s"
    ]  # fmt: skip


def test_a_notebook_shows_the_timeline_and_numbers_for_people_and_a_frame_is_plain() -> None:
    plan = rlplan.estimate(**WORDS)
    shown = plan._repr_html_()
    assert "<svg" in shown
    assert "GiB" in shown
    assert len(shown) < 20_000
    assert str(plan.to_frame()["peak_bytes"].dtype) == "int64"
