"""Charts hold what they should: the right scenes, kinds, words and values, as data."""

from pathlib import Path
from typing import Any

import pytest

from rlplan.report.dataframes import process_peaks
from rlplan.report.drawn import bars, curves, memory
from rlplan.report.run_folder import RunFolder, read_run_folder, unique_labels
from rlplan.units import GIB
from rlplan.vocabulary import format_name
from tests.report.factory import RunShape, make_empty_run, make_killed_run, make_run, make_run_with_own_reward


def _read(folder: Path, shape: RunShape) -> RunFolder:
    return read_run_folder(make_run(folder, shape))


def _scenes(run: RunFolder) -> dict[str, dict[str, Any]]:
    return {scene["title"]: scene for scene in memory.memory_of_host(run)["scenes"]}


def test_the_host_is_drawn_with_its_capacity_and_what_was_measured(tmp_path: Path) -> None:
    run = _read(tmp_path, RunShape(size="large", capacity=64 * GIB))
    host = _scenes(run)["Whole host"]
    assert host["capacity"] == 64 * GIB
    assert host["measured"]
    assert len(host["points"][0]) == len(host["points"][1]) > 0
    assert [word.split(" peak ")[0] for word in host["words"][:2]] == ["predicted", "measured"]


def test_a_tiny_model_gets_a_scene_without_the_baselines(tmp_path: Path) -> None:
    assert "Without process baselines" in _scenes(_read(tmp_path / "tiny", RunShape(size="tiny")))
    assert "Without process baselines" not in _scenes(_read(tmp_path / "large", RunShape(size="large")))


def test_every_process_can_be_asked_for_until_there_are_too_many(tmp_path: Path) -> None:
    scenes = _scenes(_read(tmp_path / "few", RunShape(num_devices=2)))
    for name in ("policy_trainer/0", "rollout_engine/0", "scorer/reference/0", "driver/0", "ray_system"):
        assert scenes[name]["hidden"]
    many = memory.memory_of_host(_read(tmp_path / "many", RunShape(num_devices=16, num_steps=2)))
    assert "The 12 largest of 19 processes can be shown." in many["note"]


def test_every_kind_and_phase_that_is_drawn_has_a_name_and_a_color(tmp_path: Path) -> None:
    run = _read(tmp_path, RunShape(num_steps=3))
    chart = memory.memory_of_host(run)
    host = chart["scenes"][0]
    kinds = {str(row.kind) for row in run.ledger.rows if row.peak_bytes}
    assert {kind["kind"] for kind in host["kinds"]} == kinds
    assert all(kind["name"] == format_name(kind["kind"]) and kind["color"] for kind in host["kinds"])
    assert all(kind["source"] for kind in host["kinds"])
    phases = {phase["name"] for phase in chart["phases"]}
    assert {str(action.phase) for _, part in run.schedule.parts for action in part} <= phases


def test_a_long_run_is_cut_to_its_first_and_last_steps_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _read(tmp_path, RunShape(num_steps=40))
    whole = memory.memory_of_host(run)
    monkeypatch.setattr(memory, "MAX_SPANS", 100)
    cut = memory.memory_of_host(run)
    assert len(cut["edges"]) < len(whole["edges"]) / 3
    assert "left out" in cut["note"]
    assert "left out" not in whole["note"]


def test_an_empty_run_has_no_timeline(tmp_path: Path) -> None:
    assert memory.memory_of_host(read_run_folder(make_empty_run(tmp_path))) == {}


def test_all_runs_are_in_every_curve_controls_dashed(tmp_path: Path) -> None:
    shapes = [RunShape(), RunShape(seed=1), RunShape(learning_rate=0), RunShape(shuffle_rewards=True)]
    runs = tuple(_read(tmp_path / str(i), shape) for i, shape in enumerate(shapes))
    chart = curves.learning(runs, unique_labels(runs))
    assert [run["label"] for run in chart["runs"]] == ["seed 0", "seed 1", "learning rate 0", "shuffled rewards"]
    assert len({run["color"] for run in chart["runs"]}) == 4
    for panel in chart["panels"]:
        named = [curve for curve in panel["series"] if curve.get("names_end")]
        assert [curve["run"] for curve in named] == [0, 1, 2, 3], panel["title"]
        assert [curve["dash"] is not None for curve in named] == [False, False, True, True]


