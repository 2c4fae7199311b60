"""`rlplan accuracy`: the table, the JSON, and what a broken file gets."""

import json
from pathlib import Path

import pytest
from rlplan_cli.commands import accuracy

from rlplan.accuracy.files.reading import published_points
from tests.cli.conftest import Call
from tests.cli.test_commands import json_of


@pytest.mark.nightly  # tests/accuracy/test_bounds.py predicts them all
def test_without_a_file_the_bundled_points_are_predicted(rlplan: Call) -> None:
    value = json_of(rlplan("accuracy", "--json"))
    assert len(value["points"]) == len(published_points()) == 1_578
    assert value["summary"]["kv_per_token"]["max_abs"] <= 0.002


@pytest.mark.parametrize("columns", ["80", pytest.param("140", marks=pytest.mark.nightly)])
def test_the_table_is_readable_in_narrow_and_wide_terminals(
    rlplan: Call, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    """Uses a sixth of the bundled points, and those that the test looks for."""
    monkeypatch.setenv("COLUMNS", columns)
    points = published_points()
    few = [
        point
        for at, point in enumerate(points)
        if at % 6 == 0 or point.id.startswith(("kvtok", "trtllm", "ds-z3-offload"))
    ]
    monkeypatch.setattr(accuracy, "published_points", lambda: few)
    answer = rlplan("accuracy")
    assert answer.exit_code == 0
    for word in ("kvtok-qwen3-14b", "Not predicted", "Absolute error by kind", "trtllm_kv_capacity"):
        assert word in answer.out
    assert "5 largest errors of each kind" in answer.out
    assert len(answer.out.splitlines()) < 250


@pytest.mark.nightly
def test_every_point_is_shown_where_all_are_asked_for(rlplan: Call) -> None:
    assert len(rlplan("accuracy", "--all").out.splitlines()) > 904


def test_of_points_of_ones_own_every_setting_is_read_listed_or_refused(rlplan: Call, tmp_path: Path) -> None:
    settings = {
        "framework": "torch",
        "seq": 1024,
        "micro_batch": 1,
        "act_ckpt": True,
        "lora_rank": 64,
        "dataset": "mine",
    }
    base = {"kind": "train_peak", "model": "Qwen/Qwen2.5-7B", "gpu": "1x H100"}
    measured = {"value": 16.3, "unit": "GiB/GPU max allocated"}
    points = [
        {"id": "a", "settings": settings, "measured": measured, **base},
        {"id": "b", "settings": settings | {"freeze_layers": 3}, "measured": measured, **base},
    ]
    (tmp_path / "points.json").write_text(json.dumps(points))
    answer = rlplan("accuracy", tmp_path / "points.json")
    printed = " ".join(answer.out.split())
    assert "Settings without effect" in printed
    assert "train_peak dataset says where the number comes from" in printed
    assert "setting 'freeze_layers' is 3, which no formula of train_peak reads" in printed


def test_a_log_s_points_are_predicted(rlplan: Call, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("non-default args: {'model': 'meta-llama/Llama-3.1-8B'}\nModel loading took 14.99 GiB\n")
    (point,) = json_of(rlplan("accuracy", log, "--json"))["points"]
    assert (point["id"], point["status"], point["measured"]) == ("server.log:weights", "predicted", 14.99)


@pytest.mark.parametrize("content", [b"{", b"", b"\x80\x04cos\nsystem\n.", b"\x00" * 100])
def test_a_broken_file_ends_with_exit_code_2_and_four_parts(rlplan: Call, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "points.json"
    path.write_bytes(content)
    answer = rlplan("accuracy", path)
    assert (answer.exit_code, answer.out) == (2, "")
    for part in ("error:", "where:", "rule:", "way out:"):
        assert part in answer.err
