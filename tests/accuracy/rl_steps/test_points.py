"""RL steps: published ones within the bounds, phases where a source has them, the order of layouts, other spellings."""

from statistics import median

import pytest

from rlplan.accuracy.files.reading import bundled_points
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.registry import CannotPredict
from rlplan.accuracy.rl_steps.nemo_rl import PAGEABLE_UP, reference_swap, shared_device_moves
from rlplan.accuracy.rl_steps.points import policy_setting, predict_rl_step, seconds_in
from rlplan.accuracy.rl_steps.settings import lognormal, read_rl_run
from rlplan.accuracy.training.throughput import PAGEABLE

POINTS = {point.id: point for point in bundled_points() if point.kind == "rl_step_time"}
PHASES = {"generate": "gen_s", "score": "old_log_prob_s", "train": "update_actor_s"}


def predicted(point: MeasuredPoint) -> float:
    value = predict_rl_step(point).value
    assert isinstance(value, float)
    return value


def made(base: str, gpu: str | None = None, **changes: object) -> MeasuredPoint:
    """A bundled point with other settings; None takes one away."""
    point = POINTS[base]
    settings = {key: value for key, value in {**point.settings, **changes}.items() if value is not None}
    return point.model_copy(update={"settings": settings, "gpu": gpu or point.gpu})


def error(point: MeasuredPoint) -> float:
    return abs(predicted(point) / float(point.measured.value) - 1)


def test_fifteen_published_steps_are_within_fourteen_percent_on_median_and_twenty_eight_at_most():
    errors = [error(point) for point in POINTS.values()]
    assert len(errors) == 15
    assert median(errors) <= 0.14
    assert max(errors) <= 0.28


@pytest.mark.parametrize("source", ["dschat", "nemorl", "verl"])
def test_no_source_is_missed_by_more_than_a_fifth_on_median(source):
    assert median(error(point) for name, point in POINTS.items() if name.startswith(source)) <= 0.20


@pytest.mark.parametrize("name", [name for name, point in POINTS.items() if "gen_s" in point.settings])
def test_shares_of_phases_are_within_twenty_points(name):
    point = POINTS[name]
    parts, whole = predict_rl_step(point).parts, predicted(point)
    for phase, key in PHASES.items():
        measured = point.settings[key] / float(point.measured.value)
        assert abs(parts[phase] / whole - measured) <= 0.20, phase


@pytest.mark.parametrize(
    ("slower", "faster"),
    [("verl-dapo-7b-h20-32", "verl-dapo-7b-h20-128"), ("nemorl-dsv3-256", "nemorl-dsv3-512")],
)
def test_more_gpus_are_faster_in_the_order_of_the_source(slower, faster):
    assert predicted(POINTS[slower]) > predicted(POINTS[faster])
    scaled = predicted(POINTS[slower]) / predicted(POINTS[faster])
    published = float(POINTS[slower].measured.value) / float(POINTS[faster].measured.value)
    assert scaled == pytest.approx(published, rel=0.35)


def test_an_asynchronous_step_lasts_as_long_as_its_slower_side():
    run = read_rl_run(POINTS["nemorl-q30-32-off"])
    assert run.staleness == 1
    assert (run.training.num_gpus, run.generation.num_gpus) == (16, 16)
    found = predict_rl_step(POINTS["nemorl-q30-32-off"])
    sides = found.parts["generate"], found.parts["score"] + found.parts["train"]
    assert found.value == pytest.approx(max(sides) + found.parts["sync"])
    assert read_rl_run(POINTS["verl-dapo-7b-h20-32"]).staleness == 0


def test_a_split_is_read_with_words_between_its_numbers():
    run = read_rl_run(POINTS["nemorl-q30-192-8off"])  # "128 train + 64 generation"
    assert (run.training.num_gpus, run.generation.num_gpus) == (128, 64)


