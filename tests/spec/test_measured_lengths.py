"""Lengths of a run reach the next plan: what the run folder says is what the plan counts with."""

import json
from pathlib import Path

import pytest

from rlplan.errors import SpecError
from rlplan.spec.files.job_file import load_job, override_job
from rlplan.spec.measured_lengths import fit_lengths, read_run_lengths
from tests.factories import EXAMPLES


def run_folder(path: Path) -> Path:
    (path / "data.json").write_text(json.dumps({"prompt_len": {"mean": 6.2, "max": 8}, "num_prompts": 9}))
    histogram = {"kind": "histogram", "edges": [2, 4, 6], "counts": [1, 3]}
    (path / "lengths.json").write_text(json.dumps({"mean_response_len": 4, "response_lengths": histogram}))
    return path


def test_a_run_s_lengths_become_the_workload_s(tmp_path: Path) -> None:
    job = load_job(EXAMPLES / "quickstart.yaml", read_run_lengths(run_folder(tmp_path)))
    assert (job.workload.usual_prompt_len, job.workload.usual_response_len) == (7, 4)
    assert job.workload.response_lengths.quantile(1.0) == 6


def test_prompts_alone_are_enough(tmp_path: Path) -> None:
    (run_folder(tmp_path) / "lengths.json").unlink()
    assert read_run_lengths(tmp_path) == ("workload.mean_prompt_len=7",)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"mean_response_len": 0}', '{"response_lengths": NaN}'])
def test_a_file_of_another_shape_is_one_message(tmp_path: Path, content: str) -> None:
    (run_folder(tmp_path) / "lengths.json").write_text(content)
    with pytest.raises(SpecError) as caught:
        read_run_lengths(tmp_path)
    assert "lengths.json" in caught.value.where


def test_a_folder_without_lengths_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="holds no lengths"):
        read_run_lengths(tmp_path)


@pytest.mark.parametrize(
    "shape",
    [
        "{kind: lognormal, median: 600, sigma: 0.9}",
        "{kind: uniform, low: 10, high: 2000}",
        "{kind: histogram, edges: [0, 500, 2000, 4000], counts: [6, 3, 1]}",
    ],
)
def test_a_mean_alone_keeps_the_shape_of_the_job_s_lengths(shape: str) -> None:
    job = load_job(EXAMPLES / "grpo-7b-8xh100.yaml", [f"workload.response_lengths={shape}"])
    before, cap = job.workload.lengths, job.workload.max_response_len
    override = fit_lengths(
        300.0, cap, cut_share=None, longest=None, num_rollouts=64, shape=job.workload.response_lengths
    )
    after = override_job(job, [override]).workload.lengths
    assert after.mean == pytest.approx(300, rel=0.01)
    assert after.quantile(0.99) / after.quantile(0.5) == pytest.approx(
        before.quantile(0.99) / before.quantile(0.5), rel=0.25
    )
