"""A sample of the engines stands for all: the same seconds within 1 %, counts of the whole."""

from dataclasses import replace

import pytest

from benchmarks.simulated.linear_speed import LinearSpeed
from rlplan.simulate.result import SimulationResult
from rlplan.simulate.run import choose_sample, simulate, simulate_sampled
from rlplan.simulate.setting import Asynchrony
from tests.repository.at_night import mark_nightly
from tests.simulate.cases import make_setting, make_work, uniform

WORK = make_work(num_prompts=1024, num_engines=128, lengths=uniform(10, 200))
GPU_SPEED = LinearSpeed(base_s=0.01, per_seq_s=22e-6, per_token_s=1e-8, prefill_token_s=1e-5)
"""A step of a GPU's engine: mostly weights that are read, 22 microseconds a sequence (timing/serving/step.py)."""
STREAM = Asynchrony(1.0, interrupts=True, is_bound=True)


@pytest.mark.parametrize("asynchrony", mark_nightly([None, STREAM], but=1))
def test_a_part_says_what_the_whole_says_within_one_percent(asynchrony: Asynchrony | None) -> None:
    setting = replace(make_setting(WORK, asynchrony, train_s=0.1), speed=GPU_SPEED)
    whole, part = simulate(setting, 1), simulate_sampled(setting, 1, most=2048)
    assert (whole.simulated_share, part.simulated_share) == (1.0, 0.5)
    assert part.mean_step_s == pytest.approx(whole.mean_step_s, rel=0.01)
    assert part.num_tokens == pytest.approx(whole.num_tokens, rel=0.01)
    assert sum(part.token_staleness.values()) == pytest.approx(part.num_trained_tokens, rel=1e-6)
    assert part.mean_staleness == pytest.approx(whole.mean_staleness, abs=0.01)
    eighth = simulate_sampled(setting, 1, most=512)
    assert eighth.mean_step_s == pytest.approx(whole.mean_step_s, rel=0.01)
    for sampled, other in zip(part.groups, whole.groups, strict=True):
        assert sampled.utilisation == pytest.approx(other.utilisation, abs=0.01)
    assert SimulationResult.parse(part.as_json()).simulated_share == 0.5


def test_few_rollouts_and_few_engines_are_simulated_whole() -> None:
    assert choose_sample(WORK, 1024 * 4) is WORK
    few = make_work(num_prompts=100_000, num_engines=16)
    assert choose_sample(few, 1024) is few


def test_a_sample_has_a_whole_prompt_however_many_its_samples_are() -> None:
    work = make_work(num_prompts=2, num_samples=50_000, num_engines=64)
    assert [choose_sample(replace(work, num_prompts=prompts), 1024).num_prompts for prompts in (1, 2)] == [1, 1]


@pytest.mark.parametrize(("prompts", "engines"), [(100_000, 12_500), (65_536, 12_497), (9_973, 3_001)])
def test_a_part_has_as_many_rollouts_an_engine(prompts: int, engines: int) -> None:
    part = choose_sample(make_work(num_prompts=prompts, num_engines=engines), 4096)
    assert part.num_prompts / part.num_engines == pytest.approx(prompts / engines, rel=0.002)
    assert part.num_prompts * part.num_samples <= 2.1 * 4096


def test_engines_that_no_prompt_reaches_change_nothing_but_how_busy_the_mean_is() -> None:
    near, far = (simulate(make_setting(make_work(num_engines=count), STREAM), 1) for count in (16, 5_000))
    assert near.step_s == far.step_s
    assert near.token_staleness == far.token_staleness
    assert far.groups[1].busy_s < near.groups[1].busy_s
