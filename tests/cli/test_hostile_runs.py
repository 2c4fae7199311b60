"""Run folders that somebody else wrote: numbers out of range, text for numbers, lists for rows. A message, exit 2."""

import json
from pathlib import Path

import pytest

from rlplan.runtime.run_folder.following import MAX_ALARM
from tests.cli.conftest import Call
from tests.report.factory import make_run

ROWS = {
    "a step beyond every number": '{"step": 1e400}',
    "no step": '{"loss": 1.0}',
    "a step of text": '{"step": "one"}',
    "a step between two": '{"step": 1.5}',
    "a step that is a list": '{"step": [1]}',
    "a step of a thousand digits": '{"step": 1' + "0" * 1000 + "}",
    "a step of ten thousand digits": '{"step": 1' + "0" * 10_000 + "}",
    "a metric of text": '{"step": 1, "evaluate/pass@1": "good", "step_s": "long", "response_len/mean": "x"}',
    "a metric that is nested": '{"step": 1, "evaluate/pass@1": {"value": [1]}, "step_s": [], "response_len/mean": {}}',
    "a metric of a thousand digits": '{"step": 1, "step_s": 1' + "0" * 1000 + "}",
    "a list": "[1, 2]",
    "a number": "1e400",
    "brackets without an end": "[" * 100_000,
}
FILES = ("metrics.jsonl", "timings.jsonl", "trace.jsonl")


@pytest.fixture(scope="module")
def good_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "run")


def hostile(good_run: Path, folder: Path, name: str, text: str) -> Path:
    """A copy of a run in which one file begins with another row."""
    folder.mkdir()
    for path in good_run.iterdir():
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    kept = (folder / name).read_text() if (folder / name).exists() else ""
    (folder / name).write_text(f"{text}\n{kept}")
    return folder


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("row", list(ROWS))
def test_a_hostile_row_is_a_message(rlplan: Call, good_run: Path, tmp_path: Path, name: str, row: str) -> None:
    folder = hostile(good_run, tmp_path / "run", name, ROWS[row])
    for verb in (["report"], ["explain"], ["watch", "--json"]):
        answer = rlplan(*verb, folder)
        assert answer.exit_code in ((0, 2) if verb[0] == "watch" else (2,)), (verb, answer.exit_code, answer.err)
        assert "a bug in rlplan" not in answer.err
        if answer.exit_code == 2:
            assert all(part in answer.err for part in ("error: ", "where: ", "rule: ", "way out: ")), answer.err


@pytest.mark.parametrize(
    "status",
    [
        '{"state": "finished", "seconds": "long", "exit_code": "none"}',
        '{"state": ["finished"], "seconds": 1e400, "exit_code": 1e400}',
        '{"state": "failed", "exit_code": ' + "9" * 5000 + "}",
        '{"state": "failed", "exit_code": [1], "message": {"a": 1}, "seconds": {}}',
        "[" * 100_000,
    ],
)
def test_a_hostile_status_is_no_bug_of_ours(rlplan: Call, good_run: Path, tmp_path: Path, status: str) -> None:
    folder = hostile(good_run, tmp_path / "run", "status.json", "")
    (folder / "status.json").write_text(status)
    for verb in (["report", "--json"], ["explain"], ["watch", "--json"], ["compare"]):
        answer = rlplan(*verb, folder, *([folder] if verb == ["compare"] else []))
        assert "a bug in rlplan" not in answer.err, (verb, answer.err)


@pytest.mark.parametrize("listed", ["[]", '{"stages": 1}', '{"stages": ["../other"]}', '{"stages": [["a"]]}', "{}"])
def test_stages_that_are_no_names_are_refused(rlplan: Call, tmp_path: Path, listed: str) -> None:
    (tmp_path / "stages.json").write_text(listed)
    (tmp_path / "plan.json").write_text(json.dumps({}))
    answer = rlplan("report", tmp_path)
    assert answer.exit_code == 2, answer.err


@pytest.mark.parametrize("status", ['{"state": {"": null}}', '{"state": "failed", "exit_code": 70}', '{"state": "x"}'])
def test_a_status_is_no_bug_of_the_command_that_reads_it(
    rlplan: Call, good_run: Path, tmp_path: Path, status: str
) -> None:
    folder = hostile(good_run, tmp_path / "run", "status.json", "")
    (folder / "status.json").write_text(status)
    assert rlplan("watch", "--json", folder).exit_code == 5


def test_a_long_alarm_is_cut(rlplan: Call, good_run: Path, tmp_path: Path) -> None:
    alarm = json.dumps({"step": 1, "text": "x" * (15 << 20)})
    answer = rlplan("watch", "--json", hostile(good_run, tmp_path / "run", "alarms.jsonl", alarm))
    (shown,) = json.loads(answer.out)["alarms"]
    assert len(shown) == MAX_ALARM
