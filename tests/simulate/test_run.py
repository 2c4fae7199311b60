"""Whole runs: hand-worked steps, laws of conservation, staleness."""

import itertools
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulated.plain_schedule import plain_schedule
from rlplan.errors import SpecError
from rlplan.planner.gpu.search import GpuSearch
from rlplan.planner.plan import Plan
from rlplan.planner.setting import read_setting
from rlplan.simulate.engine import EngineLimits
from rlplan.simulate.result import SimulationResult
from rlplan.simulate.run import simulate
from rlplan.simulate.setting import Asynchrony, SimulationSetting
from rlplan.timing.cost import Cost, Resource
from rlplan.trace import Span
from rlplan.vocabulary import Phase, Placement
from tests.factories import gpu_job, make_plan
from tests.repository.at_night import examples, mark_nightly
from tests.simulate.cases import ROOMY, SPEED, SYNC_S, TRAIN_S, make_constant, make_setting, make_work, uniform

# Each of 2 engines has 4 groups of 4: prompts of 2 whole blocks once a group, 1 token each of the other three; then 49
# steps of 16 sequences that hold 32 tokens and more.
GENERATE_S = SPEED.prefill_s(4 * (32 + 3)) + sum(SPEED.decode_step_s(16, 16 * (32 + step)) for step in range(49))


# ------------------------------------------------------------------------------------------------- worked by hand


@pytest.mark.parametrize("placement", [Placement.HYBRID, Placement.DISAGGREGATED])
def test_a_synchronous_step_is_the_sum_of_its_parts(placement: Placement) -> None:
    result = simulate(make_setting(placement=placement))
    assert result.step_s == pytest.approx([GENERATE_S + TRAIN_S + SYNC_S] * 6)
    assert result.phase_s[Phase.ROLLOUT] == pytest.approx(6 * GENERATE_S)
    assert result.phase_s[Phase.TRAIN] == pytest.approx(6 * TRAIN_S)


def test_the_bubbles_of_separate_devices_are_the_time_of_the_others() -> None:
    training, generation = simulate(make_setting()).groups
    assert training.busy_s == pytest.approx(6 * (TRAIN_S + SYNC_S))
    assert training.bubble_s == pytest.approx(6 * GENERATE_S)
    assert generation.busy_s == pytest.approx(6 * (GENERATE_S + SYNC_S))


def test_gpu_hours_count_idle_devices_too() -> None:
    result = simulate(make_setting())
    assert result.gpu_hours == pytest.approx(4 * 6 * (GENERATE_S + TRAIN_S + SYNC_S) / 3600)


def test_streaming_trains_what_is_there_while_the_rest_is_generated() -> None:
    # One engine, one prompt at a time: 8 prompts one after the other, trained in 4 parts of 2 prompts, half a second.
    work = make_work(num_engines=1)
    asynchrony = Asynchrony(0, num_takes=4, max_groups_at_once=1)
    result = simulate(make_setting(work, asynchrony, num_steps=2))
    generation_s = SPEED.prefill_s(32 + 3) + sum(SPEED.decode_step_s(4, 4 * (32 + step)) for step in range(49))
    assert generation_s > TRAIN_S / 8
    assert result.step_s == pytest.approx([8 * generation_s + TRAIN_S / 4 + SYNC_S] * 2)
    assert set(result.token_staleness) == {0}


def test_rewards_overlap_with_generation_and_the_last_is_waited_for() -> None:
    assert simulate(make_setting(reward_latency_s=3.0)).step_s == pytest.approx(
        [GENERATE_S + 3.0 + TRAIN_S + SYNC_S] * 6
    )


def test_a_job_on_a_cpu_is_simulated_by_its_graph() -> None:
    schedule = make_plan().schedule
    costs = {action.id: Cost({Resource.HOST: 1.0}) for action in schedule.step}
    result = simulate(SimulationSetting(schedule, costs, num_steps=2))
    ends: dict[str, float] = {}
    for action in schedule.step:
        if action.runs_in_step(2):
            ends[action.id] = 1.0 + max((ends[name] for name in action.after if name in ends), default=0.0)
    assert result.step_s[1] >= max(ends.values())
    assert {span.action_id for span in result.trace.spans if span.step == 2} == set(ends)


