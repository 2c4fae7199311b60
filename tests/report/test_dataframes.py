"""Predicted and measured memory are joined on the right action, and errors have the right sign and size."""

import json
from pathlib import Path

import pandas as pd
import pytest

from rlplan.report import dataframes
from rlplan.report.run_folder import RunFolder, read_run_folder
from rlplan.units import MIB
from tests.report.factory import (
    BASELINE_FACTOR,
    BASELINES,
    HOST_PROCESSES,
    TOTAL_FACTOR,
    RunShape,
    make_empty_run,
    make_killed_run,
    make_run,
)


@pytest.fixture(name="run")
def _run(tmp_path: Path) -> RunFolder:
    return read_run_folder(make_run(tmp_path / "run"))


def _only(frame: pd.DataFrame, **wanted: object) -> pd.Series:
    for column, value in wanted.items():
        frame = frame[frame[column] == value]
    assert len(frame) == 1, frame
    return frame.iloc[0]


def _change_trace(folder: Path, change: dict[str, object], **wanted: object) -> None:
    """Change the fields of every trace record that has the wanted ones."""
    path = folder / "trace.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if all(row.get(key) == value for key, value in wanted.items()):
            row |= change
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_process_that_takes_no_part_keeps_what_it_held(run: RunFolder) -> None:
    predicted = dataframes.predicted_memory(run.plan.ledger)
    row = _only(
        predicted, run_phase="first", action_id="train_forward_backward", process="scorer/reference/0", kind="weights"
    )
    assert not row["takes_part"]
    assert row["peak_bytes"] == row["resident_bytes"] == 3 * MIB
    scored = predicted[
        (predicted["action_id"] == "train_forward_backward") & (predicted["process"] == "scorer/reference/0")
    ]
    assert scored.loc[scored["kind"] == "activations", "peak_bytes"].sum() == 0


def test_the_first_step_is_joined_with_first_and_later_steps_with_steady(run: RunFolder) -> None:
    optimizer = dataframes.joined_memory(run).query("kind == 'optimizer' and action_id == 'train_forward_backward'")
    predicted = dict(zip(optimizer["step"], optimizer["predicted_bytes"], strict=True))
    assert predicted == {1: 0, 2: 6 * MIB, 3: 6 * MIB, 4: 6 * MIB, 5: 6 * MIB, 6: 6 * MIB}
    assert optimizer["exact"].all()


def test_totals_are_joined_with_the_sum_of_all_kinds(run: RunFolder) -> None:
    joined = dataframes.joined_memory(run)
    row = _only(joined, step=2, action_id="score/reference", process="scorer/reference/0", kind="total",
                statistic="peak")  # fmt: skip
    predicted = (480 + 3 + 33 + 13) * MIB
    assert row["predicted_bytes"] == predicted
    assert row["measured_bytes"] == int(predicted * TOTAL_FACTOR)
    assert row["error_bytes"] == row["predicted_bytes"] - row["measured_bytes"] > 0
    assert row["error_fraction"] == pytest.approx(1 / TOTAL_FACTOR - 1, abs=1e-6)
    assert pd.isna(row["exact"])


def test_a_sample_taken_between_actions_is_compared_with_what_was_held_then(run: RunFolder) -> None:
    joined = dataframes.joined_memory(run)
    host = joined[joined["process"] == "driver/0"]
    assert list(host["step"]) == [0, 1, 2, 3, 4, 5, 6, -1]
    assert set(host["predicted_bytes"]) == {HOST_PROCESSES["driver/0"]}


def test_every_persistent_kind_of_a_good_run_is_exact(run: RunFolder) -> None:
    frame = dataframes.exactness(run)
    assert set(frame["kind"]) == {"weights", "gradients", "master_weights", "optimizer", "kv_cache"}
    assert (frame["num_compared"] == frame["num_exact"]).all()
    assert (frame["num_compared"] > 0).all()


def test_engine_weights_are_compared_before_and_after_packing(run: RunFolder) -> None:
    weights = dataframes.joined_memory(run).query("process == 'rollout_engine/0' and kind == 'weights' and step == 0")
    at_start = weights[weights["action_id"] == "start_engine"].set_index("statistic")["predicted_bytes"]
    assert dict(at_start) == {"resident": MIB, "loaded": 3 * MIB}
    row = _only(dataframes.exactness(run), kind="weights", process="rollout_engine/0")
    assert row["predicted_bytes"] == row["measured_bytes"] == 3 * MIB