@pytest.mark.parametrize(
    ("name", "recomputes", "share", "scored"),
    [
        ("nemorl-l8-16", True, 0.6, 8192),  # grpo-llama3.1-8b-instruct-2n8g.yaml: activation_checkpointing
        ("nemorl-q30-gb200-16", False, 0.6, 8192),  # grpo-qwen3-30ba3b-4n4g.yaml leaves it off
        ("nemorl-q32-64-off", False, 0.8, 8192),  # ...-async-1off.yaml: gpu_memory_utilization 0.8
        ("nemorl-dsv3-256", True, 0.6, 3072),
    ],
)
def test_a_step_of_nemo_rl_is_that_of_its_recipe(name, recomputes, share, scored):
    run = read_rl_run(POINTS[name])
    assert run.recipe is not None
    assert run.choice.gradient_checkpointing is recomputes
    assert run.recipe.memory_share == share
    assert run.tokens_per_pass == scored / 2  # train_micro_batch_size 1: packed to one longest sequence
    assert run.recipe.scored_tokens_per_pass == scored
    assert read_rl_run(POINTS["verl-dapo-7b-h20-32"]).recipe is None


def test_shared_devices_move_the_optimizer_s_states_unpinned_both_ways():
    run = read_rl_run(POINTS["nemorl-l8-16"])
    setting = policy_setting(run)
    # 8.03 billion parameters on two stages and eight ranks, 12 bytes each; two stages' weights of 2 bytes
    states, weights = 8.03e9 / 16 * 12, 8.03e9 / 2 * 2
    moved = shared_device_moves(setting, run.training).seconds
    assert moved == pytest.approx(states / PAGEABLE + states / PAGEABLE_UP + 2 * weights / (63e9 * 0.8), rel=0.02)
    assert reference_swap(setting).seconds == pytest.approx(weights / PAGEABLE + 2 * weights / PAGEABLE_UP, rel=0.02)


def test_a_batch_is_prompts_in_verl_and_rollouts_in_nemo_rl():
    verl, nemo = read_rl_run(POINTS["verl-dapo-7b-h20-32"]), read_rl_run(POINTS["nemorl-q235-256"])
    assert (verl.num_rollouts, verl.mini_batch) == (512 * 16, 32 * 16)
    assert (nemo.num_rollouts, nemo.mini_batch) == (512, 512)
    assert (nemo.choice.tp, nemo.choice.cp, nemo.choice.ep, nemo.choice.pp, nemo.engine_tp) == (2, 2, 16, 8, 16)


def test_a_stage_is_all_of_its_steps():
    assert read_rl_run(POINTS["dschat-step3-opt-30b-8g-80gb"]).num_steps == 131900 / 1024
    assert seconds_in("hours for full stage") == 3600


def test_lengths_that_are_stated_are_met_under_their_limit():
    assert lognormal(3001.0, 3896).mean == pytest.approx(3001, rel=1e-3)
    assert lognormal(4000.0, 4096).variance == 0


def test_longer_responses_and_a_critic_take_longer():
    base = predicted(POINTS["verl-dapo-7b-h20-32"])
    assert predicted(made("verl-dapo-7b-h20-32", mean_response=6000)) > 1.5 * base
    assert predicted(made("verl-dapo-7b-h20-32", algo="PPO")) > 1.3 * base


@pytest.mark.parametrize("gpu", ["32xH100", "32x NVIDIA H100", "4x8 H100", "32x h100_80gb"])
def test_gpus_in_other_spellings_are_the_same(gpu):
    assert predicted(made("nemorl-q30-32-off", gpu=gpu)) == predicted(POINTS["nemorl-q30-32-off"])


def test_what_is_not_stated_is_refused():
    with pytest.raises(CannotPredict, match="rollouts"):
        predict_rl_step(made("nemorl-dsv3-256", gen_gbs=None))
    with pytest.raises(CannotPredict, match="longest"):
        predict_rl_step(made("nemorl-dsv3-256", max_seq=None))
    with pytest.raises(CannotPredict, match="more than 64"):
        predict_rl_step(made("nemorl-dsv3-256", gpu="64x H100", train_tp_cp_ep_pp="[8,1,16,16]"))
