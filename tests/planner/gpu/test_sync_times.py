"""Delta sync in a cluster: the network decides whether a plan sends only changed weights."""

from dataclasses import replace

import pytest

from rlplan.errors import SpecError
from rlplan.planner.answers.families import list_families
from rlplan.planner.answers.plan_results import diff_choices
from rlplan.planner.gpu.search import GpuSearch
from rlplan.planner.gpu.sync_times import SyncModes
from rlplan.planner.memo import Memo
from rlplan.planner.plan import Plan
from rlplan.planner.remedies import list_remedies
from rlplan.planner.search import find_best_plan
from rlplan.planner.setting import read_setting
from rlplan.spec.resolved import SettledJob
from rlplan.units import GIB
from tests.factories import gpu_job

POLICY = "Qwen/Qwen2.5-1.5B"
SLOW, FASTER = "2xrtx-4090-4x", "2xrtx-4090-8x"
"""Hosts with 10 and with 25 Gbit/s between them: 1.0 and 2.5 GB/s of messages, where one thread codes 1.67."""
WORDS = "delta sync sends 3% of the elements (assumed)"


def make_job(gpus: str, *more: str, backend: str = "deepspeed") -> SettledJob:
    top = {"policy": POLICY, "hardware": gpus, "algorithm": "grpo", "training": {"backend": backend}}
    return gpu_job(top, ["placement.placement=disaggregated", *more])


def make_plan(gpus: str, *more: str) -> Plan:
    return find_best_plan(make_job(gpus, *more), with_others=False)


def sync_s(plan: Plan) -> float:
    return plan.costs["sync_weights"].seconds


def test_over_a_slow_network_what_has_changed_travels_and_the_plan_says_what_that_brings() -> None:
    plan, whole = make_plan(SLOW), make_plan(SLOW, "placement.sync_content=full")
    assert (plan.choice.sync_mode, plan.job.placement.sync_content) == ("delta", "delta")
    assert plan.job.placement.transport == "nccl"
    assert not plan.refusals, "the runtime runs it"
    assert plan.seconds < whole.seconds
    assert sync_s(plan) >= 2 * 1_543_714_304 / 1.67e9
    (note,) = (note for note in plan.notes if note.startswith(WORDS))
    assert note.endswith("for all weights (placement.sync_content=full)")
    assert not any(note.startswith(WORDS) for note in whole.notes)


def test_what_all_weights_would_take_is_asked_beside_it() -> None:
    plan = make_plan(SLOW)
    assert [change.typed for change in list_families(plan) if "sync_content" in change.typed] == [
        "placement.sync_content=full"
    ]
    assert diff_choices(replace(plan.choice, sync_mode="nccl"), plan.choice, plan.job, plan.asked).split() == [
        "placement.transport=nccl",
        "placement.sync_content=full",
    ]


def test_over_a_faster_one_all_weights_travel_and_asking_for_changes_costs_time() -> None:
    plan, asked = make_plan(FASTER), make_plan(FASTER, "placement.sync_content=delta")
    assert (plan.choice.sync_mode, asked.choice.sync_mode) == ("nccl", "delta")
    assert sync_s(plan) < sync_s(asked)
    assert any(note.startswith(WORDS) for note in asked.notes)


@pytest.mark.parametrize(
    ("gpus", "more", "backend", "may"),
    [
        (SLOW, (), "deepspeed", True),
        (FASTER, (), "deepspeed", False),
        ("16xH100", (), "deepspeed", False),
        (SLOW, ("rollout.dtype=float32",), "deepspeed", False),
        (SLOW, (), "fsdp2", False),
    ],
)
def test_changes_are_looked_at_only_where_they_can_win(
    gpus: str, more: tuple[str, ...], backend: str, may: bool
) -> None:
    job = make_job(gpus, *more, backend=backend)
    setting = read_setting(job)
    half = setting.num_gpus // 2
    assert SyncModes(job, setting, Memo()).delta_may_win(half, half) is may
    space = GpuSearch(job, setting).space
    modes = {
        mode
        for arrangement in space.arrangements
        for e in space.list_engines(arrangement)
        for mode in space.list_transports(arrangement, e)
    }
    assert ("delta" in modes) is may


def test_on_one_of_those_hosts_no_network_is_between_the_groups() -> None:
    job = make_job(SLOW)
    assert not SyncModes(job, read_setting(job), Memo()).delta_may_win(2, 2)


def test_a_transport_that_is_named_carries_all_weights() -> None:
    assert make_plan(SLOW, "placement.transport=nccl").choice.sync_mode == "nccl"


def test_the_search_takes_all_weights_where_the_copies_do_not_fit_into_a_host() -> None:
    """Two hosts of four GPUs with 10 Gbit/s between them: one trains, four of a host generate, each with a copy."""
    asked, modes = ("policy.path=Qwen/Qwen2.5-0.5B", "placement.num_generation_devices=7", "rollout.tp=1"), []
    for memory in (22, 18):  # four workers with 4 GiB each, and four copies of 1.17 GiB
        plan = make_plan(SLOW, *asked, f"hardware.host_memory={memory}GiB")
        assert plan.ledger.host_peak("host:1").num_bytes <= memory * GIB
        modes.append((plan.verdict.value, plan.choice.sync_mode))
    asked_for = make_plan(SLOW, *asked, "hardware.host_memory=18GiB", "placement.sync_content=delta")
    assert asked_for.verdict.value == "does not fit"
    assert "placement.sync_content=full" in [remedy.change for remedy in list_remedies(asked_for)]
    assert modes[0] == ("fits", "delta")
    assert modes[1][0] == "fits"
    assert modes[1][1] != "delta"


@pytest.mark.parametrize(
    "more",
    [
        ("placement.sync_content=full",),
        ("placement.sync_content=delta",),
        ("training.lora={rank: 16}", "placement.sync_content=adapter"),
        ("placement.placement=hybrid",),
    ],
)
def test_every_sync_that_is_compared_takes_a_whole_update_more(more: tuple[str, ...]) -> None:
    """The layout is fixed by what is asked, so that the two plans differ in nothing else.

    A comparison after the first sync alone is in no steady step, which is what a plan's seconds are of.
    """
    first = make_plan(FASTER, *more)
    every = make_plan(FASTER, *more, "placement.sync_verification=every")
    if "placement.sync_content=delta" not in more:
        assert every.choice == first.choice
        assert sync_s(every) > 2 * sync_s(first)
    assert every.costs["sync_weights"].seconds > sync_s(first)
    assert every.seconds > first.seconds
    assert first.not_counted == every.not_counted == ()


def test_stacks_that_do_not_compare_engines_are_neither_charged_nor_asked() -> None:
    job = make_job("8xh100", backend="fsdp2")
    assert find_best_plan(job, with_others=False).not_counted == ()
    with pytest.raises(SpecError, match="sync_verification is every, which verl does not support") as caught:
        find_best_plan(make_job("8xh100", "placement.sync_verification=every", backend="fsdp2"), with_others=False)
    change = caught.value.way_out.split(",")[0]
    assert find_best_plan(make_job("8xh100", change, backend="fsdp2"), with_others=False).not_counted == ()