def test_one_byte_off_is_not_exact(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    _change_trace(folder, {"num_bytes": 64 * MIB + 1}, kind="kv_cache", step=3, action_id="generate")
    run = read_run_folder(folder)
    row = _only(dataframes.exactness(run), kind="kv_cache")
    assert row["num_compared"] - row["num_exact"] == 1
    assert (row["predicted_bytes"], row["measured_bytes"]) == (64 * MIB, 64 * MIB + 1)


def test_what_was_predicted_and_never_measured_is_not_called_exact(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    lines = [line for line in (folder / "trace.jsonl").read_text().splitlines() if '"kv_cache"' not in line]
    (folder / "trace.jsonl").write_text("\n".join(lines) + "\n")
    row = _only(dataframes.exactness(read_run_folder(folder)), kind="kv_cache")
    assert (row["num_compared"], row["num_exact"]) == (0, 0)
    assert row["predicted_bytes"] == 64 * MIB
    assert pd.isna(row["measured_bytes"])


def test_what_was_measured_and_never_predicted_counts_as_wrong(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    _change_trace(folder, {"kind": "gradients"}, kind="kv_cache")
    row = _only(dataframes.exactness(read_run_folder(folder)), kind="gradients", process="rollout_engine/0")
    assert row["num_compared"] > 0
    assert row["num_exact"] == 0
    assert (row["predicted_bytes"], row["measured_bytes"]) == (0, 64 * MIB)


def test_peaks_are_compared_whole_and_without_the_import_baseline(run: RunFolder) -> None:
    peak = _only(dataframes.process_peaks(run), process="policy_trainer/0")
    baseline, modelled = BASELINES["policy_trainer"], (3 + 3 + 3 + 6 + 33 + 13) * MIB
    measured = int((baseline + modelled) * TOTAL_FACTOR)
    assert (peak["run_phase"], peak["action_id"]) == ("steady", "train_forward_backward")
    assert peak["predicted_bytes"] == baseline + modelled
    assert peak["measured_bytes"] == measured
    assert peak["baseline_bytes"] == int(baseline * BASELINE_FACTOR)
    assert peak["net_predicted_bytes"] == modelled
    assert peak["net_measured_bytes"] == measured - int(baseline * BASELINE_FACTOR)
    net_measured = measured - int(baseline * BASELINE_FACTOR)
    assert peak["net_error_fraction"] == pytest.approx((modelled - net_measured) / net_measured)
    assert peak["modelled_share"] == pytest.approx(net_measured / measured)


def test_a_process_without_a_baseline_sample_has_no_net_error(run: RunFolder) -> None:
    peak = _only(dataframes.process_peaks(run), process="driver/0")
    assert peak["error_fraction"] == pytest.approx(1 / TOTAL_FACTOR - 1, abs=1e-6)
    assert pd.isna(peak["net_error_fraction"])


def test_a_measured_peak_above_the_prediction_is_a_negative_error(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    _change_trace(folder, {"num_bytes": 2000 * MIB}, kind="total", statistic="peak", step=4, action_id="generate")
    peak = _only(dataframes.process_peaks(read_run_folder(folder)), process="rollout_engine/0")
    assert (peak["measured_action_id"], peak["measured_step"]) == ("generate", 4)
    assert peak["error_fraction"] < -0.5


def test_a_run_cut_short_is_compared_with_the_actions_that_it_reached(tmp_path: Path) -> None:
    run = read_run_folder(make_run(tmp_path, RunShape(stops_after=0)))
    peak = _only(dataframes.process_peaks(run), process="policy_trainer/0")
    assert peak["run_phase"] == "start"
    assert peak["error_fraction"] == pytest.approx(1 / TOTAL_FACTOR - 1, abs=1e-6)


def test_processes_that_hold_a_model_come_before_the_driver_and_ray(run: RunFolder) -> None:
    assert list(dataframes.process_peaks(run)["process"])[-2:] == ["driver/0", "ray_system"]


def test_frames_of_killed_and_empty_runs_have_their_columns(tmp_path: Path) -> None:
    killed = read_run_folder(make_killed_run(tmp_path / "killed"))
    empty = read_run_folder(make_empty_run(tmp_path / "empty"))
    assert list(dataframes.joined_memory(killed).columns) == list(dataframes.joined_memory(empty).columns)
    assert dataframes.joined_memory(empty).empty
    assert dataframes.metrics(empty).empty
    peaks = dataframes.process_peaks(empty)
    assert peaks["measured_bytes"].isna().all()
    assert (peaks["predicted_bytes"] > 0).all()


def test_the_last_evaluation_belongs_to_the_last_step(tmp_path: Path) -> None:
    folder = make_run(tmp_path, RunShape(num_steps=3))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": -1, "evaluate/greedy_accuracy": 0.875}\n')
    frame = dataframes.metrics(read_run_folder(folder))
    assert list(frame["step"]) == [0, 1, 2, 3]
    assert frame["evaluate/greedy_accuracy"].iloc[-1] == 0.875
    assert frame["reward/mean"].notna().iloc[-1]


def test_finishing_does_not_count_as_a_step_in_timings(run: RunFolder) -> None:
    frame = dataframes.timings(run)
    assert list(frame["step"]) == [1, 2, 3, 4, 5, 6]
    assert "seconds/checkpoint" not in frame
