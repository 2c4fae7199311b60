"""Intervals of measured errors: their bounds, what is left out, and that the kept ones are those of the code."""

import math
import random

import pytest

from rlplan.accuracy import intervals
from rlplan.accuracy.compare import compare
from rlplan.accuracy.files.reading import bundled_points
from rlplan.accuracy.intervals import bundled_intervals, error_intervals, interval_of
from rlplan.accuracy.points import Measured, MeasuredPoint
from tests.accuracy.bundled import bundled_report


def made(number: int, ratio: float, source: str) -> MeasuredPoint:
    """A parameter count of which a share was measured."""
    return MeasuredPoint.model_validate(
        {
            "id": f"{source}-{number}",
            "kind": "param_count",
            "model": "Qwen/Qwen2.5-0.5B",
            "measured": {"value": 494_032_768 * ratio, "unit": "parameters"},
            "source": source,
        }
    )


def test_nine_of_ten_errors_of_a_kind_lie_inside() -> None:
    draws = random.Random(1)
    errors = [draws.gauss(0.1, 0.2) for _ in range(400)]
    low, high = interval_of(errors)
    assert 0.88 <= sum(low <= math.exp(error) <= high for error in errors) / 400 <= 0.92


def test_an_interval_holds_the_prediction_itself_and_all_of_few_points() -> None:
    assert interval_of([0.1, 0.2]) == (1.0, pytest.approx(math.exp(0.2)))


def test_sources_that_differ_widen_the_interval_until_each_would_have_been_inside() -> None:
    draws = random.Random(2)
    alike = [made(number, draws.gauss(1.0, 0.02), f"s{number % 4}") for number in range(80)]
    biased = [
        made(number, draws.gauss((0.9, 1.0, 1.0, 1.1)[number % 4], 0.02), f"s{number % 4}") for number in range(80)
    ]
    narrow, wide = (error_intervals(points)["param_count"] for points in (alike, biased))
    assert narrow.num_sources == 4
    assert narrow.inside_left_out >= 0.85
    assert wide.inside_left_out >= 0.9
    assert wide.high > narrow.high
    assert wide.low < 0.88


@pytest.mark.parametrize(("unit", "slower"), [("tokens/s/GPU", 0.5), ("s/iteration", 2.0)])
def test_a_step_that_takes_twice_as_long_has_the_ratio_two_in_whichever_unit(unit: str, slower: float) -> None:
    point = next(point for point in bundled_points() if point.id.startswith("foundry-"))
    point = point.model_copy(update={"measured": Measured(value=1.0, unit=unit)})
    [predicted] = compare([point]).points
    measured = Measured(value=float(predicted.predicted or 0) * slower, unit=unit)
    found = error_intervals([point.model_copy(update={"measured": measured})])["throughput_train"]
    assert (found.low, found.high) == (1.0, 2.0)


def test_the_kept_intervals_are_those_of_the_bundled_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "compare", lambda points: bundled_report())  # made once for several files
    assert dict(bundled_intervals()) == error_intervals(bundled_points()), "run `make accuracy`"


def test_nine_of_ten_points_of_sources_that_were_left_out_lie_inside_where_a_kind_has_enough() -> None:
    many = {kind: one for kind, one in bundled_intervals().items() if one.num_points >= 19}
    assert len(many) >= 6
    assert all(0.85 <= one.inside_left_out <= 0.95 for one in many.values())
