"""Layouts: which devices a role gets in each placement."""

import pytest

from rlplan.dataflow.placements import place
from rlplan.dataflow.schedule import DeviceGroup, RoleLayout
from rlplan.planner.resolve import read_choice
from rlplan.vocabulary import Placement, Role
from tests.factories import make_job


def lay_out(placement: Placement, **overrides: object) -> tuple[tuple[DeviceGroup, ...], tuple[RoleLayout, ...]]:
    job = make_job(**overrides)
    return place(job, read_choice(job, placement, 2))


def place_roles(num_devices: int, placement: Placement, **overrides: object) -> dict[str, RoleLayout]:
    _, layouts = lay_out(placement, **{"hardware.num_devices": num_devices, **overrides})
    return {layout.worker: layout for layout in layouts}


def test_hybrid_shares_every_device_and_the_trainer_has_a_rank_on_each() -> None:
    groups, layouts = lay_out(Placement.HYBRID)
    assert [(group.name, group.devices) for group in groups] == [("shared", ("cpu:0", "cpu:1"))]
    trainer, engine, scorer = layouts
    assert trainer == RoleLayout(Role.POLICY, "policy_trainer", "shared", ("cpu:0", "cpu:1"), dp=2, zero_stage=2)
    assert engine == RoleLayout(Role.POLICY, "rollout_engine", "shared", ("cpu:1",))
    assert scorer == RoleLayout(Role.REFERENCE, "scorer", "shared", ("cpu:0",))


def test_disaggregated_keeps_generation_and_training_apart() -> None:
    groups, _ = lay_out(Placement.DISAGGREGATED, **{"hardware.num_devices": 3})
    assert {group.name: group.devices for group in groups} == {
        "training": ("cpu:0", "cpu:1"),
        "generation": ("cpu:2",),
    }
    layouts = place_roles(3, Placement.DISAGGREGATED)
    assert (layouts["policy_trainer"].devices, layouts["policy_trainer"].dp) == (("cpu:0", "cpu:1"), 2)
    assert layouts["rollout_engine"].devices == ("cpu:2",)
    assert layouts["scorer"].group == "training"


@pytest.mark.parametrize("placement", [Placement.HYBRID, Placement.DISAGGREGATED])
@pytest.mark.parametrize("num_devices", [2, 3, 8, 64])
def test_every_layout_lies_on_devices_of_its_group(num_devices: int, placement: Placement) -> None:
    groups, layouts = lay_out(placement, **{"hardware.num_devices": num_devices})
    devices = {group.name: set(group.devices) for group in groups}
    assert sum(len(group) for group in devices.values()) == num_devices
    for layout in layouts:
        assert set(layout.devices) <= devices[layout.group]
        assert len(layout.devices) == layout.dp * layout.tp


def test_generation_and_scoring_get_the_devices_that_the_job_gives_them() -> None:
    job = make_job(
        **{"hardware.num_devices": 8, "placement.num_generation_devices": 3, "placement.num_scoring_devices": 1}
    )
    groups, layouts = place(job, read_choice(job, Placement.DISAGGREGATED, 2))
    assert [(group.name, len(group.devices)) for group in groups] == [
        ("training", 4),
        ("scoring", 1),
        ("generation", 3),
    ]
    assert [layout.group for layout in layouts] == ["training", "generation", "scoring"]


def test_one_device_is_enough_for_hybrid() -> None:
    layouts = place_roles(1, Placement.HYBRID)
    assert {layout.devices for layout in layouts.values()} == {("cpu:0",)}


def test_without_a_kl_term_there_is_no_scorer() -> None:
    assert set(place_roles(2, Placement.HYBRID, **{"algorithm.kl_coef": 0})) == {"policy_trainer", "rollout_engine"}


def test_processes_are_named_by_worker_rank_and_for_scorers_by_role() -> None:
    layouts = place_roles(2, Placement.HYBRID)
    assert layouts["policy_trainer"].processes == (("policy_trainer/0", "cpu:0"), ("policy_trainer/1", "cpu:1"))
    assert layouts["rollout_engine"].processes == (("rollout_engine/0", "cpu:1"),)
    assert layouts["scorer"].processes == (("scorer/reference/0", "cpu:0"),)
