"""Sinks: a run's numbers in other people's loggers, which can neither stop the run nor lose the last row."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from rlplan.runtime.sinks.followers import Followers
from rlplan.runtime.sinks.tensorboard import crc32c, encode_event, record
from rlplan.spec.parts.conduct import MetricsSpec
from tests.waiting import wait_until

ROWS: list[dict[str, float]] = [
    {"step": 0, "evaluate/greedy_accuracy": 0.25},
    {"step": 1, "reward/mean": 0.5, "kl/mean": 0.001},
]


def run_folder(path: Path) -> Path:
    (path / "logs").mkdir()
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    timings = [
        {"step": 0, "step_s": 1.0},
        {"step": 1, "step_s": 2.5},
        {"step": -1, "step_s": 9.0, "seconds/evaluate": 4.0},
    ]
    (path / "timings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in timings) + '{"step": 2, "step')
    return path


def read_events(path: Path) -> Iterator[bytes]:
    """The records of an event file, as tensorflow's record_reader.cc reads them."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        body = data[at + 12 : at + 12 + size]
        assert record(body) == data[at : at + size + 16], "length and both checksums"
        yield body
        at += size + 16


def test_an_event_has_the_bytes_of_protobuf() -> None:
    body = encode_event(1.5, 3, {"a": 0.5})
    assert body.hex() == "09000000000000f83f" + "1003" + "2a0a" + "0a08" + "0a0161" + "150000003f"
    assert crc32c(bytes(32)) == 0x8A9136AA, "RFC 3720, appendix B.4"


def test_tensorboard_gets_every_row_also_the_last(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    followers = Followers(MetricsSpec(sinks=("tensorboard",)), folder, "quickstart", "id")
    followers.close()
    (file,) = (folder / "tensorboard").iterdir()
    head, *events = read_events(file)
    assert head.endswith(b"brain.Event:2")
    first, second, ending = events
    assert all(name in first for name in (b"evaluate/greedy_accuracy", b"step_s"))
    assert all(name in second for name in (b"reward/mean", b"kl/mean", b"step_s", struct.pack("<f", 2.5)))
    assert b"seconds/evaluate" in ending
    assert b"step_s" not in ending, "the last step has one of its own"


def test_a_sink_that_has_ended_is_reported_once_and_stops_nothing(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    (folder / "tensorboard").write_text("a file where a folder should be")
    followers = Followers(MetricsSpec(sinks=("tensorboard",)), folder, "quickstart", "id")
    lines: list[str] = []
    wait_until(lambda: lines.extend(followers.take_problems()) or lines, 30, pause_s=0.05)
    assert lines[0].startswith("the sink tensorboard has ended with exit code 1; the run continues")
    assert followers.take_problems() == []
    followers.close()
    assert "FileExistsError" in (folder / "logs" / "sink-tensorboard.log").read_text()