# ------------------------------------------------------------------------------------------- laws of conservation

MODES = [
    None,
    Asynchrony(1, is_bound=True),
    Asynchrony(0, num_takes=4),
    Asynchrony(0.5, interrupts=True, num_takes=2),
    Asynchrony(3, interrupts=True, num_takes=4, max_groups_at_once=6),
]
TIGHT = EngineLimits(max_num_seqs=8, num_blocks=40)


def overlapping(result: SimulationResult) -> list[tuple[Span, Span]]:
    by_device = defaultdict(list)
    for span in result.trace.spans:
        if span.end_s > span.start_s:
            by_device[span.device].append(span)
    pairs = []
    for spans in by_device.values():
        spans.sort(key=lambda span: (span.start_s, span.end_s))
        for earlier, other in itertools.pairwise(spans):
            if other.start_s < earlier.end_s - 1e-9 and earlier.action_id != other.action_id:
                pairs.append((earlier, other))
    return pairs


@pytest.mark.parametrize("limits", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("asynchrony", MODES, ids=str)
@examples(12)
@given(seed=st.integers(0, 1000), longest=st.integers(2, 300), train_s=st.floats(0.01, 5), latency=st.floats(0, 2))
def test_every_token_is_trained_once_and_no_device_does_two_things_at_a_time(
    asynchrony: Asynchrony | None, limits: EngineLimits, seed: int, longest: int, train_s: float, latency: float
) -> None:
    work = make_work(lengths=uniform(1, longest), limits=limits)
    setting = make_setting(work, asynchrony, train_s=train_s, reward_latency_s=latency)
    result = simulate(setting, seed)
    num_rollouts = 6 * work.num_prompts * work.num_samples
    assert sum(result.rollout_staleness.values()) == num_rollouts
    assert sum(result.token_staleness.values()) == result.num_tokens == result.num_trained_tokens
    assert num_rollouts <= result.num_tokens <= num_rollouts * longest
    assert overlapping(result) == []
    assert sum(result.step_s) == pytest.approx(result.seconds)
    assert 0 < result.kv_use <= 1
    assert all(-1e-9 <= group.bubble_s <= result.seconds for group in result.groups)


@pytest.mark.parametrize("asynchrony", MODES, ids=str)
def test_the_same_seed_gives_the_same_run_and_another_one_does_not(asynchrony: Asynchrony | None) -> None:
    setting = make_setting(make_work(lengths=uniform(1, 300)), asynchrony)
    assert simulate(setting, 5) == simulate(setting, 5)
    assert simulate(setting, 5).step_s != simulate(setting, 6).step_s


def small_budget(placement: str) -> Plan:
    plan = gpu_job(
        {
            "policy": "Qwen/Qwen2.5-0.5B",
            "hardware": "4xH100",
            "placement": {"placement": placement},
            "algorithm": "grpo",
        }
    )
    return GpuSearch(plan, read_setting(plan)).run(with_others=False)


@pytest.mark.parametrize("placement", ["colocated", "hybrid", "disaggregated"])
def test_memory_is_never_above_the_peak_of_the_ledger_and_reaches_it(placement: str) -> None:
    plan = small_budget(placement)
    ledger = plan.ledger
    device = max(ledger.devices, key=lambda name: ledger.device_peak(name).num_bytes)
    peak = ledger.device_peak(device)
    work = make_work(num_engines=1, limits=ROOMY)
    result = simulate(SimulationSetting(plan.schedule, {}, work, SPEED, 2, ledger=ledger))
    on_device = {(row.process, row.action_id, row.kind.value) for row in ledger.rows if row.space == "device"}
    num_bytes: dict[str, int] = {}
    largest = 0
    for _, samples in itertools.groupby(result.trace.samples, key=lambda sample: (sample.step, sample.action_id)):
        sizes: dict[str, dict[str, int]] = {"peak": defaultdict(int), "resident": defaultdict(int)}
        for sample in samples:
            if sample.device == device and (sample.process, sample.action_id, sample.kind) in on_device:
                sizes[sample.statistic][sample.process] += sample.num_bytes
        largest = max(largest, sum({**num_bytes, **sizes["peak"]}.values()))
        num_bytes.update(sizes["resident"])
    assert peak.run_phase in ("first", "steady")
    assert largest == peak.num_bytes


# ------------------------------------------------------------------------------------------------------ staleness


@pytest.mark.parametrize("num_at_once", mark_nightly([16, 24, 40], but=1))
def test_the_mean_lag_is_what_is_in_flight_over_the_batch_as_sample_factory_says(num_at_once: int) -> None:
    # Generation is the slower side and never stops, so that the queue holds half a take (of one prompt) in the mean.
    work = make_work(lengths=uniform(50, 150), limits=EngineLimits(512, 100_000))
    asynchrony = Asynchrony(1000, interrupts=True, num_takes=4, max_groups_at_once=num_at_once)
    result = simulate(make_setting(work, asynchrony, train_s=0.01, num_steps=300), 1)
    begun = sum(age * count for age, count in result.rollout_staleness.items()) / sum(result.rollout_staleness.values())
    assert begun == pytest.approx(num_at_once / work.num_prompts, rel=0.1)


@pytest.mark.parametrize("max_staleness", [0, 0.5, 1, 2.5])
def test_streams_that_drain_are_never_older_than_allowed(max_staleness: float) -> None:
    asynchrony = Asynchrony(max_staleness, num_takes=4)
    result = simulate(make_setting(make_work(lengths=uniform(1, 300)), asynchrony, train_s=4.0, num_steps=12))
    assert max(result.rollout_staleness) <= -(-max_staleness // 1)


def test_more_staleness_is_never_slower() -> None:
    work = make_work(lengths=uniform(1, 600))
    seconds = [
        simulate(make_setting(work, Asynchrony(allowed, True, 4), train_s=4.0, num_steps=20)).seconds
        for allowed in (0, 0.25, 0.5, 1, 2)
    ]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < 0.9 * seconds[0]


def test_an_interrupted_rollout_has_tokens_of_several_versions() -> None:
    work = make_work(lengths=make_constant(400), num_prompts=8)
    result = simulate(make_setting(work, Asynchrony(1, True, 4, 3), train_s=0.1, num_steps=10))
    assert len(result.token_staleness) > 1
    assert max(result.rollout_staleness) >= max(result.token_staleness)


def test_a_rollout_that_keeps_its_version_has_tokens_of_one_and_loses_no_cache() -> None:
    work = make_work(lengths=make_constant(400), num_prompts=8)
    interrupted = Asynchrony(1, True, 4, 3)
    setting = make_setting(work, interrupted, train_s=0.1, num_steps=10)
    kept = make_setting(work, replace(interrupted, keeps_versions=True), train_s=0.1, num_steps=10)
    result, other = simulate(kept), simulate(setting)
    assert {age: 400 * count for age, count in result.rollout_staleness.items()} == result.token_staleness
    assert result.num_preemptions == 0
    assert result.num_prefill_tokens < other.num_prefill_tokens, "nothing is computed anew"


def test_the_engines_are_those_of_the_schedule() -> None:
    schedule = plain_schedule(Placement.DISAGGREGATED, 8, 24, tp=4)
    assert schedule.find_layout("rollout_engine").dp == 6


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"asynchrony": Asynchrony(1), "placement": Placement.HYBRID}, "shares devices"),
        ({"asynchrony": Asynchrony(1, True, 3)}, "3 does not divide 4 mini-batches"),
        ({"asynchrony": Asynchrony(1, True, 4), "work": make_work(num_prompts=6)}, "4 does not divide 6 prompts"),
        ({"num_steps": 0}, "num_steps = 0"),
        ({"work": make_work(limits=EngineLimits(8, 5))}, "82 tokens and needs 6 blocks"),
        ({"work": make_work(num_engines=0)}, "0 engines"),
        ({"speed": None}, "without a speed"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_the_rule(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        replace_setting(changes)


def replace_setting(changes: dict[str, Any]) -> None:
    fields = {key: value for key, value in changes.items() if key in ("speed",)}
    setting = make_setting(**{key: value for key, value in changes.items() if key not in fields})
    replace(setting, **fields)
