"""Search: the first candidate that fits; and when none does, an answer whose way out really works."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import NoFeasiblePlanError, SpecError
from rlplan.planner.margins import SAME_SPEED
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.search import find_best_plan, find_plan
from rlplan.spec.files.job_file import load_job
from rlplan.units import MIB, format_bytes
from rlplan.vocabulary import Phase, Placement
from tests.factories import EXAMPLES, QUICKSTART, make_job, make_plan, write_job

MEMORY_BOUND = EXAMPLES / "memory-bound.yaml"


@cache
def nothing_fits(path: Path, *overrides: str) -> NoFeasiblePlanError:
    with pytest.raises(NoFeasiblePlanError) as caught:
        find_plan(load_job(path, overrides))
    assert caught.value.exit_code == 1
    return caught.value


@pytest.mark.parametrize("path", [QUICKSTART, MEMORY_BOUND], ids=lambda path: path.stem)
def test_the_examples_fit_as_they_stand(path: Path) -> None:
    plan = find_plan(load_job(path))
    assert plan.schedule.placement is Placement.HYBRID
    assert plan.zero_stage == 2
    assert plan.ledger.host_peak().num_bytes <= plan.job.hardware.memory
    assert {considered.placement for considered in plan.considered} == {Placement.DISAGGREGATED, Placement.COLOCATED}
    assert all("instead of" in considered.reason for considered in plan.considered), "they fit too, and are slower"
    assert len(plan.runners_up) == plan.stats.num_candidates - 1
    assert [runner_up.seconds for runner_up in plan.runners_up] == sorted(
        runner_up.seconds for runner_up in plan.runners_up
    )


def test_what_the_job_asks_for_is_planned() -> None:
    plan = make_plan(placement={"placement": "disaggregated"}, training={"zero_stage": 3})
    assert plan.schedule.placement is Placement.DISAGGREGATED
    assert plan.zero_stage == 3
    assert (plan.runners_up, plan.considered) == ((), ())


def test_the_second_choice_is_taken_when_the_first_is_too_large_and_the_first_is_reported() -> None:
    hybrid = make_plan(training={"zero_stage": 2}).ledger.host_peak().num_bytes
    plan = make_plan(**{"hardware.memory": hybrid - 1, "training.zero_stage": 2})
    assert plan.schedule.placement is Placement.DISAGGREGATED
    (other,) = [
        runner_up for runner_up in plan.runners_up if runner_up.choice.arrangement.placement is Placement.HYBRID
    ]
    assert (other.verdict, other.peak_bytes, other.headroom_bytes) == (Verdict.DOES_NOT_FIT, hybrid, -1)
    (words,) = [considered.reason for considered in plan.considered if considered.placement is Placement.HYBRID]
    assert f"host needs {format_bytes(hybrid)}" in words


def test_of_stages_that_are_as_fast_the_one_that_holds_less_is_taken() -> None:
    plan = find_plan(load_job(QUICKSTART, ["placement.placement=hybrid"]))
    assert plan.zero_stage == 2
    as_fast = [runner_up for runner_up in plan.runners_up if runner_up.seconds < plan.seconds * (1 + SAME_SPEED)]
    assert {runner_up.choice.trainer.zero_stage for runner_up in as_fast} <= {0, 1, 3}
    assert as_fast


def test_a_plan_fits_to_the_last_byte_and_not_one_below() -> None:
    fixed = {"placement": {"placement": "hybrid"}, "training": {"zero_stage": 2}}
    peak = make_plan(**fixed).ledger.host_peak().num_bytes
    fitting = {**fixed, "hardware.memory": peak}
    assert make_plan(**fitting).ledger.host_capacity == peak
    with pytest.raises(NoFeasiblePlanError):
        make_plan(**fitting | {"hardware.memory": peak - 1})


def test_when_nothing_fits_both_numbers_the_moment_and_the_binding_row_are_named() -> None:
    error = nothing_fits(QUICKSTART, "hardware.memory=1GiB")
    match = re.fullmatch(
        r"sorter needs ([\d.]+ [MG]iB) of a host's memory, 1\.00 GiB available; the peak is in (\S+) "
        r"\((start|first|steady|finish); placement=(hybrid|disaggregated), zero_stage=[0-3], .*\)",
        error.what,
    )
    assert match, error.what
    assert re.fullmatch(r"largest: process of policy in rollout_engine/0, \d+ MiB", error.where)
    assert "must fit into each device and host" in error.rule


JOBS_THAT_DO_NOT_FIT: list[tuple[Path, tuple[str, ...]]] = [
    (QUICKSTART, ("hardware.memory=1GiB",)),
    (QUICKSTART, ("hardware.memory=2000MiB",)),
    (QUICKSTART, ("rollout.kv_cache_memory=7GiB",)),
    (QUICKSTART, ("hardware.num_devices=8", "hardware.memory=3500MiB")),
    (QUICKSTART, ("hardware.memory=3.5GiB", "placement.placement=hybrid", "workload.max_response_len=200")),
    (MEMORY_BOUND, ("hardware.memory=6000MiB",)),
    (MEMORY_BOUND, ("hardware.memory=5123457B", "workload.micro_batch_size_per_gpu=16")),
    (
        MEMORY_BOUND,
        ("hardware.memory=9GiB", "workload.micro_batch_size_per_gpu=16", "workload.max_response_len=400"),
    ),
]


KEYS = {"rollout.kv_cache_memory", "workload.micro_batch_size_per_gpu", "hardware.num_devices", "hardware.memory"}
AT_NIGHT = [
    pytest.param(*job, marks=pytest.mark.nightly if at % 4 else ()) for at, job in enumerate(JOBS_THAT_DO_NOT_FIT)
]


@pytest.mark.parametrize(("path", "overrides"), AT_NIGHT, ids=lambda value: str(value)[-60:])
def test_every_way_out_that_is_named_makes_the_job_fit_when_it_is_taken(path: Path, overrides: tuple[str, ...]) -> None:
    ways_out = re.findall(r"[a-z_]+\.[a-z_]+=\w+", nothing_fits(path, *overrides).way_out)
    assert any(way_out.startswith("hardware.memory=") for way_out in ways_out)
    assert {way_out.partition("=")[0] for way_out in ways_out} <= KEYS, "nothing that changes what is learned"
    for way_out in ways_out:
        plan = find_plan(load_job(path, [*overrides, way_out]))
        assert plan.ledger.host_peak().num_bytes <= plan.ledger.host_capacity


@pytest.mark.parametrize(
    ("path", "overrides", "key"),
    [
        (QUICKSTART, ("rollout.kv_cache_memory=7GiB",), "rollout.kv_cache_memory"),
        (
            QUICKSTART,
            ("hardware.memory=3.5GiB", "placement.placement=hybrid", "workload.max_response_len=200"),
            "workload.micro_batch_size_per_gpu",
        ),
        pytest.param(
            *(QUICKSTART, ("hardware.num_devices=8", "hardware.memory=3500MiB"), "hardware.num_devices"),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_the_key_that_is_too_large_is_among_the_ways_out(path: Path, overrides: tuple[str, ...], key: str) -> None:
    assert f"{key}=" in nothing_fits(path, *overrides).way_out


def test_the_memory_that_is_asked_for_is_no_more_than_a_mebibyte_too_much() -> None:
    way_out = nothing_fits(QUICKSTART, "hardware.memory=1GiB").way_out
    (memory,) = re.findall(r"hardware\.memory=(\d+)MiB", way_out)
    find_plan(load_job(QUICKSTART, [f"hardware.memory={memory}MiB"]))
    with pytest.raises(NoFeasiblePlanError):
        find_plan(load_job(QUICKSTART, [f"hardware.memory={int(memory) - 1}MiB"]))


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"placement": {"placement": "hybrid", "max_staleness": 1}}, "need separate devices for generation"),
        (
            {"workload.mini_batch_size": 4, "hardware.num_devices": 7},
            "workload.mini_batch_size 4 gives some of the 7 training device(s) no rollout",
        ),
    ],
)
def test_when_nothing_can_be_built_every_reason_is_given(overrides: dict[str, Any], reason: str) -> None:
    with pytest.raises(NoFeasiblePlanError, match="no layout can be built") as caught:
        make_plan(**overrides)
    assert reason in caught.value.rule
    assert "hardware.num_devices" in caught.value.way_out


@pytest.mark.parametrize("memory", [0, "1KiB", "64KiB", 131_071])
def test_a_cache_that_holds_no_whole_sequence_is_refused_with_a_size_that_does(tmp_path: Path, memory: object) -> None:
    # the sorter's token takes 2048 bytes, a block of 32 tokens 64 KiB; 20 tokens need one block, vLLM keeps another
    path = write_job(tmp_path, **{"rollout.kv_cache_memory": memory})
    with pytest.raises(SpecError) as caught:
        find_plan(load_job(path))
    assert "one sequence of 20 tokens needs 2" in caught.value.what
    (way_out,) = re.findall(r"rollout\.kv_cache_memory=\w+", caught.value.way_out)
    find_plan(load_job(path, [way_out]))


def test_two_blocks_are_enough_for_one_short_sequence() -> None:
    assert make_plan(**{"rollout.kv_cache_memory": 131_072}).ledger.process_peak("rollout_engine/0").num_bytes > 0


def test_each_of_two_ranks_caches_half_of_the_heads_and_needs_half_of_the_memory() -> None:
    two_ranks = {"rollout.tp": 2, "hardware.num_devices": 4, "rollout.kv_cache_memory": 65_536}
    assert make_plan(**two_ranks).job.rollout.tp == 2
    with pytest.raises(SpecError, match=r"rollout\.kv_cache_memory=1MiB or more"):
        make_plan(**two_ranks | {"rollout.kv_cache_memory": 65_535})


def test_what_does_not_fit_is_a_plan_with_that_verdict_and_remedies_that_were_tried() -> None:
    plan = find_best_plan(load_job(QUICKSTART, ["hardware.memory=2000MiB"]))
    assert plan.verdict is Verdict.DOES_NOT_FIT
    assert plan.shortage is not None
    assert plan.shortage.of == "a host's memory"
    assert plan.shortage.needed_bytes == plan.binding.num_bytes > plan.shortage.available_bytes == 2000 * MIB
    for remedy in plan.remedies:
        helped = find_plan(load_job(QUICKSTART, ["hardware.memory=2000MiB", *remedy.change.split()]))
        assert (helped.binding.num_bytes, helped.seconds) == (remedy.peak_bytes, remedy.seconds)


def test_trades_of_time_against_headroom_give_up_one_for_the_other() -> None:
    bounds = find_best_plan(load_job(QUICKSTART), with_pareto=True).pareto
    assert [layout.seconds for layout in bounds] == sorted(layout.seconds for layout in bounds)
    assert [layout.headroom_bytes for layout in bounds] == sorted(layout.headroom_bytes for layout in bounds)


def test_an_objective_that_asks_for_a_number_of_gpus_is_refused_on_a_cpu_host() -> None:
    for objective in ("gpus", "cost"):
        with pytest.raises(SpecError, match=f"objective {objective} on cpu-host"):
            find_plan(load_job(QUICKSTART, [f"objective={objective}"]))


def test_the_same_job_gives_the_same_plan_twice() -> None:
    assert find_plan(make_job()) == find_plan(make_job())


@pytest.mark.parametrize("count", [64, pytest.param(256, marks=pytest.mark.nightly)])
def test_a_schedule_of_many_mini_batches_is_planned_in_a_moment(count: int) -> None:
    plan = make_plan(workload={"num_prompts_per_step": count, "num_samples_per_prompt": 2, "mini_batch_size": 2})
    assert len(plan.schedule.step) == 7 + 2 * count


def test_the_cache_that_a_remedy_names_is_the_largest_power_of_two_part_that_fits() -> None:
    error = nothing_fits(QUICKSTART, "rollout.kv_cache_memory=7GiB")
    (size,) = re.findall(r"rollout\.kv_cache_memory=(\d+)MiB", error.way_out)
    assert 7 * 1024 % int(size) == 0
    with pytest.raises(NoFeasiblePlanError):
        find_plan(load_job(QUICKSTART, [f"rollout.kv_cache_memory={2 * int(size)}MiB"]))
    assert int(size) * MIB < 7 << 30


def test_epochs_over_a_step_s_rollouts_multiply_its_passes_and_take_no_more_memory() -> None:
    def plan_epochs(num_epochs: int) -> Plan:
        return find_plan(make_job(**{"workload.mini_batch_size": 8, "workload.num_epochs_per_step": num_epochs}))

    once, thrice = plan_epochs(1), plan_epochs(3)

    def training_s(plan: Plan) -> float:
        assert plan.timing is not None
        return sum(a.cost.seconds for a in plan.timing.step.actions if a.phase is Phase.TRAIN and "/" in a.action_id)

    assert training_s(thrice) == pytest.approx(3 * training_s(once))
    peaks = [plan.ledger.host_peak(plan.ledger.hosts[0]).num_bytes for plan in (once, thrice)]
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize(
    ("importance", "staleness", "is_told"),
    [("none", 1, True), ("auto", 1, False), ("mask", 1, False), ("none", 0, False)],
)
def test_stale_rollouts_that_nothing_corrects_are_a_note_of_the_plan(
    importance: str, staleness: int, is_told: bool
) -> None:
    where = {"placement.placement": "disaggregated", "placement.max_staleness": staleness}
    plan = make_plan(**where, **{"algorithm.importance": importance})
    notes = [note for note in plan.notes if "placement.max_staleness" in note]
    assert len(notes) == is_told
    assert all("algorithm.importance=truncate" in note for note in notes)
    assert not make_plan(**where, **{"algorithm.importance": "truncate"}).notes
