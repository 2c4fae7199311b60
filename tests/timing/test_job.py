"""Seconds of a job's actions: none is below zero."""

import pytest

from rlplan.dataflow.build import build_schedule
from rlplan.planner.resolve import read_choice
from rlplan.timing.cost import Cost, Resource
from rlplan.timing.step import time_job
from rlplan.vocabulary import Placement
from tests.factories import make_job


def test_seconds_below_zero_are_a_bug_of_ours() -> None:
    job = make_job()
    schedule = build_schedule(job, read_choice(job, Placement.HYBRID, 2))
    costs = {(part, action.id): Cost({Resource.COMPUTE: 1.0}) for part, actions in schedule.parts for action in actions}
    assert time_job(schedule, costs).step.seconds > 0
    costs["step", schedule.step[0].id] = Cost({Resource.COMPUTE: 1.0, Resource.NETWORK: -0.5})
    with pytest.raises(AssertionError, match="fewer than 0 seconds"):
        time_job(schedule, costs)
