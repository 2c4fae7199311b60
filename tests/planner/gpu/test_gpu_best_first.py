"""What the proof of the exact search rests on, and that its work hardly grows with the cluster."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from rlplan.planner.budget import Verdict, read_setting
from rlplan.planner.gpu.candidates import Chain, GpuCandidate
from rlplan.planner.gpu.counts import gpu_counts
from rlplan.planner.gpu.rated import simplicity
from rlplan.planner.gpu.remedies import find_budget
from rlplan.planner.gpu.search import GpuSearch
from rlplan.spec.budget import BudgetSpec, make_budget

OPEN = (*(f"training.{axis}=auto" for axis in ("ulysses", "tp", "pp", "cp", "ep")), "rollout.max_num_seqs=auto")
CASES = (
    ("Qwen/Qwen2.5-7B", "8xH100", "grpo", ()),
    ("Qwen/Qwen2.5-7B", "8xL40S", "ppo", ("workload.response_lengths={kind: lognormal, median: 900, sigma: 0.9}",)),
    ("Qwen/Qwen3-30B-A3B", "16xH200", "grpo", ("target=megatron",)),
    ("meta-llama/Llama-3.1-8B", "16xA100", "grpo", ("target=fsdp2", "workload.mini_batch_size=256")),
    ("meta-llama/Llama-3.2-1B", "4xRTX4090", "grpo", ("training.lora={rank: 16}", "training.offload_device=nvme")),
    ("Qwen/Qwen2.5-1.5B", "1xgb10", "ppo", ("training.offloads_parameters=auto",)),
)


def budget(model: str, gpus: str, algorithm: str = "grpo", *overrides: str) -> BudgetSpec:
    return make_budget({"model": model, "gpus": gpus, "algorithm": algorithm}, overrides)


@cache
def search_of(index: int) -> GpuSearch:
    model, gpus, algorithm, overrides = CASES[index]
    spec = budget(model, gpus, algorithm, *OPEN, *overrides)
    return GpuSearch(spec, read_setting(spec))


@settings(max_examples=150, deadline=None)
@given(some.integers(0, len(CASES) - 1), some.randoms(use_true_random=False))
def test_more_kv_cache_is_never_slower(index: int, random) -> None:  # type: ignore[no-untyped-def]
    search = search_of(index)
    frame = random.choice(search.space.frames)
    engine = random.choice(search.space.engines(frame))
    demand, enough, least = search.roles.demand(frame, engine)
    sizes = sorted(random.randint(least, max(least, 2 * enough)) for _ in range(3))
    blocks = [size // demand.pool.bytes_per_block * demand.pool.bytes_per_block for size in sizes]
    seconds = [search.times.engine_seconds(frame, engine, size) for size in blocks]
    assert all(more <= less * (1 + 1e-12) for less, more in pairwise(seconds))


@settings(max_examples=400, deadline=None)
@given(some.integers(0, len(CASES) - 1), some.randoms(use_true_random=False))
def test_what_saves_memory_is_never_faster_on_the_same_passes(index: int, random) -> None:  # type: ignore[no-untyped-def]
    search = search_of(index)
    frame, chain = _chain(search, random)
    choice = random.choice(chain.choices)
    leaner = [
        replace(choice, **{name: True})
        for name in ("recomputes", "offloads_optimizer", "offloads_parameters")
        if not getattr(choice, name)
    ]
    known = {one for other in search.space.chains(frame) for one in other.choices}
    for other in leaner:
        if other in known:
            assert search.times.pass_seconds(frame, other) >= search.times.pass_seconds(frame, choice)


@settings(max_examples=100, deadline=None)
@given(some.integers(0, len(CASES) - 1), some.randoms(use_true_random=False))
def test_smaller_passes_need_no_more_bytes_at_any_moment(index: int, random) -> None:  # type: ignore[no-untyped-def]
    search = search_of(index)
    frame, chain = _chain(search, random)
    share = search.budget.workload.rollouts_per_mini_batch * chain.choices[0].ranks_per_sequence // frame.num_training
    sizes = [choice for choice in chain.choices if choice.micro_batch < share]  # one pass alone accumulates nothing
    vectors = [search.roles.trainer_vector(frame, choice) for choice in sizes]
    for larger, smaller in pairwise(vectors):
        assert all(a >= b for a, b in zip(larger.expected, smaller.expected, strict=True))
        assert all(a >= b for a, b in zip(larger.high, smaller.high, strict=True))
        assert all(a >= b for a, b in zip(larger.hosts, smaller.hosts, strict=True))


@settings(max_examples=100, deadline=None)
@given(some.integers(0, len(CASES) - 1), some.randoms(use_true_random=False))
def test_states_alone_are_at_most_what_any_choice_holds(index: int, random) -> None:  # type: ignore[no-untyped-def]
    search = search_of(index)
    frame, chain = _chain(search, random)
    choice = random.choice(chain.choices)
    least, whole = search.roles.holding_vector(frame, choice), search.roles.trainer_vector(frame, choice)
    assert all(a <= b for a, b in zip(least.expected, whole.expected, strict=True))
    assert all(a <= b for a, b in zip(least.high, whole.high, strict=True))
    assert all(a <= b for a, b in zip(least.hosts, whole.hosts, strict=True))


@settings(max_examples=100, deadline=None)
@given(some.integers(0, len(CASES) - 1), some.randoms(use_true_random=False))
def test_no_trainer_is_faster_than_its_products_at_their_best_rate(index: int, random) -> None:  # type: ignore[no-untyped-def]
    search = search_of(index)
    frame, chain = _chain(search, random)
    choice = random.choice(chain.choices)
    assert search.times.floor_seconds(frame) <= search.times.trainer_seconds(frame, choice)


def _chain(search: GpuSearch, random) -> tuple:  # type: ignore[no-untyped-def, type-arg]
    frame = random.choice(search.space.frames)
    chain: Chain = random.choice(search.space.chains(frame))
    return frame, chain


@pytest.mark.parametrize("index", range(3))
def test_candidates_come_in_order_and_each_once(index: int) -> None:
    stream = iter(search_of(index).stream(0))
    first = [next(stream) for _ in range(40)]
    assert all(one.order <= other.order for one, other in pairwise(first))
    assert len({one.candidate for one in first}) == 40


def test_the_answer_is_the_same_every_time() -> None:
    spec = budget("Qwen/Qwen2.5-7B", "8xH100", "grpo", *OPEN)
    one, other = find_budget(spec), find_budget(spec)
    assert one.candidate == other.candidate
    assert [a.candidate for a in one.runners_up] == [a.candidate for a in other.runners_up]


def test_order_of_equals_is_total() -> None:
    search = search_of(0)
    candidates = [candidate for _, candidate in zip(range(5000), search.space, strict=False)]
    assert len({simplicity(candidate) for candidate in candidates}) == len(candidates)


@pytest.mark.parametrize("target", ["rlplan", "megatron"])
def test_work_hardly_grows_with_the_cluster(target: str) -> None:
    def rated(gpus: str, prompts: int) -> int:
        spec = budget("Qwen/Qwen2.5-7B", gpus, "grpo", f"workload.num_prompts_per_step={prompts}", f"target={target}")
        search = GpuSearch(spec, read_setting(spec))
        stats = search.run(with_others=False).stats
        return stats.num_rated + len(search.roles._vectors)

    assert rated("16384xH100", 16384) <= 3 * rated("8xH100", 128)


def test_autotp_goes_up_to_stage_two_even_where_a_stage_is_asked_for() -> None:
    spec = budget("Qwen/Qwen2.5-7B", "8xH100", "grpo", *OPEN, "training.zero_stage=3")
    space = GpuSearch(spec, read_setting(spec)).space
    assert {choice.tp for frame in space.frames for chain in space.chains(frame) for choice in chain.choices} == {1}


def test_a_group_is_its_size_however_many_gpus_it_has() -> None:
    spec = budget("Qwen/Qwen2.5-7B", "16384xH100", "grpo", "workload.num_prompts_per_step=16384")
    frames = GpuSearch(spec, read_setting(spec)).space.frames
    assert len(frames) < 200


# ---------------------------------------------------------------------------------------------------- objectives


def test_the_fewest_gpus_are_the_fewest_on_which_it_fits() -> None:
    spec = budget("Qwen/Qwen2.5-7B", "8xH100", "grpo", "objective=gpus", "training.offloads_optimizer=false")
    answer = find_budget(spec)
    assert answer.verdict is Verdict.FITS
    assert answer.candidate.num_gpus == answer.setting.num_gpus
    for count in (count for count in gpu_counts(read_setting(spec)) if count < answer.setting.num_gpus):
        fewer = find_budget(spec.model_copy(update={"gpus": f"{count}xH100", "objective": "step_time"}))
        assert fewer.verdict is not Verdict.FITS


def test_the_cheapest_number_of_gpus_costs_no_more_than_any_other() -> None:
    spec = budget("Qwen/Qwen2.5-7B", "8xH100", "grpo", "objective=cost", "price_per_gpu_hour=2")
    answer = find_budget(spec)
    assert answer.dollars_per_million_tokens == pytest.approx(2 * answer.gpu_hours_per_million_tokens)
    for count in gpu_counts(read_setting(spec)):
        other = find_budget(spec.model_copy(update={"gpus": f"{count}xH100", "objective": "step_time"}))
        if other.verdict is Verdict.FITS:
            assert answer.gpu_hours_per_million_tokens <= other.gpu_hours_per_million_tokens * (1 + 1e-9)


def test_tokens_per_second_and_seconds_of_a_step_are_one_order() -> None:
    spec = budget("Qwen/Qwen2.5-7B", "8xH100")
    fastest = find_budget(spec.model_copy(update={"objective": "tokens_per_s"}))
    assert fastest.candidate == find_budget(spec).candidate
    assert fastest.tokens_per_s == pytest.approx(1024 * 4096 / fastest.timing.seconds)


def test_numbers_of_gpus_are_powers_divisors_and_whole_hosts() -> None:
    setting = read_setting(budget("Qwen/Qwen2.5-7B", "48xH100"))
    assert gpu_counts(setting) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48)


def test_on_the_front_more_headroom_costs_time() -> None:
    front = find_budget(budget("Qwen/Qwen2.5-7B", "8xH100"), with_pareto=True).pareto
    assert len(front) > 1
    for one, other in pairwise(front):
        assert other.timing.seconds > one.timing.seconds
        assert other.headroom_bytes > one.headroom_bytes
    assert front[0].candidate == find_budget(budget("Qwen/Qwen2.5-7B", "8xH100")).candidate


def test_remedies_are_ranked_by_what_a_step_costs_then() -> None:
    spec = budget("meta-llama/Llama-3.1-70B", "8xH100", "grpo", "training.zero_stage=2", "price_per_gpu_hour=3")
    remedies = find_budget(spec).remedies
    assert remedies
    assert [one.order for one in remedies] == sorted(one.order for one in remedies)
    for one in remedies:
        assert one.dollars == pytest.approx(3 * one.num_gpus * one.seconds / 3600)


def test_a_candidate_counts_the_gpus_of_its_groups() -> None:
    search = search_of(0)
    assert {candidate.num_gpus for _, candidate in zip(range(20_000), search.space, strict=False)} == {8}
    assert isinstance(next(iter(search.space)), GpuCandidate)
