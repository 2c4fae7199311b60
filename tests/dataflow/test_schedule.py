"""Schedules: every call has its place, and every place exists."""

import pytest

from rlplan.dataflow.build import build_schedule
from rlplan.dataflow.schedule import HOST_GROUP, Action, Schedule
from rlplan.planner.resolve import read_choice
from rlplan.vocabulary import ActionKind, Placement, Role, Stream
from tests.factories import make_job


def make_schedule(placement: Placement = Placement.HYBRID, **overrides: object) -> Schedule:
    job = make_job(**overrides)
    return build_schedule(job, read_choice(job, placement, 2))


SCHEDULES = {
    "hybrid": make_schedule(),
    "disaggregated": make_schedule(Placement.DISAGGREGATED, **{"hardware.num_devices": 3}),
    "no reference": make_schedule(**{"algorithm.kl_coef": 0}),
    "four mini-batches": make_schedule(**{"workload.mini_batch_size": 4}),
    "one device": make_schedule(**{"hardware.num_devices": 1}),
}
schedules = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


def list_all_actions(schedule: Schedule) -> list[Action]:
    return [action for _, actions in schedule.parts for action in actions]


@schedules
def test_every_process_and_group_of_an_action_exists(schedule: Schedule) -> None:
    processes = dict(schedule.processes)
    groups = {group.name for group in schedule.groups} | {HOST_GROUP}
    for action in list_all_actions(schedule):
        assert set(action.processes) <= set(processes)
        assert action.device_group in groups
    assert len(processes) == sum(len(layout.devices) for layout in schedule.layouts)


@schedules
def test_every_process_is_started_once_and_before_all_else(schedule: Schedule) -> None:
    started = [name for action in schedule.start if action.kind.startswith("start_") for name in action.processes]
    assert sorted(started) == sorted(dict(schedule.processes))


@schedules
def test_an_action_needs_only_actions_that_stand_before_it_in_its_part(schedule: Schedule) -> None:
    for _, actions in schedule.parts:
        for index, action in enumerate(actions):
            assert set(action.after) <= {before.id for before in actions[:index]}


@schedules
def test_a_schedule_has_exactly_the_calls_of_its_graph(schedule: Schedule) -> None:
    ids = [action.id for action in schedule.step]
    assert len(set(ids)) == len(ids)
    assert {part for part, _ in schedule.parts} == {"start", "step", "finish"}


def test_a_sync_takes_the_first_rank_and_the_engine_on_the_transfer_stream() -> None:
    # under ZeRO-2 every rank has the whole weights: one of them hands them over
    sync = next(action for action in SCHEDULES["hybrid"].step if action.kind is ActionKind.SYNC_WEIGHTS)
    assert sync.processes == ("policy_trainer/0", "rollout_engine/0")
    assert sync.stream is Stream.TRANSFER


def test_what_the_driver_does_needs_no_process() -> None:
    for kind in (ActionKind.VERIFY, ActionKind.COMPUTE_ADVANTAGES):
        action = next(action for action in SCHEDULES["hybrid"].step if action.kind is kind)
        assert (action.processes, action.device_group, action.stream) == ((), HOST_GROUP, Stream.HOST)


def test_scoring_takes_the_scorer_of_the_role_and_nothing_else() -> None:
    score = next(action for action in SCHEDULES["hybrid"].step if action.kind is ActionKind.SCORE)
    assert score.processes == ("scorer/reference/0",)
    assert score.role is Role.REFERENCE


def test_in_a_disaggregated_schedule_generation_stays_on_its_own_group() -> None:
    groups = {action.id: action.device_group for action in SCHEDULES["disaggregated"].step}
    assert groups["generate"] == "generation"
    assert groups["score/reference"] == groups["train_forward_backward"] == groups["optimizer_step"] == "training"


def test_an_action_happens_in_the_steps_that_its_rhythm_names() -> None:
    evaluate = next(
        action for action in make_schedule(**{"workload.evaluate_every": 3}).step if action.id == "evaluate"
    )
    assert [step for step in range(1, 10) if evaluate.runs_in_step(step)] == [3, 6, 9]
    assert evaluate.runs_in_step(0)
    assert evaluate.runs_in_step(-1)
    generate = make_schedule().step[0]
    assert all(generate.runs_in_step(step) for step in range(1, 10))


def test_a_layout_is_found_by_worker_and_role() -> None:
    schedule = SCHEDULES["hybrid"]
    assert schedule.find_layout("policy_trainer").dp == 2
    assert schedule.find_layout("scorer", Role.REFERENCE).devices == ("cpu:0",)
    with pytest.raises(KeyError, match="scorer of policy"):
        schedule.find_layout("scorer")
