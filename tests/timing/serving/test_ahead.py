"""Generation ahead of training in closed form: against the simulator, by hand, and which way it moves."""

from statistics import mean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplan.planner.answers.simulated_plan import simulate_plan
from rlplan.planner.search import find_plan
from rlplan.spec.files.job_file import load_job
from rlplan.spec.parts.lengths import ConstantLengths
from rlplan.timing.serving.ahead import NUM_HALVINGS, RolloutsAhead
from tests.factories import EXAMPLES
from tests.timing.serving.test_generation import LONG_TAIL, make_speed, rollouts


def against_the_simulator(gpus: str, sigma: float, max_num_seqs: int, staleness: int, latency_s: float = 0) -> float:
    """Planned seconds of a steady step over simulated ones, less 1. gpus: all, and those that generate."""
    whole, generation = gpus.split("/")
    overrides = (
        *("placement.placement=disaggregated", f"placement.num_generation_devices={generation}", "rollout.tp=1"),
        *(f"hardware={whole}xH100", f"placement.max_staleness={staleness}", f"rollout.max_num_seqs={max_num_seqs}"),
        f"workload.response_lengths={{kind: lognormal, median: 900, sigma: {sigma}}}",
        f"workload.reward_latency_s={latency_s}",
    )
    plan = find_plan(load_job(EXAMPLES / "grpo-7b-8xh100.yaml", list(overrides)))
    assert plan.timing is not None
    if not plan.choice.arrangement.is_async:
        return 0.0
    steps = simulate_plan(plan, num_steps=24, seed=1).step_s[8:]
    return plan.timing.step.seconds / mean(steps) - 1


@pytest.mark.parametrize(
    ("gpus", "sigma", "max_num_seqs", "staleness", "latency_s"),
    [
        pytest.param("8/4", 0.9, 64, 2, 0, id="places are few", marks=pytest.mark.nightly),
        pytest.param("8/4", 0.9, 1024, 4, 0, id="training is slower"),
        pytest.param("80/16", 0.9, 256, 1, 0, id="the longest is waited for", marks=pytest.mark.nightly),
        pytest.param("72/8", 0.9, 256, 8, 0, id="much is computed anew", marks=pytest.mark.nightly),
        pytest.param("8/4", 0.9, 256, 2, 40, id="judging is waited for in part"),
        pytest.param("24/8", 0.9, 256, 2, 10, id="and a little", marks=pytest.mark.nightly),
        pytest.param("80/16", 0.9, 256, 1, 40, id="and wholly", marks=pytest.mark.nightly),
    ],
)
def test_a_step_is_within_ten_percent_of_the_simulated_one(
    gpus: str, sigma: float, max_num_seqs: int, staleness: int, latency_s: float
) -> None:
    assert against_the_simulator(gpus, sigma, max_num_seqs, staleness, latency_s) == pytest.approx(0, abs=0.1)


@pytest.mark.nightly
def test_over_a_grid_nine_of_ten_are_within_ten_percent_and_half_within_three() -> None:
    """The worst case is 27 % too fast: generation and training take equally long and alternate in waiting."""
    errors = [
        abs(against_the_simulator(gpus, sigma, max_num_seqs, staleness))
        for gpus in ("8/4", "16/12", "72/8", "80/16", "24/8", "10/8")
        for sigma in (0.4, 0.9)
        for max_num_seqs in (64, 256, 1024)
        for staleness in (1, 2, 4, 8)
    ]
    assert median(errors) < 0.03
    assert sum(error <= 0.1 for error in errors) >= 0.9 * len(errors)
    assert max(errors) < 0.3


def test_rollouts_of_one_length_that_all_run_at_once_take_their_tokens_at_the_pace_of_all() -> None:
    """Worked by hand: 64 of 100 tokens without prompts, at most 64 at once: 100 decode steps of 64 sequences of 50
    tokens."""
    work = rollouts(ConstantLengths(value=100), num_rollouts=64, max_num_seqs=64)
    ahead = RolloutsAhead(make_speed(), work, 1, 4, keeps_cache=True)
    assert ahead.cost(0.0, 0.0).seconds == pytest.approx(100 * make_speed().decode_step_s(64, 64 * 50), rel=0.01)


def test_a_longest_rollout_that_is_too_old_is_waited_for() -> None:
    """Worked by hand: one rollout of 1000 tokens alone, one version behind: (1000 decode steps + all else) / 2."""
    lone = rollouts(ConstantLengths(value=1000), num_rollouts=1, num_samples=1, max_num_seqs=1)
    alone = RolloutsAhead(make_speed(), lone, 1, 1, keeps_cache=True)
    tokens_s = 1000 * make_speed().decode_step_s(1, 500)
    assert alone.step_s(others_s=0.0, sync_s=0.0) == pytest.approx(tokens_s, rel=0.01), "one place makes one at a time"
    four = RolloutsAhead(make_speed(), rollouts(ConstantLengths(value=1000), num_rollouts=1, max_num_seqs=4), 1, 3)
    assert four.step_s(others_s=tokens_s / 2, sync_s=0.0) >= (tokens_s + tokens_s / 2) / 4


@given(
    staleness=st.integers(1, 8),
    places=st.integers(1, 256),
    more=st.integers(0, 256),
    others_s=st.floats(0.0, 60.0),
    sync_s=st.floats(0.0, 5.0),
)
def test_more_at_once_and_more_staleness_are_never_slower_and_nothing_is_below_the_least(
    staleness: int, places: int, more: int, others_s: float, sync_s: float
) -> None:
    def ahead(places: int, staleness: int) -> RolloutsAhead:
        work = rollouts(LONG_TAIL, num_rollouts=64, max_num_seqs=places)
        return RolloutsAhead(make_speed(), work, 4, staleness)

    generation = ahead(places, staleness)
    seconds = generation.step_s(others_s, sync_s)
    assert generation.least_step_s() + sync_s <= seconds * (1 + 1e-12)
    assert ahead(places + more, staleness).step_s(others_s, sync_s) <= seconds * (1 + 1e-9)
    assert ahead(places + more, staleness).least_step_s() <= generation.least_step_s() * (1 + 1e-12)
    assert ahead(places, staleness + 1).step_s(others_s, sync_s) <= seconds * (1 + 1e-9)
    assert generation.step_s(others_s + 1.0, sync_s) >= seconds * (1 - 1e-9)
    assert generation.step_s(others_s + sync_s, 0.0) <= seconds * (
        1 + 1e-12
    )  # so that searches bound it before the sync


@given(
    staleness=st.integers(1, 8), places=st.integers(1, 256), others_s=st.floats(0.0, 60.0), sync_s=st.floats(0.0, 5.0)
)
def test_a_step_is_to_the_last_digit_what_halving_alone_finds(
    staleness: int, places: int, others_s: float, sync_s: float
) -> None:
    work = rollouts(LONG_TAIL, num_rollouts=64, max_num_seqs=places)
    generation = RolloutsAhead(make_speed(), work, 4, staleness)
    low = high = generation.least_step_s() + sync_s
    while not generation._is_long_enough(high, others_s, sync_s):
        low, high = high, 1.5 * high
    for _ in range(NUM_HALVINGS if high > low else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if generation._is_long_enough(middle, others_s, sync_s) else (middle, high)
    assert generation.step_s(others_s, sync_s) == high
