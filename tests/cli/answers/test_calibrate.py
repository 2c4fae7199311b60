"""`rlplan calibrate`: a profile from files and logs, which no plan takes by itself."""

import json
from pathlib import Path

import pytest

from rlplan import calibration
from rlplan.accuracy.files.reading import bundled_points
from rlplan.spec.hardware.catalogue import read_profile
from tests.cli.conftest import Call
from tests.factories import ROOT

JOB = str(ROOT / "examples" / "grpo-7b-8xh100.yaml")


SLOWER = 0.7
"""Made-up ratio of this machine's training speed to that of the same GPUs elsewhere, which the fit must find."""


def points(folder: Path, number: int) -> str:
    """Published throughputs of H100s as a slower machine would have them."""
    chosen = [point for point in bundled_points() if point.id.startswith("mb-") and "H100" in (point.gpu or "")]
    chosen = [point for point in chosen if point.kind == "throughput_train"][:number]
    path = folder / "points.json"
    rows = [json.loads(point.model_dump_json()) for point in chosen]
    for row in rows:
        row["measured"]["value"] *= SLOWER
    path.write_text(json.dumps(rows))
    return str(path)


def test_a_file_of_points_gives_a_profile_that_waits_to_be_named(rlplan: Call, tmp_path: Path) -> None:
    answer = rlplan("calibrate", points(tmp_path, 20), "--out", str(tmp_path / "out"))
    assert answer.exit_code == 0, answer.err
    assert "RLPLAN_PROFILES" in answer.out
    profile = read_profile(tmp_path / "out" / "h100-sxm.yaml")
    assert profile.name == "h100-sxm"
    again = rlplan("calibrate", points(tmp_path, 20), "--out", str(tmp_path / "out"))
    assert again.exit_code == 2
    assert "exists already" in again.err


def test_a_profile_that_is_there_is_refused_before_anything_is_predicted(
    rlplan: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "h100-sxm.yaml").touch()
    log = tmp_path / "verl.log"
    log.write_text("step:1 - timing_s/gen:40.0 - timing_s/update_actor:50.0")
    monkeypatch.delattr(calibration, "make_samples")
    monkeypatch.delattr(calibration, "explain_step")
    for words in ([points(tmp_path, 2)], [str(log), JOB]):
        answer = rlplan("calibrate", *words, "--out", str(tmp_path))
        assert answer.exit_code == 2
        assert "exists already" in answer.err


def test_two_points_are_refused(rlplan: Call, tmp_path: Path) -> None:
    answer = rlplan("calibrate", points(tmp_path, 2), "--out", str(tmp_path / "out"))
    assert answer.exit_code == 2
    assert "measure 3 more settings" in answer.err
    assert not (tmp_path / "out").exists()


def test_a_log_with_its_job_is_a_sample_of_training_and_one_of_serving(rlplan: Call, tmp_path: Path) -> None:
    log = tmp_path / "verl.log"
    log.write_text("\n".join(f"step:{step} - timing_s/gen:40.0 - timing_s/update_actor:50.0" for step in range(1, 4)))
    answer = rlplan("calibrate", str(log), JOB)
    assert answer.exit_code == 2
    assert "1 of training, 1 of serving" in answer.err
    assert ", 0 of" not in answer.err
    twice = rlplan("calibrate", str(log), JOB, str(log), JOB)
    assert twice.exit_code == 2
    assert "occurs twice" in twice.err
