"""Generation in closed form: against a loop that goes token by token, at the edges, and which way it moves."""

import random
import time
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplan.dataflow.choice import EngineChoice
from rlplan.spec.hardware.catalogue import get_gpu, get_node
from rlplan.spec.models.catalogue import find_model
from rlplan.spec.parts.lengths import ConstantLengths, Lengths, LengthSpec, LogNormalLengths, UniformLengths
from rlplan.spec.resolved import SettledRollout
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.serving.generation import EngineRollouts, EngineSpeed, generate_cost, time_prefill
from rlplan.timing.serving.occupancy import compute_occupancy, mean_footprint
from rlplan.timing.serving.step import LAUNCH
from tests.repository.at_night import examples, mark_nightly

CONSTANT = ConstantLengths(value=150)
UNIFORM = UniformLengths(kind="uniform", low=25, high=300)
LONG_TAIL = LogNormalLengths(kind="lognormal", median=100, sigma=0.8)
MAX_LEN = 1000


@cache
def make_speed(model: str = "Qwen/Qwen2.5-7B", tp: int = 1) -> EngineSpeed:
    cluster = Cluster(get_gpu("h100-sxm", where="test"), 8, 8, get_node("dgx-h100", where="test"))
    return EngineSpeed(find_model(model), SettledRollout(), EngineChoice(tp=tp, sleep_level=0), cluster)


def rollouts(spec: LengthSpec = UNIFORM, **changes: int) -> EngineRollouts:
    fields = {"num_rollouts": 64, "prompt_len": 0, "num_samples": 8, "max_num_seqs": 64, "kv_tokens": 10**9}
    return EngineRollouts(lengths=Lengths(spec, MAX_LEN), **{**fields, **changes})  # type: ignore[arg-type]


def token_by_token(engine: EngineSpeed, job: EngineRollouts, order: list[int]) -> float:
    """Every step of an engine that keeps as many rollouts at work as it may."""
    waiting, running, seconds = list(reversed(order)), [], 0.0
    while waiting or running:
        while waiting and len(running) < int(job.concurrency):
            running.append([0, waiting.pop()])
        context = sum(job.prompt_len + age + 0.5 for age, _ in running)
        seconds += engine.decode_step_s(len(running), context)
        running = [[age + 1, length] for age, length in running if age + 1 < length]
    return seconds


@pytest.mark.parametrize("spec", [CONSTANT, UNIFORM, LONG_TAIL], ids=["constant", "uniform", "lognormal"])
@pytest.mark.parametrize(
    ("num_rollouts", "at_once"),
    mark_nightly(((48, 48), (64, 32), (60, 20), (100, 30), (160, 160)), but=((48, 48), (60, 20), (160, 160))),
)
def test_it_is_within_three_percent_of_a_loop_over_every_token(
    spec: LengthSpec, num_rollouts: int, at_once: int
) -> None:
    """The loop takes the same lengths in random orders, and their mean; prompts of length 0 cost nothing in both."""
    job = rollouts(spec, num_rollouts=num_rollouts, max_num_seqs=at_once)
    shares = [(index + 0.5) / num_rollouts for index in range(num_rollouts)]
    lengths, chance = [max(1, round(job.lengths.quantile(share))) for share in shares], random.Random(4)
    orders = 1 if spec is CONSTANT or num_rollouts == at_once else 60
    exact = [token_by_token(make_speed(), job, chance.sample(lengths, len(lengths))) for _ in range(orders)]
    assert generate_cost(make_speed(), job).seconds == pytest.approx(sum(exact) / orders, rel=0.03)


def test_equal_rollouts_run_in_waves() -> None:
    single, four = (
        generate_cost(make_speed(), rollouts(CONSTANT, num_rollouts=64 * waves)).seconds for waves in (1, 4)
    )
    assert four == pytest.approx(4 * single, rel=1e-6)


def test_prompts_are_prefilled_once_for_all_their_samples() -> None:
    alone, shared = (rollouts(CONSTANT, prompt_len=4000, num_samples=n) for n in (1, 8))
    none = rollouts(CONSTANT)
    reading = generate_cost(make_speed(), shared).seconds - generate_cost(make_speed(), none).seconds
    prefills = generate_cost(make_speed(), alone).seconds - generate_cost(make_speed(), shared).seconds
    assert prefills == pytest.approx(56 * make_speed().prefill_s(4000), rel=0.1)
    assert reading > 8 * make_speed().prefill_s(4000) * 0.9


