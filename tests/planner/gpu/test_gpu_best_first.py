"""Properties that the proof of the exact search relies on. The search's work hardly grows with the cluster."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as some

from rlplan.dataflow.choice import Choice
from rlplan.planner.gpu.candidates import MicroBatchSweep
from rlplan.planner.gpu.scored_candidates import rank_simplicity
from rlplan.planner.gpu.search import GpuSearch, list_gpu_counts
from rlplan.planner.margins import SAME_SPEED
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.search import find_best_plan
from rlplan.planner.setting import read_setting
from rlplan.spec.resolved import SettledJob
from rlplan.vocabulary import Placement
from tests.factories import gpu_job
from tests.repository.at_night import examples, mark_nightly

OPEN = (*(f"training.{axis}=auto" for axis in ("ulysses", "tp", "pp", "cp", "ep")), "rollout.max_num_seqs=auto")
CASES = (
    ("Qwen/Qwen2.5-7B", "8xH100", "grpo", ()),
    ("Qwen/Qwen2.5-7B", "8xL40S", "ppo", ("workload.response_lengths={kind: lognormal, median: 900, sigma: 0.9}",)),
    ("Qwen/Qwen3-30B-A3B", "16xH200", "grpo", ("training.backend=megatron",)),
    ("meta-llama/Llama-3.1-8B", "16xA100", "grpo", ("training.backend=fsdp2", "workload.mini_batch_size=256")),
    ("meta-llama/Llama-3.2-1B", "4xRTX4090", "grpo", ("training.lora={rank: 16}", "training.offload_device=nvme")),
    ("Qwen/Qwen2.5-1.5B", "1xgb10", "ppo", ("training.offloads_parameters=auto",)),
)


KEPT = ("training.offloads_optimizer=false",)


def budget(model: str, gpus: str, algorithm: str = "grpo", *overrides: str) -> SettledJob:
    return gpu_job({"policy": model, "hardware": gpus, "algorithm": algorithm}, overrides)


@cache
def make_search(index: int) -> GpuSearch:
    model, gpus, algorithm, overrides = CASES[index]
    spec = budget(model, gpus, algorithm, *OPEN, *overrides)
    return GpuSearch(spec, read_setting(spec))


@examples(150)
@given(some.integers(0, len(CASES) - 1), some.randoms(use_true_random=False))
def test_more_kv_cache_is_never_slower(index: int, random) -> None:  # type: ignore[no-untyped-def]
    search = make_search(index)
    arrangement = random.choice(search.space.arrangements)
    engine = random.choice(search.space.list_engines(arrangement))
    demand, enough, least = search.roles.predict_demand(arrangement, engine)
    sizes = sorted(random.randint(least, max(least, 2 * enough)) for _ in range(3))
    blocks = [size // demand.pool.bytes_per_block * demand.pool.bytes_per_block for size in sizes]
    seconds = [search.times.predict_engine_seconds(arrangement, engine, size) for size in blocks]
    assert all(more <= less * (1 + 1e-12) for less, more in pairwise(seconds))


@examples(400)
@given(some.integers(0, len(CASES) - 1), some.randoms(use_true_random=False))
def test_what_saves_memory_is_never_faster_on_the_same_passes(index: int, random) -> None:  # type: ignore[no-untyped-def]
    search = make_search(index)
    arrangement, sweep = _sweep(search, random)
    choice = random.choice(sweep.choices)
    leaner = [
        replace(choice, **{name: True})
        for name in ("gradient_checkpointing", "offloads_optimizer", "offloads_parameters")
        if not getattr(choice, name)
    ]
    known = {choice for other in search.space.list_sweeps(arrangement) for choice in other.choices}
    for other in leaner:
        if other in known:
            assert search.times.predict_pass_seconds(arrangement, other) >= search.times.predict_pass_seconds(
                arrangement, choice
            )


@examples(100)
@given(some.integers(0, len(CASES) - 1), some.randoms(use_true_random=False))
def test_smaller_passes_need_no_more_bytes_at_any_moment(index: int, random) -> None:  # type: ignore[no-untyped-def]
    search = make_search(index)
    arrangement, sweep = _sweep(search, random)
    share = (
        search.job.workload.rollouts_per_mini_batch * sweep.choices[0].ranks_per_sequence // arrangement.num_training
    )
    sizes = [choice for choice in sweep.choices if choice.micro_batch < share]  # one pass alone accumulates nothing
    needs = [search.roles.sum_trainer_bytes(arrangement, choice) for choice in sizes]
    for larger, smaller in pairwise(needs):
        assert all(a >= b for a, b in zip(larger.expected, smaller.expected, strict=True))
        assert all(a >= b for a, b in zip(larger.high, smaller.high, strict=True))
        assert all(a >= b for a, b in zip(larger.hosts, smaller.hosts, strict=True))


@examples(60)
@given(some.integers(0, len(CASES) - 1), some.randoms(use_true_random=False))
def test_what_fits_is_found_by_bisection(index: int, random) -> None:  # type: ignore[no-untyped-def]
    search = make_search(index)
    arrangement, sweep = _sweep(search, random)
    bounds = search.get_bounds(arrangement, 0)
    if not bounds.engines.entries:
        return
    trainer_bytes = (search.roles.sum_trainer_bytes(arrangement, choice) for choice in sweep.choices)
    left = [search.scorer.compute_slacks(arrangement, (sizes, bounds.engines.floor), 0) for sizes in trainer_bytes]
    fits = tuple(choice for choice, room in zip(sweep.choices, left, strict=True) if min(room) >= 0)
    assert bounds.trainers.keep_fitting(sweep) == fits


@examples(100)
@given(some.integers(0, len(CASES) - 1), some.randoms(use_true_random=False))
def test_states_alone_are_at_most_what_any_choice_holds(index: int, random) -> None:  # type: ignore[no-untyped-def]
    search = make_search(index)
    arrangement, sweep = _sweep(search, random)
    choice = random.choice(sweep.choices)
    least, whole = (
        search.roles.sum_state_bytes(arrangement, choice),
        search.roles.sum_trainer_bytes(arrangement, choice),
    )
    assert all(a <= b for a, b in zip(least.expected, whole.expected, strict=True))
    assert all(a <= b for a, b in zip(least.high, whole.high, strict=True))
    assert all(a <= b for a, b in zip(least.hosts, whole.hosts, strict=True))


@examples(100)
@given(some.integers(0, len(CASES) - 1), some.randoms(use_true_random=False))
def test_no_trainer_is_faster_than_its_matmuls_at_their_best_rate(index: int, random) -> None:  # type: ignore[no-untyped-def]
    search = make_search(index)
    arrangement, sweep = _sweep(search, random)
    choice = random.choice(sweep.choices)
    assert search.times.bound_seconds(arrangement) <= search.times.predict_trainer_seconds(arrangement, choice)
    assert search.floor_seconds <= search.times.bound_seconds(arrangement), "groups are those of all layouts"


def test_frozen_roles_score_whole_sequences_however_many_ranks_share_one_in_training() -> None:
    search = make_search(0)
    arrangement = next(
        arrangement
        for arrangement in search.space.arrangements
        if arrangement.num_scoring == 1 and arrangement.num_training == 4
    )
    sweeps = [sweep.choices for sweep in search.space.list_sweeps(arrangement) if sweep.choices[0].tp == 1]
    alone, shared = (next(sweep for sweep in sweeps if sweep[0].ulysses == ulysses) for ulysses in (1, 2))
    size = min(alone[0].micro_batch, shared[0].micro_batch)
    choices = [replace(sweep[0], micro_batch=size, max_tokens=0) for sweep in (alone, shared)]
    engine = search.space.list_engines(arrangement)[0]
    chosen = [Choice(arrangement, choice, engine, "nccl") for choice in choices]
    actions = [search.times.time_step(choice, 1 << 30).actions for choice in chosen]
    first, second = (next(a.cost for a in of if a.action_id == "score/reference") for of in actions)
    assert first.seconds == second.seconds > 0


def test_a_fixed_number_of_gpus_that_score_is_the_only_one_tried() -> None:
    spec = budget("Qwen/Qwen2.5-7B", "8xH100", "grpo", "placement.num_scoring_devices=3")
    arrangements = GpuSearch(spec, read_setting(spec)).space.arrangements
    assert {(arrangement.placement, arrangement.num_scoring) for arrangement in arrangements} == {
        (Placement.DISAGGREGATED, 3)
    }
    assert {arrangement.num_training + arrangement.num_generation for arrangement in arrangements} == {5}
    half = budget(
        "Qwen/Qwen2.5-7B", "8xH100", "grpo", "placement.num_scoring_devices=2", "placement.num_generation_devices=2"
    )
    arrangements = GpuSearch(half, read_setting(half)).space.arrangements
    assert {
        (arrangement.num_training, arrangement.num_generation, arrangement.num_scoring) for arrangement in arrangements
    } == {(4, 2, 2)}


def _sweep(search: GpuSearch, random) -> tuple:  # type: ignore[no-untyped-def, type-arg]
    arrangement = random.choice(search.space.arrangements)
    sweep: MicroBatchSweep = random.choice(search.space.list_sweeps(arrangement))
    return arrangement, sweep


@pytest.mark.parametrize("index", mark_nightly(range(3), but=1))
def test_candidates_come_in_order_and_each_once(index: int) -> None:
    stream = iter(make_search(index).open_stream(0))
    first = [next(stream) for _ in range(40)]
    assert all(better.order <= other.order for better, other in pairwise(first))
    assert len({scored.choice for scored in first}) == 40


def test_the_answer_is_the_same_every_time() -> None:
    spec = budget("Qwen/Qwen2.5-7B", "8xH100", "grpo", *OPEN)
    first, other = find_best_plan(spec), find_best_plan(spec)
    assert first.choice == other.choice
    assert [a.choice for a in first.runners_up] == [a.choice for a in other.runners_up]


def test_order_of_equals_is_total() -> None:
    search = make_search(0)
    candidates = [candidate for _, candidate in zip(range(5000), search.space, strict=False)]
    assert len({rank_simplicity(candidate) for candidate in candidates}) == len(candidates)


@pytest.mark.parametrize("backend", mark_nightly(["deepspeed", "megatron"], but=1))
def test_work_hardly_grows_with_the_cluster(backend: str) -> None:
    def count_scored(gpus: str, prompts: int) -> int:
        size = f"workload.num_prompts_per_step={prompts}"
        spec = budget("Qwen/Qwen2.5-7B", gpus, "grpo", size, f"training.backend={backend}")
        search = GpuSearch(spec, read_setting(spec))
        stats = search.run(with_others=False).stats
        return stats.num_scored + len(search.roles.known)

    assert count_scored("16384xH100", 16384) <= 3 * count_scored("8xH100", 128)


def test_autotp_goes_up_to_stage_two_even_where_the_job_asks_for_a_stage() -> None:
    spec = budget("Qwen/Qwen2.5-7B", "8xH100", "grpo", *OPEN, "training.zero_stage=3")
    space = GpuSearch(spec, read_setting(spec)).space
    assert {
        choice.tp
        for arrangement in space.arrangements
        for sweep in space.list_sweeps(arrangement)
        for choice in sweep.choices
    } == {1}


def test_a_group_is_its_size_however_many_gpus_it_has() -> None:
    spec = budget("Qwen/Qwen2.5-7B", "16384xH100", "grpo", "workload.num_prompts_per_step=16384")
    arrangements = GpuSearch(spec, read_setting(spec)).space.arrangements
    assert len(arrangements) < 200


# ---------------------------------------------------------------------------------------------------- objectives


def test_the_fewest_gpus_are_the_fewest_on_which_it_fits() -> None:
    spec = budget("Qwen/Qwen2.5-7B", "8xH100", "grpo", "objective=gpus", *KEPT)
    answer = find_best_plan(spec)
    assert answer.verdict is Verdict.FITS
    assert answer.choice.arrangement.num_devices == answer.num_devices
    for count in (count for count in list_gpu_counts(read_setting(spec)) if count < answer.num_devices):
        fewer = find_best_plan(budget("Qwen/Qwen2.5-7B", f"{count}xH100", "grpo", *KEPT))
        assert fewer.verdict is not Verdict.FITS


def test_the_cheapest_number_of_gpus_costs_no_more_than_any_other() -> None:
    spec = budget("Qwen/Qwen2.5-7B", "8xH100", "grpo", "objective=cost", "hardware.price_per_gpu_hour=2", *KEPT)
    answer = find_best_plan(spec)
    assert answer.dollars_per_million_tokens == pytest.approx(2 * answer.gpu_hours_per_million_tokens)
    for count in list_gpu_counts(read_setting(spec)):
        other = find_best_plan(budget("Qwen/Qwen2.5-7B", f"{count}xH100", "grpo", *KEPT))
        if other.verdict is Verdict.FITS:
            assert answer.gpu_hours_per_million_tokens <= other.gpu_hours_per_million_tokens * (1 + 1e-9)


def test_tokens_per_second_and_seconds_of_a_step_are_one_order() -> None:
    spec = budget("Qwen/Qwen2.5-7B", "8xH100")
    fastest = find_best_plan(spec.model_copy(update={"objective": "tokens_per_s"}))
    assert fastest.choice == find_best_plan(spec).choice
    assert fastest.tokens_per_s == pytest.approx(1024 * 4096 / fastest.seconds)


def test_numbers_of_gpus_are_powers_divisors_and_whole_hosts() -> None:
    setting = read_setting(budget("Qwen/Qwen2.5-7B", "48xH100"))
    assert list_gpu_counts(setting) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48)


def test_on_the_front_more_headroom_costs_time() -> None:
    plan = find_best_plan(budget("Qwen/Qwen2.5-7B", "8xH100"), with_pareto=True)
    front = plan.pareto
    assert len(front) > 1
    for faster, other in pairwise(front):
        assert other.timing.seconds > faster.timing.seconds
        assert other.headroom_bytes > faster.headroom_bytes
    assert front[0].seconds <= plan.seconds <= front[0].seconds * (1 + SAME_SPEED)


def test_a_candidate_counts_the_gpus_of_its_groups() -> None:
    search = make_search(0)
    assert {candidate.arrangement.num_devices for _, candidate in zip(range(20_000), search.space, strict=False)} == {8}
    assert isinstance(next(iter(search.space)), Choice)


def test_states_that_are_saved_beside_passes_leave_bounds_below_what_they_bound() -> None:
    """A value model's states are saved while the policy's passes run, so that a step is shorter than its actions."""
    spec = budget("Qwen/Qwen2.5-1.5B", "2xH100", "ppo", "checkpoints.every=1", "placement.placement=hybrid")
    search = GpuSearch(spec, read_setting(spec))
    best = next(iter(search.open_stream(0)))
    assert best.timing.seconds < sum(action.cost.seconds for action in best.timing.actions)
    limited = search.open_stream(0)
    limited.limit = best.timing.seconds * (1 + 1e-6)  # keys are rounded
    assert next(iter(limited)).choice == best.choice
