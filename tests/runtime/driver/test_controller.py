"""The controller releases actions in the order of the schedule, notices lateness, and passes failures on."""

import threading
import time
from dataclasses import replace

import pytest

from rlplan.dataflow.schedule import Action, Schedule
from rlplan.errors import RunError
from rlplan.runtime.driver.controller import Controller
from rlplan.runtime.processes.machine_speed import scale_seconds
from tests.factories import make_plan
from tests.waiting import limit_time


def schedule() -> Schedule:
    return make_plan(**{"workload.num_steps": 4, "workload.evaluate_every": 2}).schedule


def forever(action: Action) -> float:
    return scale_seconds(60.0)


def test_no_action_begins_before_what_it_waits_for_has_ended() -> None:
    ended: list[tuple[int, str]] = []
    problems = []

    def perform(action: Action, step: int) -> None:
        missing = [name for name in action.after if (step, name) not in ended]
        problems.extend(missing)
        time.sleep(0.001)
        ended.append((step, action.id))

    steps: list[int] = []
    Controller(schedule(), perform, forever).run(4, steps.append)
    assert problems == []
    assert steps == [0, 1, 2, 3, 4, -1]
    assert [step for step, name in ended if name == "evaluate"] == [0, 2, 4, -1]
    assert len(ended) == len(set(ended))


def test_a_run_that_stops_early_still_finishes() -> None:
    steps: list[int] = []

    def finish(step: int) -> bool:
        steps.append(step)
        return step == 2

    Controller(schedule(), lambda action, step: None, forever).run(4, finish)
    assert steps == [0, 1, 2, -1]


def test_actions_that_do_not_wait_for_each_other_run_side_by_side() -> None:
    meeting = threading.Barrier(2, timeout=scale_seconds(5))

    def perform(action: Action, step: int) -> None:
        if action.id in ("verify", "score/reference"):
            meeting.wait()

    Controller(schedule(), perform, forever).run(1, lambda step: None)


def test_an_action_that_is_late_fails_the_run_by_name() -> None:
    release = threading.Event()

    def perform(action: Action, step: int) -> None:
        if action.id == "score/reference":
            release.wait(scale_seconds(20))

    late = {"score/reference": 0.5}
    with limit_time(5), pytest.raises(RunError, match="score/reference did not finish"):
        Controller(schedule(), perform, lambda action: late.get(action.id, forever(action))).run(1, lambda step: None)
    release.set()


def test_a_failure_inside_an_action_ends_the_run_with_that_failure() -> None:
    def perform(action: Action, step: int) -> None:
        if action.id == "generate":
            raise RunError("the engine is gone")

    with pytest.raises(RunError, match="the engine is gone"):
        Controller(schedule(), perform, forever).run(1, lambda step: None)


def test_actions_that_wait_for_each_other_are_a_bug_and_not_a_hang() -> None:
    original = schedule()
    circle = tuple(replace(action, after=("b",) if index else ("a",), id="ab"[index]) for index, action in
                   enumerate(original.start[:2]))  # fmt: skip
    with pytest.raises(AssertionError, match="wait for each other"):
        Controller(replace(original, start=circle), lambda action, step: None, forever).run(1, lambda step: None)


def ahead() -> Schedule:
    return make_plan(**{"workload.num_steps": 4, "workload.evaluate_every": 2, "placement.max_staleness": 1}).schedule


def test_async_rollouts_are_begun_once_beside_all_steps_and_end_before_the_end() -> None:
    begun, over = [], threading.Event()

    def perform(action: Action, step: int) -> None:
        begun.append((action.id, step))
        if action.id == "generate":
            assert over.wait(scale_seconds(20))
        if (action.id, step) == ("optimizer_step", 4):
            over.set()

    Controller(ahead(), perform, forever).run(4, lambda step: None)
    assert [step for name, step in begun if name == "generate"] == [1]
    assert [step for name, step in begun if name == "take_rollouts"] == [1, 2, 3, 4]
    assert begun[-1] == ("checkpoint", -1)


def test_when_the_action_that_leads_fails_the_run_fails_with_it() -> None:
    def perform(action: Action, step: int) -> None:
        if action.id == "generate":
            raise RunError("the engine is gone")
        time.sleep(0.3 if action.id == "take_rollouts" else 0)

    with pytest.raises(RunError, match="the engine is gone"):
        Controller(ahead(), perform, forever).run(4, lambda step: None)


def test_what_waits_for_an_action_that_is_left_out_waits_for_what_that_one_waits_for() -> None:
    """A value model is trained alone in the first steps: the weight sync comes after it."""
    plan = make_plan(**{"algorithm.name": "ppo", "algorithm.value_warmup_steps": 2, "workload.num_steps": 3})
    ended: list[tuple[int, str]] = []

    def perform(action: Action, step: int) -> None:
        time.sleep(0.001)
        ended.append((step, action.id))

    Controller(plan.schedule, perform, forever).run(3, lambda step: None)
    trained = [step for step, name in ended if name == "optimizer_step"]
    assert trained == [3]
    for step in (1, 2, 3):
        names = [name for number, name in ended if number == step]
        last = "optimizer_step" if step == 3 else "optimizer_step/value"
        assert names.index(last) < names.index("sync_weights")
