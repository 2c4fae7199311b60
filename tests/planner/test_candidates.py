"""Candidates: what is tried, in what order, and what cannot be built and why."""

import pytest

from rlplan.planner.candidates import Candidate, list_candidates
from rlplan.vocabulary import Placement
from tests.factories import make_job


def test_hybrid_is_tried_before_disaggregated_and_colocated_is_refused_with_its_reason() -> None:
    candidates, rejections = list_candidates(make_job())
    assert candidates == (Candidate(Placement.HYBRID, 2), Candidate(Placement.DISAGGREGATED, 2))
    assert [rejection.placement for rejection in rejections] == [Placement.COLOCATED]
    assert "sleeps (CUDA)" in rejections[0].reason


def test_what_the_job_fixes_is_the_only_thing_tried() -> None:
    job = make_job(placement={"placement": "disaggregated"}, training={"zero_stage": 2})
    assert list_candidates(job) == ((Candidate(Placement.DISAGGREGATED, 2),), ())


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"placement": {"placement": "colocated"}}, "not executed yet"),
        (
            {"placement": {"placement": "disaggregated"}, "hardware.num_devices": 1},
            "disaggregated needs at least 2 devices: 1 generate, the others train",
        ),
        (
            {"hardware.num_devices": 3, "placement": {"placement": "hybrid"}},
            "workload.mini_batch_size 16 does not divide by the 3 training device(s)",
        ),
        (
            {"hardware.num_devices": 4, "placement": {"placement": "disaggregated"}},
            "workload.mini_batch_size 16 does not divide by the 3 training device(s)",
        ),
    ],
)
def test_what_cannot_be_built_is_rejected_with_its_numbers(overrides: dict[str, object], reason: str) -> None:
    candidates, rejections = list_candidates(make_job(**overrides))
    assert candidates == ()
    assert rejections
    assert all(reason in rejection.reason for rejection in rejections)


def test_a_mini_batch_that_hybrid_cannot_share_may_fit_disaggregated() -> None:
    candidates, rejections = list_candidates(make_job(**{"hardware.num_devices": 3}))
    assert candidates == (Candidate(Placement.DISAGGREGATED, 2),)
    assert {rejection.placement for rejection in rejections} == {Placement.COLOCATED, Placement.HYBRID}
