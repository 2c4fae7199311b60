"""Candidates: what is tried, in what order, and what cannot be built and why."""

import pytest

from rlplan.planner.cpu.candidates import list_choices
from rlplan.planner.plan_parts import Considered
from rlplan.spec.resolved import ResolvedJob
from rlplan.vocabulary import Placement, Transport
from tests.factories import make_job

STAGE_2 = {"training.zero_stage": 2}
DISAGGREGATED = ((Placement.DISAGGREGATED, 2),)


def list_layouts(job: ResolvedJob) -> tuple[tuple[tuple[Placement, int], ...], tuple[Considered, ...]]:
    """(placement, ZeRO stage) of every choice, and what is rejected."""
    choices, rejections = list_choices(job)
    return tuple((choice.arrangement.placement, choice.trainer.zero_stage) for choice in choices), rejections


def test_hybrid_is_tried_before_disaggregated_and_colocated_last() -> None:
    placements = (Placement.HYBRID, Placement.DISAGGREGATED, Placement.COLOCATED)
    job = make_job(**STAGE_2)
    assert list_layouts(job) == (tuple((placement, 2) for placement in placements), ())


def test_an_open_stage_is_any_of_four_and_those_that_hold_less_come_first() -> None:
    candidates, _ = list_layouts(make_job(**{"training.zero_stage": "auto"}))
    assert [stage for placement, stage in candidates if placement is Placement.HYBRID] == [2, 1, 3, 0]


def test_an_offloaded_optimizer_leaves_the_stages_that_have_partitions() -> None:
    candidates, rejections = list_layouts(
        make_job(**{"training.offloads_optimizer": True, "training.zero_stage": "auto"})
    )
    assert {stage for _, stage in candidates} == {2, 3}
    assert {rejection.zero_stage for rejection in rejections} == {0, 1}


def test_what_is_impossible_at_any_stage_is_said_once() -> None:
    _, rejections = list_layouts(make_job(**{"placement.max_staleness": 1, "training.zero_stage": "auto"}))
    assert len(rejections) == 2


def test_generation_beside_training_needs_devices_of_its_own() -> None:
    candidates, rejections = list_layouts(make_job(**{"placement.max_staleness": 1, **STAGE_2}))
    assert candidates == DISAGGREGATED
    assert {rejection.placement for rejection in rejections} == {Placement.HYBRID, Placement.COLOCATED}
    assert all("need separate devices for generation" in rejection.reason for rejection in rejections)


def test_an_open_transport_goes_between_hosts_over_gloo() -> None:
    job = make_job(**{"hardware.num_hosts": 2, "placement.placement": "disaggregated", **STAGE_2})
    assert (make_job().sync_transport, job.sync_transport) == (Transport.SHARED_MEMORY, Transport.GLOO)
    assert list_layouts(job) == (DISAGGREGATED, ())


def test_what_the_job_fixes_is_the_only_thing_tried() -> None:
    job = make_job(placement={"placement": "disaggregated"}, training={"zero_stage": 2})
    assert list_layouts(job) == (DISAGGREGATED, ())


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (
            {"placement": {"placement": "colocated", "max_staleness": 1}},
            "async rollouts (placement.max_staleness) need separate devices for generation",
        ),
        (
            {"placement": {"placement": "disaggregated"}, "hardware.num_devices": 1},
            "disaggregated needs at least 2 devices: 1 generate or score, the others train",
        ),
        (
            {"placement": {"placement": "disaggregated", "num_generation_devices": 2, "num_scoring_devices": 1}},
            "disaggregated needs at least 4 devices: 3 generate or score, the others train",
        ),
        (
            {"rollout.num_engines": 2, "rollout.tp": 2, "placement": {"placement": "hybrid"}},
            "2 engine(s) of 2 rank(s) need 4 devices",
        ),
        (
            {"hardware.num_hosts": 2, "placement.transport": "shared_memory"},
            "transport shared_memory needs trainer and engine on one host; of 2 hosts the first trains and the last",
        ),
        (
            {"rollout.speculative_tokens": 3, "placement": {"placement": "colocated"}},
            "a colocated engine restarts in its process, which vLLM cannot do after speculative decoding",
        ),
        (
            {"rollout.quantization": "fp8"},
            "rollout.quantization fp8: vLLM quantises on CUDA devices, a CPU host has none",
        ),
        (
            {"hardware.num_devices": 3, "placement": {"placement": "hybrid"}, "workload.mini_batch_size": 2},
            "workload.mini_batch_size 2 gives some of the 3 training device(s) no rollout",
        ),
        (
            {"hardware.num_devices": 4, "placement": {"placement": "disaggregated"}, "workload.mini_batch_size": 2},
            "workload.mini_batch_size 2 gives some of the 3 training device(s) no rollout",
        ),
    ],
)
def test_what_cannot_be_built_is_rejected_with_its_numbers(overrides: dict[str, object], reason: str) -> None:
    candidates, rejections = list_layouts(make_job(**overrides))
    assert candidates == ()
    assert rejections
    assert all(reason in rejection.reason for rejection in rejections)


def test_a_mini_batch_that_hybrid_cannot_share_may_fit_disaggregated() -> None:
    few = {"workload.mini_batch_size": 2, "hardware.num_devices": 3}
    candidates, rejections = list_layouts(make_job(**{**few, **STAGE_2}))
    assert candidates == DISAGGREGATED
    assert {rejection.placement for rejection in rejections} == {Placement.COLOCATED, Placement.HYBRID}