def test_every_evaluation_of_a_run_has_a_chart_under_its_own_name(tmp_path: Path) -> None:
    chart = curves.learning([_read(tmp_path / "rules", RunShape())], ["seed 0"])
    assert [panel["title"] for panel in chart["panels"][:2]] == [
        "Greedy accuracy on held-out prompts",
        "format_accuracy on held-out prompts",
    ]
    own = curves.learning([read_run_folder(make_run_with_own_reward(tmp_path / "own"))], ["seed 0"])
    first = own["panels"][0]
    assert first["title"] == "length_score on held-out prompts"
    assert first["series"][0]["values"][0] == -3.0
    assert "range" not in first, "its values may be any number"
    assert not any("accuracy" in panel["title"].lower() for panel in own["panels"])


def test_what_was_not_recorded_is_said_and_has_no_blank_chart(tmp_path: Path) -> None:
    killed = curves.learning([read_run_folder(make_killed_run(tmp_path / "killed"))], ["killed"])
    assert len(killed["panels"]) == len(curves.PANELS) + 1
    empty = curves.learning([read_run_folder(make_empty_run(tmp_path / "empty"))], ["empty"])
    assert empty["panels"] == []
    assert all(title in empty["note"] for title, _, _ in curves.PANELS)


def test_what_overflowed_is_left_out_of_a_chart(tmp_path: Path) -> None:
    folder = make_run(tmp_path, RunShape(num_steps=2))
    (folder / "metrics.jsonl").write_text(
        '{"step": 1, "reward/mean": 0.5, "kl/mean": Infinity}\n{"step": 2, "reward/mean": -Infinity}\n'
    )
    chart = curves.learning([read_run_folder(folder)], ["one"])
    assert [panel["title"] for panel in chart["panels"]] == ["Reward", "Throughput, tokens/s"]
    assert (chart["panels"][0]["x"], chart["panels"][0]["series"][0]["values"]) == ([1], [0.5])


def test_a_learning_chart_needs_not_all_metrics(tmp_path: Path) -> None:
    folder = make_run(tmp_path, RunShape(num_steps=2))
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2, "kl/mean": null}\n')
    chart = curves.learning([read_run_folder(folder)], ["seed 0"])
    assert [panel["title"] for panel in chart["panels"]] == ["Reward", "Throughput, tokens/s"]


def test_the_prediction_bars_say_predicted_bytes_and_error(tmp_path: Path) -> None:
    run = _read(tmp_path, RunShape(size="large"))
    chart = bars.prediction(run, process_peaks(run))
    engine = next(row for row in chart.rows if row.label == "policy_trainer/0")
    assert engine.words == "3.76 GiB, +5.3 %"
    assert sum(segment.size for segment in engine.segments) == pytest.approx(3.76 * GIB, rel=0.01)
    assert engine.mark
    net = bars.prediction(run, process_peaks(run), with_baselines=False)
    assert "baseline only" in {row.words for row in net.rows}
    assert "process" not in net.legend


def test_only_clusters_with_a_price_stand_in_the_chart_of_money() -> None:
    rows = [
        {"name": "job", "devices": "8x h100", "step_s": 10.0, "dollars_per_step": 0.1, "why": "", "is_on_front": True},
        {
            "name": "job",
            "devices": "4x h100",
            "step_s": 20.0,
            "dollars_per_step": None,
            "why": "",
            "is_on_front": False,
        },
    ]
    assert [point["name"] for point in curves.time_against_money(rows)["points"]] == ["8x h100"]
    assert curves.time_against_money(rows[1:]) == {}
