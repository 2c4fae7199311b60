"""The errors that the published points may have: bounds per kind, and what must be predicted at all."""

import json
import math
from typing import Any

import pytest

from rlplan.accuracy.compare import PREDICTED, AccuracyReport
from tests.accuracy.bundled import bundled_report
from tests.factories import ROOT

OTHER_KINDS = (
    *("param_count", "vllm_weights", "kv_per_token", "vllm_kv", "vllm_profile_peak", "vllm_activation_peak"),
    *("vllm_cuda_graph", "trtllm_kv_capacity", "inference_peak", "kv_saturation", "rl_colocated_residual"),
    "zero_model_states",
)
"""Kinds of memory that are no trainer's."""
TRAINING_KINDS = ("train_peak", "train_steady", "max_model_size")


@pytest.fixture(scope="module")
def report() -> AccuracyReport:
    return bundled_report()


def errors(report: AccuracyReport, kind: str) -> list[float]:
    return [
        abs(point.relative_error) for point in report.points if point.kind == kind and point.relative_error is not None
    ]


@pytest.mark.parametrize(
    ("kind", "median", "largest"),
    [
        ("param_count", 0.0, 0.0),
        ("vllm_weights", 0.01, 0.06),
        ("kv_per_token", 0.002, 0.002),
        ("vllm_kv", 0.03, 0.03),
        ("vllm_profile_peak", 0.01, 0.09),
        ("vllm_activation_peak", 0.05, 0.05),
        ("vllm_cuda_graph", 0.05, 0.05),
        ("inference_peak", 0.05, 0.08),
        ("zero_model_states", 0.005, 0.005),
        ("kv_saturation", 0.0, 0.0),
    ],
)
def test_errors_of_a_kind_stay_within_their_bound(
    report: AccuracyReport, kind: str, median: float, largest: float
) -> None:
    summary = report.summary[kind]
    assert summary.median_abs is not None
    assert summary.median_abs <= median
    assert summary.max_abs is not None
    assert summary.max_abs <= largest


def test_trtllm_capacities_are_within_three_percent_on_average(report: AccuracyReport) -> None:
    found = errors(report, "trtllm_kv_capacity")
    assert len(found) == 32
    assert sum(found) / len(found) <= 0.01


def test_nine_in_ten_memory_points_that_are_no_trainer_s_are_predicted(report: AccuracyReport) -> None:
    chosen = [point for point in report.points if point.kind in OTHER_KINDS]
    predicted = [point for point in chosen if point.status == PREDICTED]
    assert len(chosen) == 67
    assert len(predicted) / len(chosen) >= 0.9


def test_every_point_has_a_finite_error_or_a_reason(report: AccuracyReport) -> None:
    for point in report.points:
        if point.status == PREDICTED:
            assert point.relative_error is not None
            assert math.isfinite(point.relative_error)
            assert point.reason is None
        else:
            assert point.reason, point.id
            assert point.predicted is None


def test_ids_are_unique_and_every_row_of_latencies_gives_two_points(report: AccuracyReport) -> None:
    ids = [point.id for point in report.points]
    assert len(set(ids)) == len(ids)
    assert sum(name.endswith(":ttft") for name in ids) == sum(name.endswith(":tpot") for name in ids) == 381


def test_the_committed_report_is_what_the_code_says(report: AccuracyReport) -> None:
    committed: dict[str, Any] = json.loads((ROOT / "reports" / "accuracy" / "accuracy.json").read_text())
    assert committed == json.loads(json.dumps(report.as_json())), "run `make accuracy`"


def test_every_large_miss_of_an_engine_is_explained(report: AccuracyReport) -> None:
    why: dict[str, str] = json.loads((ROOT / "benchmarks" / "accuracy_misses.json").read_text())
    ids = {point.id for point in report.points}
    assert set(why) <= ids
    for point in report.points:
        if point.kind in OTHER_KINDS and (point.relative_error is None or abs(point.relative_error) > 0.05):
            assert point.id in why
