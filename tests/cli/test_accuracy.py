"""`rlplan accuracy`: the table, the JSON, and what a broken file gets."""

import pickle
from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tests.cli.test_commands import json_of


def test_without_a_file_the_bundled_points_are_predicted(rlplan: Call) -> None:
    value = json_of(rlplan("accuracy", "--json"))
    assert len(value["points"]) == 151 + 2 * 381
    assert value["summary"]["kv_per_token"]["max_abs"] <= 0.002


@pytest.mark.parametrize("columns", ["80", "140"])
def test_the_table_is_readable_in_narrow_and_wide_terminals(
    rlplan: Call, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    answer = rlplan("accuracy")
    assert answer.exit_code == 0
    for word in ("kvtok-qwen3-14b", "Refused", "Absolute error by kind", "trtllm_kv_capacity"):
        assert word in answer.out


def test_of_a_kind_with_many_points_the_largest_errors_are_shown_unless_all_are_asked_for(rlplan: Call) -> None:
    some, every = rlplan("accuracy").out, rlplan("accuracy", "--all").out
    assert "5 largest errors of each kind" in some
    assert len(some.splitlines()) < 250 < 904 < len(every.splitlines())


def test_a_log_s_points_are_predicted(rlplan: Call, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("non-default args: {'model': 'meta-llama/Llama-3.1-8B'}\nModel loading took 14.99 GiB\n")
    (point,) = json_of(rlplan("accuracy", log, "--json"))["points"]
    assert (point["id"], point["status"], point["measured"]) == ("server.log:weights", "predicted", 14.99)


def test_a_snapshot_s_peaks_are_shown(rlplan: Call, tmp_path: Path) -> None:
    path = tmp_path / "a.pickle"
    path.write_bytes(pickle.dumps({"segments": [{"device": 0, "total_size": 4096, "allocated_size": 1024}]}))
    assert "4,096 bytes max reserved" in rlplan("accuracy", path).out


@pytest.mark.parametrize("content", [b"{", b"", b"\x80\x04cos\nsystem\n.", b"\x00" * 100])
def test_a_broken_file_ends_with_exit_code_2_and_four_parts(rlplan: Call, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "points.json"
    path.write_bytes(content)
    answer = rlplan("accuracy", path)
    assert (answer.exit_code, answer.out) == (2, "")
    for part in ("error:", "where:", "rule:", "way out:"):
        assert part in answer.err
