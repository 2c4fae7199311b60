"""Other people's packages read what the sinks have written, where they are installed; none is a dependency."""

import sqlite3
from pathlib import Path

import pytest

from rlplan.runtime.sinks.followers import Followers
from tests.runtime.sinks.test_sinks import run_folder


def follow(kind: str, folder: Path) -> None:
    followers = Followers((kind,), folder, "quickstart")
    followers.close()
    log = (folder / "logs" / f"sink-{kind}.log").read_text()
    assert "Traceback" not in log, log


def test_tensorboard_s_own_reader_gets_the_numbers(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    follow("tensorboard", run_folder(tmp_path))
    (file,) = (tmp_path / "tensorboard").iterdir()
    events = list(reader.EventFileLoader(str(file)).Load())
    found = {
        (event.step, value.tag): value.tensor.float_val[0] if value.HasField("tensor") else value.simple_value
        for event in events
        for value in event.summary.value
    }
    assert events[0].file_version == "brain.Event:2"
    assert found[(0, "evaluate/greedy_accuracy")] == 0.25
    assert found[(1, "reward/mean")] == 0.5
    assert found[(1, "step_s")] == 2.5


def test_wandb_keeps_an_offline_run_in_the_run_folder(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    follow("wandb", run_folder(tmp_path))
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    data = file.read_bytes()
    assert all(name in data for name in (b"evaluate/greedy_accuracy", b"reward/mean", b"step_s"))


def test_trackio_keeps_a_local_project_in_the_run_folder(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    follow("trackio", run_folder(tmp_path))
    files = list((tmp_path / "trackio").rglob("*.db"))
    assert files, list((tmp_path / "trackio").rglob("*"))
    rows = [row for file in files for row in sqlite3.connect(file).execute("SELECT step, metrics FROM metrics")]
    assert any(step == 1 and "reward/mean" in str(metrics) for step, metrics in rows), rows