def test_the_longest_rollout_is_waited_for() -> None:
    """Lengths of the same mean: the long tail decodes on with few at work."""
    equal = rollouts(ConstantLengths(value=round(Lengths(LONG_TAIL, MAX_LEN).mean)))
    assert generate_cost(make_speed(), rollouts(LONG_TAIL)).seconds > 2 * generate_cost(make_speed(), equal).seconds


@examples(40)
@given(st.sampled_from([CONSTANT, UNIFORM, LONG_TAIL]), st.integers(1, 600), st.integers(100, 200_000), st.data())
def test_more_cache_is_never_slower(spec: LengthSpec, num_rollouts: int, kv_tokens: int, data: st.DataObject) -> None:
    more = data.draw(st.integers(kv_tokens, 4 * kv_tokens))
    jobs = (rollouts(spec, num_rollouts=num_rollouts, prompt_len=200, kv_tokens=tokens) for tokens in (kv_tokens, more))
    less_s, more_s = (generate_cost(make_speed(), job).seconds for job in jobs)
    assert more_s <= less_s * (1 + 1e-12)


@pytest.mark.parametrize(("model", "tp"), [("Qwen/Qwen3-30B-A3B", 4), ("openai/gpt-oss-20b", 1), ("Qwen/Qwen3-32B", 8)])
def test_more_cache_is_never_slower_for_other_models(model: str, tp: int) -> None:
    jobs = [
        rollouts(LONG_TAIL, num_rollouts=512, max_num_seqs=256, kv_tokens=tokens) for tokens in range(500, 90_000, 1500)
    ]
    seconds = [generate_cost(make_speed(model, tp), job).seconds for job in jobs]
    assert seconds == sorted(seconds, reverse=True)


def shared_attention(dp: int) -> EngineSpeed:
    choice = EngineChoice(1, 0, 64 * dp, has_expert_parallel=True, attention_dp=dp)
    return replace(make_speed("Qwen/Qwen3-30B-A3B"), choice=choice)


@pytest.mark.parametrize("dp", [2, 8])
def test_more_cache_is_never_slower_where_attention_is_data_parallel(dp: int) -> None:
    engine = shared_attention(dp)
    times = [
        generate_cost(engine, replace(rollouts(num_rollouts=256, max_num_seqs=64 * dp), kv_tokens=tokens)).seconds
        for tokens in range(10_000, 400_000, 10_000)
    ]
    assert times == sorted(times, reverse=True)


def test_two_prompts_on_eight_ranks_take_as_many_steps_as_eight() -> None:
    """A step of 8192 tokens has 1024 of each rank: one of 4096 takes four on its rank, and all others wait."""
    engine = shared_attention(8)
    two, eight = (sum(time_prefill(engine, n * 4096.0, 4096.0)) for n in (2, 8))
    launched = 48 * LAUNCH
    assert 4 * launched <= two <= eight
    assert eight < 2 * two, "four times the tokens in as many steps"


def test_a_cache_for_less_than_one_rollout_still_runs_one_after_the_other() -> None:
    assert rollouts(kv_tokens=1).concurrency == 1
    assert (
        generate_cost(make_speed(), rollouts(kv_tokens=1)).seconds
        > 10 * generate_cost(make_speed(), rollouts()).seconds
    )


def test_no_rollouts_take_no_time() -> None:
    assert generate_cost(make_speed(), rollouts(num_rollouts=0)).seconds == 0


def test_occupancy_conserves_the_tokens_of_all_rollouts() -> None:
    shape = compute_occupancy(UNIFORM, MAX_LEN, 96, 96 / 24)
    tokens = sum(piece.steps * piece.busy * 24 for piece in shape.pieces)
    assert tokens == pytest.approx(96 * Lengths(UNIFORM, MAX_LEN).mean, rel=0.01)


def test_rollouts_at_work_hold_more_of_the_long_ones() -> None:
    """Running rollouts with lengths 1 to 299 and mean 150 have E[R^2] / 2 E[R] = 100 tokens on average."""
    spec = UniformLengths(kind="uniform", low=1, high=299)
    assert mean_footprint(Lengths(spec, MAX_LEN)) == pytest.approx(100, rel=0.01)


def test_a_search_can_ask_often() -> None:
    engine, jobs = make_speed(), [rollouts(LONG_TAIL, num_rollouts=1024, kv_tokens=1000 * n) for n in range(1, 201)]
    for job in jobs:
        generate_cost(engine, job)
    started = time.process_time()
    for job in jobs:
        generate_cost(engine, job)
    assert (time.process_time() - started) / len(jobs) < 500e-6  # about 40 us here
