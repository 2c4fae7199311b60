"""Predicted beside measured seconds: joined on the action, the first step apart."""

import pytest

from rlplan.timing.measured import collect_durations, join_seconds
from rlplan.trace import Span
from tests.factories import make_plan


def span(action_id: str, step: int, start_s: float, end_s: float, process: str = "policy_trainer/0") -> Span:
    return Span(action_id, step, process, "cpu:0", start_s, end_s)


def test_a_span_lasts_from_the_first_process_to_the_last_and_rows_of_the_driver_come_first() -> None:
    plan = make_plan()
    spans = [
        span("start_trainer", 0, 0.0, 8.0),
        span("start_trainer", 0, 1.0, 9.0, "policy_trainer/1"),
        span("optimizer_step", 2, 20.0, 20.5),
        span("generate", 2, 10.0, 11.0, "rollout_engine/0"),
    ]
    rows = [{"step": -1}, {"step": 2, "seconds/generate": 1.25}]
    durations = collect_durations(plan.schedule, spans, rows)
    assert durations == {
        ("start", "start_trainer"): [9.0],
        ("step", "generate"): [1.25],
        ("step", "optimizer_step"): [0.5],
    }


def test_the_first_step_counts_only_where_there_is_no_other() -> None:
    plan = make_plan()
    rows = [{"step": step, "seconds/generate": seconds} for step, seconds in ((1, 9.0), (2, 1.0), (3, 3.0))]
    assert collect_durations(plan.schedule, [], rows) == {("step", "generate"): [1.0, 3.0]}
    assert collect_durations(plan.schedule, [], rows[:1]) == {("step", "generate"): [9.0]}


def test_each_measured_action_meets_its_own_prediction() -> None:
    plan = make_plan()
    measured = {("step", "generate"): [1.0, 2.0, 9.0], ("start", "evaluate"): [4.0]}
    rows = join_seconds(plan.schedule, plan.timing, measured)
    assert [(row.part, row.action_id, row.median_s, row.count) for row in rows] == [
        ("start", "evaluate", 4.0, 1),
        ("step", "generate", 2.0, 3),
    ]
    assert plan.timing is not None
    predicted = plan.timing.cost("step", "generate")
    assert predicted is not None
    assert rows[1].predicted_s == predicted.seconds
    assert rows[1].ratio == pytest.approx(predicted.seconds / 2)


def test_without_a_prediction_the_measured_seconds_stand_alone() -> None:
    rows = join_seconds(make_plan().schedule, None, {("step", "generate"): [1.0]})
    assert [(row.predicted_s, row.ratio) for row in rows] == [(None, None)]
