"""Published RL steps as jobs with a forced layout: seconds of a plan, verdicts of recipes that ran."""

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from rlplan.accuracy.compare import compare_point, predict
from rlplan.accuracy.files.reading import bundled_points, published_points, read_points
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.predict import plan_point_job
from rlplan.accuracy.predictions import Prediction, Refusal
from rlplan.accuracy.rl_steps.job import lognormal, rl_job

STEPS = {point.id: point for point in bundled_points() if point.kind == "rl_step_time"}
RECIPES = {point.id: point for point in read_points(Path(__file__).parent / "recipes.json")}


def change_settings(point: MeasuredPoint, **settings: Any) -> MeasuredPoint:
    merged = {key: value for key, value in (point.settings | settings).items() if value is not None}
    return point.model_copy(update={"settings": merged})


def seconds(point: MeasuredPoint) -> float:
    answer = predict(point)
    assert isinstance(answer, Prediction), answer
    return float(answer.value)


def test_published_steps_are_within_an_eighth_on_median_and_four_tenths_at_most() -> None:
    errors = {name: compare_point(point).relative_error for name, point in STEPS.items()}
    known = [abs(error) for error in errors.values() if error is not None]
    assert len(known) == 13
    assert median(known) <= 0.125
    assert max(known) <= 0.39


def test_generation_by_gathered_layers_is_what_no_job_says() -> None:
    answer = predict(STEPS["dschat-step3-opt-13b-64g-80gb"])
    assert isinstance(answer, Refusal)
    assert "a job cannot express that" in answer.reason


@pytest.mark.parametrize(
    ("slower", "faster"),
    [("nemorl-dsv3-256", "nemorl-dsv3-512"), ("verl-dapo-7b-h20-32", "verl-dapo-7b-h20-128")],
)
def test_more_gpus_are_faster_in_the_order_of_the_source(slower: str, faster: str) -> None:
    assert seconds(STEPS[slower]) > seconds(STEPS[faster])


def test_an_asynchronous_step_has_devices_of_its_own_and_stale_rollouts() -> None:
    job = rl_job(STEPS["nemorl-q30-192-8off"])
    assert job["placement"] == {"placement": "disaggregated", "num_generation_devices": 64, "max_staleness": 8}
    assert rl_job(STEPS["nemorl-q32-64-off"])["placement"]["max_staleness"] == 1
    assert rl_job(STEPS["nemorl-q32-32"])["placement"] == {"placement": "colocated"}


def test_an_engine_has_cuda_graphs_where_its_release_has_them_by_default() -> None:
    """verl's default `enforce_eager` was true until August 2025 (ff6978c14)."""
    point = STEPS["verl-dapo-7b-h20-128"]
    graphs = [rl_job(change_settings(point, version=f"v{v}"))["rollout"]["has_cuda_graphs"] for v in ("0.4", "0.6")]
    assert graphs == [False, True]
    later = point.model_copy(update={"source": "docs/advance/v1_async_trainer.md"})
    assert rl_job(later)["framework"] == "verl@0.9"


def test_an_assumed_mean_ends_within_the_context_that_the_model_was_trained_on() -> None:
    """Qwen2.5-Math-7B was trained on 4,096 tokens, Qwen2.5-7B on 131,072; both recipes allow 28,672."""
    math = STEPS["verl-dapo-7b-h20-128"]
    medians = [
        rl_job(point)["workload"]["response_lengths"]["median"]
        for point in (math, math.model_copy(update={"model": "Qwen/Qwen2.5-7B"}))
    ]
    assert medians[0] < 0.85 * medians[1]


def test_the_framework_is_read_from_a_point_s_words_and_its_source() -> None:
    nemo, verl = rl_job(STEPS["nemorl-q30-32-off"]), rl_job(STEPS["verl-dapo-7b-h20-128"])
    assert (nemo["framework"], nemo["training"]["backend"]) == ("nemo_rl@0.6", "megatron")
    assert (verl["framework"], verl["training"]["backend"], verl["training"]["ulysses"]) == ("verl@0.6", "fsdp2", 4)
    assert verl["algorithm"] == {"name": "grpo", "kl_coef": 0.0}
    assert nemo["scoring"]["policy"] == {"max_tokens_per_micro_batch": 2 * 4096}


def test_a_batch_is_prompts_in_verl_and_rollouts_in_nemo_rl() -> None:
    verl = rl_job(STEPS["verl-dapo-7b-h20-128"])["workload"]
    assert (verl["num_prompts_per_step"], verl["num_samples_per_prompt"], verl["mini_batch_size"]) == (512, 16, 512)
    nemo = rl_job(STEPS["nemorl-l8-16"])["workload"]
    assert nemo["num_prompts_per_step"] * nemo["num_samples_per_prompt"] == 2048


def test_lengths_that_are_stated_are_met_under_their_limit() -> None:
    assert lognormal(1000.0, 4096).mean == pytest.approx(1000, rel=0.01)
    assert lognormal(4000.0, 4096).mean == 4096


def test_a_log_probs_pass_and_a_reference_are_part_of_the_step() -> None:
    point = change_settings(STEPS["nemorl-q32-32"], version="NeMo RL v0.7")  # which skips a reference without KL
    plan = plan_point_job(rl_job(point))
    assert {action.role for action in plan.schedule.step if action.kind == "score"} == {"policy", "reference"}
    assert seconds(change_settings(point, kl_coef=0.0)) < seconds(point)


