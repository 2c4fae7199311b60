"""Other people's packages read what the sinks have written; none is a dependency, the lock has them for these tests."""

import json
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlplan.runtime.run_folder.recorder import Recorder
from rlplan.runtime.sinks.followers import Followers
from rlplan.spec.parts.conduct import MetricsSpec

Stored = list[tuple[int, dict[str, float]]]

FIRST: Stored = [
    (0, {"evaluate/greedy_accuracy": 0.25, "step_s": 0.5}),
    *((step, {"reward/mean": step / 8, "step_s": step + 0.5}) for step in (1, 2, 3)),
]
RESUMED: Stored = [(step, {"reward/mean": 1 - step / 8, "step_s": step + 0.25}) for step in (3, 4)]
"""Rows of a run that resumes after step 2; all of them are written before its sinks read for the first time."""


def write(folder: Path, steps: Stored, after: int | None = None) -> None:
    recorder = Recorder(folder, {}, after)
    for step, numbers in steps:
        recorder.write_row(
            "metrics.jsonl", {"step": step, **{name: v for name, v in numbers.items() if name != "step_s"}}
        )
        recorder.write_row("timings.jsonl", {"step": step, "step_s": numbers["step_s"]})
    recorder.close()


def follow(kind: str, folder: Path) -> None:
    """A run of four steps, and one that goes on after step 2."""
    (folder / "logs").mkdir()
    for steps, after in ((FIRST, None), (RESUMED, 2)):
        write(folder, steps, after)
        Followers(MetricsSpec(sinks=(kind,)), folder, "quickstart", "id", -1 if after is None else after).close()  # type: ignore[arg-type]
        log = (folder / "logs" / f"sink-{kind}.log").read_text()
        assert "Traceback" not in log, log


def test_tensorboard_s_own_reader_gets_the_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    follow("tensorboard", tmp_path)
    stored: list[Stored] = []
    for file in sorted((tmp_path / "tensorboard").iterdir()):
        head, *events = EventFileLoader(str(file)).Load()
        assert head.file_version == "brain.Event:2"
        steps: dict[int, dict[str, float]] = {}
        for event in events:
            for value in event.summary.value:
                number = value.tensor.float_val[0] if value.HasField("tensor") else value.simple_value
                assert value.tag not in steps.setdefault(event.step, {})
                steps[event.step][value.tag] = number
        stored.append(list(steps.items()))
    assert [stored_row for each in stored for stored_row in each] == [*FIRST, *RESUMED]


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Records of a .wandb file: a head of 7 bytes, then LevelDB's log format in blocks of 32 KiB."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # full, or the last part
            yield whole
            whole = b""


def stored_by_wandb(file: Path) -> Stored:
    """The history of an offline run."""
    from wandb.proto import wandb_internal_pb2 as messages

    stored = []
    for data in wandb_records(file.read_bytes()):
        record = messages.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            numbers = {name: json.loads(value) for name, value in items.items() if not name.startswith("_")}
            stored.append((record.history.step.num, numbers))
    return stored


@pytest.mark.nightly
def test_wandb_keeps_an_offline_run_in_the_run_folder(tmp_path: Path) -> None:
    follow("wandb", tmp_path)
    first, second = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    assert stored_by_wandb(first) == FIRST
    assert stored_by_wandb(second) == RESUMED


def test_trackio_keeps_a_local_project_in_the_run_folder(tmp_path: Path) -> None:
    follow("trackio", tmp_path)
    files = list((tmp_path / "trackio").rglob("*.db"))
    assert files, list((tmp_path / "trackio").rglob("*"))
    query = "SELECT step, metrics FROM metrics ORDER BY id"
    rows = [row for file in files for row in sqlite3.connect(file).execute(query)]
    assert [(step, json.loads(metrics)) for step, metrics in rows] == [*FIRST, *RESUMED]
