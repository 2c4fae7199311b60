"""A trainer that shares its GPU and process with a sleeping engine: AgileRL's rig, as a plan of its job has it."""

from statistics import fmean, median
from typing import Any

import pytest

from rlplan.accuracy.compare import Comparison, compare_point, predict
from rlplan.accuracy.files.reading import bundled_points
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.predictions import Prediction, Refusal
from rlplan.accuracy.training.colocated import colocated_job
from rlplan.units import GIB, KIB, MIB

RIG = {point.id: point for point in bundled_points() if point.id.startswith("agilerl-")}
SMALL = RIG["agilerl-qwen2.5-0.5b-l4-s512-mb8-g4-r64-u200"]
"""Four responses in one micro-batch: one update."""
MIXTURE = RIG["agilerl-olmoe-1b-7b-0924-a100-s4096-mb1-g16-r8-u840-asleep"]


def compare_kind(kind: str) -> list[Comparison]:
    comparisons = [compare_point(point) for point in RIG.values() if point.kind == kind]
    return [comparison for comparison in comparisons if comparison.relative_error is not None]


def change_settings(point: MeasuredPoint, **settings: Any) -> MeasuredPoint:
    merged = {key: value for key, value in (point.settings | settings).items() if value is not None}
    return point.model_copy(update={"settings": merged})


def predict_parts(point: MeasuredPoint) -> dict[str, float]:
    answer = predict(point)
    assert isinstance(answer, Prediction), answer
    return answer.parts


def test_wide_heads_of_one_long_sequence_store_their_scores() -> None:
    """Gemma 4 has heads of 512 that share one key, for which torch has no fused kernel without a mask: 16 bytes per
    pair and head, 2 GiB of 4,096 tokens. Such peaks were 12 to 15 % too low."""
    long = [point for name, point in RIG.items() if "gemma-4" in name and "-s4096-mb1-" in name]
    errors = [compare_point(point).relative_error for point in long if point.kind == "train_peak"]
    assert len(errors) == 7
    assert all(error is not None and -0.075 <= error <= 0 for error in errors)


def test_half_of_the_updates_are_within_three_percent_and_nine_in_ten_within_eleven() -> None:
    """The worst are Gemma's wide heads with several sequences, whose scores of every pair of tokens no plan counts."""
    errors = sorted(abs(comparison.relative_error or 0.0) for comparison in compare_kind("train_peak"))
    assert len(errors) == 158
    assert median(errors) <= 0.03
    assert errors[int(0.9 * len(errors))] <= 0.11
    assert errors[-1] <= 0.4


def test_what_a_sleeping_engine_leaves_is_within_three_tenths_of_a_gibibyte() -> None:
    """All but one of 1.5B, whose repeats left 1.31 GiB, not 1.85."""
    misses = [
        abs(float(str(comparison.predicted)) - float(str(comparison.measured)))
        for comparison in compare_kind("sleeping_engine_residual")
    ]
    assert len(misses) == 113
    assert sum(miss <= 0.3 for miss in misses) == len(misses) - 1
    assert fmean(misses) <= 0.05


def test_a_sleeping_engine_leaves_what_the_driver_keeps_and_both_sets_of_graphs_and_its_buffer() -> None:
    parts = predict_parts(RIG["agilerl-qwen2.5-0.5b-l4-s512-mb1-g4-r8-u200-asleep"])
    assert parts["process"] * GIB == (23034 - 22563) * MIB
    # piecewise 1, 2, 4, 8 and whole 1, 2, 4; with adapters and without, of 24 layers
    assert parts["cuda_graphs"] * GIB == 2 * 7 * 24 * 300 * KIB
    assert parts["activations"] * GIB == 2 * 4 * 512 * 896


def test_under_model_runner_v2_a_sleeping_engine_leaves_no_buffer_and_one_set_of_graphs() -> None:
    """SmolLM2 is a Llama; measured: 0.86 GiB."""
    point = RIG["agilerl-smollm2-1.7b-l4-s4096-mb1-g16-r64-u450-asleep"]
    parts = predict_parts(point)
    assert "activations" not in parts
    assert parts["cuda_graphs"] * GIB == (7 + 5) * 24 * 300 * KIB
    assert sum(parts.values()) == pytest.approx(0.86, rel=0.05)
    newer = predict_parts(change_settings(point, framework="AgileRL 2.8.2, colocated vLLM 0.26.0"))
    assert newer["cuda_graphs"] == 2 * parts["cuda_graphs"]


def test_workspaces_of_experts_stay_asleep_until_they_have_a_pool_of_their_own() -> None:
    tokens = 16 * 4096
    kept = 2 * tokens * 8 * (2048 + 2048) + 2 * tokens * 2048
    assert predict_parts(MIXTURE)["activations"] * GIB == pytest.approx(kept)
    newer = change_settings(MIXTURE, framework="AgileRL, colocated vLLM 0.32.0")
    assert "activations" not in predict_parts(newer)


def test_the_job_says_what_the_point_states() -> None:
    job = colocated_job(SMALL)
    assert job["hardware"] == {"profile": "l4", "num_devices": 1}
    assert job["rollout"]["engine_version"] == "0.23.0"
    assert (job["rollout"]["shares_process"], job["rollout"]["gpu_memory_utilization"]) == (True, 0.2)
    assert job["training"]["lora"]["dtype"] == "float32"
    assert job["roles"] == {"reference": {"adapter": "start"}}
    assert job["workload"]["max_prompt_len"] + job["workload"]["max_response_len"] == 512


def test_moments_are_in_the_passes_from_the_second_micro_batch_on() -> None:
    assert predict_parts(SMALL).get("optimizer", 0) == 0  # one micro-batch: the peak is before the only step
    assert predict_parts(change_settings(SMALL, group_size=8))["optimizer"] > 0.01


def test_beside_a_base_in_four_bits_everything_else_is_in_fp32() -> None:
    quantised = RIG["agilerl-qwen2.5-0.5b-a100-s4096-mb8-g16-r8-nf4-u200"]
    plain, four_bits = predict_parts(change_settings(quantised, quant="none")), predict_parts(quantised)
    assert four_bits["weights"] > 151_936 * 896 * 4 / GIB  # the table alone
    assert four_bits["weights"] < plain["weights"]
    assert four_bits["activations"] - plain["activations"] >= 23 * 896 * 2 * 32768 / GIB  # inputs of waiting layers


def test_a_generation_takes_the_engines_fraction_and_what_lies_outside_of_it() -> None:
    measured = {"value": 6.0, "unit": "GiB device used (NVML peak in generation)"}
    point = MeasuredPoint.model_validate(SMALL.model_dump() | {"kind": "rollout_peak", "measured": measured})
    parts = predict_parts(point)
    fraction = 0.2 * 22563 / 1024
    assert 0.8 * fraction < sum(parts.values()) - parts["process"] - parts["context"] <= 1.05 * fraction


def test_a_gpu_whose_nvml_total_nobody_said_is_refused() -> None:
    answer = predict(RIG["agilerl-qwen2.5-0.5b-l4-s512-mb1-g4-r8-u200-asleep"].model_copy(update={"gpu": "1x A30"}))
    assert isinstance(answer, Refusal)
    assert "what NVML counts for the driver of a30" in answer.reason