def test_what_is_not_stated_is_refused() -> None:
    for key, words in (("gen_gbs", "number of rollouts"), ("max_seq", "longest response")):
        answer = predict(change_settings(STEPS["nemorl-q32-32"], **{key: None}))
        assert isinstance(answer, Refusal)
        assert words in answer.reason


@pytest.mark.parametrize("name", RECIPES)
def test_a_published_recipe_fits_with_its_layout(name: str) -> None:
    comparison = compare_point(RECIPES[name])
    assert (comparison.predicted, comparison.relative_error, comparison.reason) == ("fits", 0.0, None)


def test_the_layout_is_the_published_one() -> None:
    job = rl_job(RECIPES["verl-dsv3-96"])
    assert (job["hardware"], job["training"]["backend"]) == ("12xhgx-h20", "megatron")
    axes = {axis: job["training"][axis] for axis in ("tp", "pp", "cp", "ep")}
    assert axes == {"tp": 8, "pp": 12, "cp": 1, "ep": 8}
    assert job["training"]["offloads_optimizer"] is True
    assert (job["rollout"]["tp"], job["rollout"]["has_cuda_graphs"]) == (32, False)
    assert rl_job(RECIPES["verl-235b-32"])["training"]["ep"] == 4  # over tensor parallel ranks too: 32 / pp 8


def test_half_of_the_gpus_do_not_hold_it_and_the_point_is_wrong() -> None:
    point = change_settings(RECIPES["verl-235b-32"], train_tp_cp_ep_pp="[4,1,4,4]").model_copy(
        update={"gpu": "16x H20"}
    )
    comparison = compare_point(point)
    assert comparison.predicted == "does not fit"
    assert comparison.relative_error == 1.0


def test_a_point_that_says_neither_true_nor_false_is_refused() -> None:
    point = RECIPES["verl-235b-32"]
    wrong = point.model_copy(update={"measured": point.measured.model_copy(update={"value": 66.0})})
    assert "true or false" in str(compare_point(wrong).reason)


def test_a_job_of_a_point_is_a_job_file() -> None:
    for point in (*STEPS.values(), *RECIPES.values()):
        if not point.id.startswith("dschat"):
            assert json.loads(json.dumps(rl_job(point)))["framework"].split("@")[0] in ("verl", "nemo_rl", "slime")


def make_step(**settings: Any) -> MeasuredPoint:
    point = next(point for point in published_points() if point.id == "verl-dapo-7b-h20-128-fullyasync")
    return change_settings(point, **settings)


def test_a_step_of_verl_s_fully_asynchronous_trainer_lasts_from_one_weight_sync_to_the_next() -> None:
    """However many parts it is trained in; its old log-probs are those of the engines."""
    job = rl_job(make_step())
    assert job["placement"] == {"placement": "disaggregated", "num_generation_devices": 64, "max_staleness": 1}
    assert job["scoring"] == {"policy_log_probs": "never"}
    assert seconds(make_step(require_batches=1)) == seconds(make_step(require_batches=4))
    assert rl_job(make_step(staleness=0))["placement"]["max_staleness"] == 0


def test_a_split_counts_gpus_or_nodes_with_words_between() -> None:
    split = "64 policy (FSDP2, EP1, cpu_offload) + 32 inference (4 engines TP8)"
    job = rl_job(make_step(split=split).model_copy(update={"gpu": "96x H20"}))
    assert (job["placement"]["num_generation_devices"], job["rollout"]["tp"]) == (32, 8)
    job = rl_job(make_step(split="2 hybrid + 1 standalone nodes").model_copy(update={"gpu": "24x H20"}))
    assert job["placement"]["num_generation_devices"] == 8


def test_a_point_runs_on_the_release_that_it_states() -> None:
    assert rl_job(make_step(version="NeMo RL v0.3", framework="nemo-rl"))["framework"] == "nemo_rl@0.3"


def test_a_step_without_stated_lengths_has_an_interval_that_covers_other_lengths() -> None:
    stated, assumed = (compare_point(make_step(mean_response=mean)) for mean in (2450, None))
    (low, high), (least, most) = stated.interval or (0, 0), assumed.interval or (0, 0)
    assert high / low * 2.6 < most / least
    assert "mean_response" in assumed.assumed


def test_the_reference_s_weights_are_copied_within_the_timer_of_log_probs_not_of_the_refit() -> None:
    """Source: NeMo-RL 0.5, algorithms/grpo.py (`policy_and_reference_logprobs`, `prepare_for_generation`)."""
    phases = {point.id: point for point in published_points() if point.id.startswith("n959-l8-mcore-blog:")}
    plan = plan_point_job(phases["n959-l8-mcore-blog:refit"].settings["job"])
    assert plan.timing is not None
    costs = {action.action_id: action.cost.seconds for action in plan.timing.step.actions}
    copies = costs["reload_role/reference"] + costs["offload_role/reference"]
    assert copies > 1.0
    assert seconds(phases["n959-l8-mcore-blog:score"]) == pytest.approx(
        costs["score/policy"] + costs["score/reference"] + copies
    )
    refit = ("offload_role/policy", "wake_weights", "sync_weights", "wake_kv_cache")
    assert seconds(phases["n959-l8-mcore-blog:refit"]) == pytest.approx(sum(costs[name] for name in refit))
