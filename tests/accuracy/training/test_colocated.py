"""A trainer that shares its GPU and process with a sleeping engine: AgileRL's rig, part by part."""

from statistics import fmean
from typing import Any

import pytest

from rlplan.accuracy.compare import Comparison, compare_point, load_predictors, predict
from rlplan.accuracy.files.reading import bundled_points
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.registry import Prediction, Refusal
from rlplan.accuracy.training.colocated import FIRST_KERNELS, asleep_parts, engine_of
from rlplan.units import GIB, KIB, MIB

RIG = {point.id: point for point in bundled_points() if point.id.startswith("agilerl-")}
SMALL = RIG["agilerl-qwen2.5-0.5b-l4-s512-mb8-g4-r64-u200"]
"""Four responses in one micro-batch: one update."""
MIXTURE = RIG["agilerl-olmoe-1b-7b-0924-a100-s4096-mb1-g16-r8-u840-asleep"]


WIDE_HEADS = RIG["agilerl-gemma-4-e2b-it-a100-s4096-mb8-g4-r8-u363-attn"]
"""Four sequences of 4,096 tokens; seven layers have eight heads of 512 that share one key."""
COUNTED = RIG["agilerl-olmoe-1b-7b-0924-a100-s4096-mb8-g4-r64-u522"]
"""The same of a mixture."""


@pytest.fixture(autouse=True)
def predictors() -> None:
    load_predictors()


def compared(kind: str) -> list[Comparison]:
    found = [compare_point(point) for point in RIG.values() if point.kind == kind]
    return [one for one in found if one.relative_error is not None]


def changed(point: MeasuredPoint, **settings: Any) -> MeasuredPoint:
    merged = {key: value for key, value in (point.settings | settings).items() if value is not None}
    return point.model_copy(update={"settings": merged})


def parts_of(point: MeasuredPoint) -> dict[str, float]:
    answer = predict(point)
    assert isinstance(answer, Prediction), answer
    return answer.parts


def test_peaks_of_an_update_are_within_2_5_percent_on_average_and_eleven_at_the_worst() -> None:
    errors = [one.relative_error or 0.0 for one in compared("train_peak")]
    assert len(errors) == 158
    assert fmean(map(abs, errors)) <= 0.025
    assert max(map(abs, errors)) <= 0.111


def test_what_a_sleeping_engine_leaves_is_within_three_tenths_of_a_gibibyte() -> None:
    """All but one of 1.5B, whose repeats left 1.31 GiB, not 1.85."""
    misses = [abs(float(str(one.predicted)) - float(str(one.measured))) for one in compared("sleeping_engine_residual")]
    assert len(misses) == 113
    assert sum(miss <= 0.3 for miss in misses) == len(misses) - 1
    assert fmean(misses) <= 0.05


def test_a_sleeping_engine_leaves_what_the_driver_keeps_context_kernels_and_both_sets_of_graphs() -> None:
    parts = asleep_parts(RIG["agilerl-qwen2.5-0.5b-l4-s512-mb1-g4-r8-u200-asleep"])
    assert parts["driver"] == (23034 - 22563) * MIB
    assert parts["kernels"] == 70 * MIB
    # piecewise 1, 2, 4, 8 and whole 1, 2, 4; with adapters and without, of 24 layers
    assert parts["graphs"] == 2 * 7 * 24 * 300 * KIB
    assert parts["buffers"] == 2 * 4 * 512 * 896
    assert parts["workspaces"] == 0


def test_under_model_runner_v2_a_sleeping_engine_leaves_no_buffer_and_one_set_of_graphs() -> None:
    """SmolLM2 is a Llama; measured: 0.86 GiB."""
    point = RIG["agilerl-smollm2-1.7b-l4-s4096-mb1-g16-r64-u450-asleep"]
    parts = asleep_parts(point)
    assert parts["buffers"] == 0
    assert parts["graphs"] == (7 + 5) * 24 * 300 * KIB
    assert sum(parts.values()) / GIB == pytest.approx(0.86, rel=0.05)
    newer = asleep_parts(changed(point, framework="AgileRL 2.8.2, colocated vLLM 0.26.0"))
    assert newer["graphs"] == 2 * parts["graphs"]


def test_workspaces_of_experts_stay_asleep_until_they_have_a_pool_of_their_own() -> None:
    tokens = 16 * 4096
    assert asleep_parts(MIXTURE)["workspaces"] == 2 * tokens * 8 * (2048 + 2048)
    assert asleep_parts(MIXTURE)["buffers"] == 2 * tokens * 2048
    newer = changed(MIXTURE, framework="AgileRL, colocated vLLM 0.32.0")
    assert asleep_parts(newer)["workspaces"] == 0


def test_a_point_that_states_no_residual_gets_the_predicted_one() -> None:
    silent = changed(SMALL, sleeping_engine_residual_gib=None)
    asleep = sum(asleep_parts(SMALL).values()) / GIB
    assert parts_of(silent)["process"] == pytest.approx(asleep)
    stated = changed(SMALL, sleeping_engine_residual_gib=0.7)
    assert parts_of(stated)["process"] == pytest.approx(0.7)


def test_wide_heads_that_share_keys_store_the_scores_of_every_pair_where_nothing_is_masked() -> None:
    scores = 16 * 8 * 4 * 4096**2 / GIB
    repeated = 2 * 4 * 4096 * 2 * (4096 - 512) / GIB  # keys and values of eight query heads instead of one
    stored = changed(WIDE_HEADS, quant="nf4")
    fused = changed(stored, transformers="5.19.0")
    assert parts_of(stored)["activations"] - parts_of(fused)["activations"] == pytest.approx(scores + repeated)
    masked = changed(stored, framework="AgileRL 2.8.2, trainer under colocated vLLM 0.26.0 (sleep level 1)")
    masks = 4 * 4096**2 * (1 + 1 + 2) / GIB  # of sliding and full layers, and one in 16 bits
    assert parts_of(masked)["activations"] - parts_of(fused)["activations"] == pytest.approx(repeated + masks)
    narrow = changed(SMALL, seq=4096, transformers="5.11.0")
    assert parts_of(narrow)["activations"] == parts_of(changed(narrow, transformers="5.19.0"))["activations"]


def test_moments_are_in_the_passes_from_the_second_micro_batch_on() -> None:
    assert parts_of(COUNTED).get("optimizer", 0) == 0  # one micro-batch: the peak is before the only step
    assert parts_of(changed(COUNTED, group_size=8))["optimizer"] > 0.01


def test_context_counts_once_and_kernels_of_the_trainer_beside_it() -> None:
    assert parts_of(COUNTED)["context"] == FIRST_KERNELS / GIB


def test_beside_a_base_in_four_bits_everything_else_is_in_fp32() -> None:
    quantised = RIG["agilerl-qwen2.5-0.5b-a100-s4096-mb8-g16-r8-nf4-u200"]
    plain = parts_of(changed(quantised, quant="none"))
    four_bits = parts_of(quantised)
    assert four_bits["weights"] > 151_936 * 896 * 4 / GIB  # the table alone
    assert four_bits["weights"] < plain["weights"]
    assert four_bits["activations"] - plain["activations"] >= 23 * 896 * 2 * 32768 / GIB  # inputs of waiting layers


def generation(**settings: Any) -> MeasuredPoint:
    measured = {"value": 6.0, "unit": "GiB device used (NVML peak in generation)"}
    point = MeasuredPoint.model_validate(SMALL.model_dump() | {"kind": "rollout_peak", "measured": measured})
    return changed(point, **settings)


def test_a_generation_takes_the_engines_fraction_and_what_lies_outside_of_it() -> None:
    parts = parts_of(generation())
    outside = parts["driver"] + parts["context"] + parts["kernels"]
    assert parts["kernels"] == FIRST_KERNELS / GIB
    assert 0.2 * 22563 / 1024 * 0.8 + outside < sum(parts.values()) <= 0.2 * 22563 / 1024 + outside


def test_rollouts_of_a_group_share_the_prefill_of_their_prompt() -> None:
    few, many = (
        parts_of(generation(seq=32768, prompt=8192, group_size=num, gpu_memory_utilization=0.9)) for num in (2, 16)
    )
    assert many["passing"] == pytest.approx(few["passing"] * (8192 + 15 * 16) / (8192 + 16))


def test_rollouts_that_the_cache_has_no_room_for_are_computed_anew_in_one_pass() -> None:
    """Measured by AgileRL: 8,585 MiB of SmolLM2 with adapters of rank 8, 8,281 of rank 64; 16 sequences of 4,096."""
    point = RIG["agilerl-smollm2-1.7b-l4-s4096-mb8-g16-r8-u450"]
    measured = {"value": 8_585 / 1024, "unit": "GiB device used (NVML peak in generation)"}
    crowded = MeasuredPoint.model_validate(point.model_dump() | {"kind": "rollout_peak", "measured": measured})
    crowded = changed(crowded, padding=None)
    roomy = parts_of(changed(crowded, gpu_memory_utilization=0.95))
    token = 2 * (3 * 8192 + 2.9 * 2048)
    prompt, cached = 1024 + 15 * 16, engine_of(crowded).num_tokens
    assert roomy["passing"] * GIB == pytest.approx(token * prompt, rel=1e-6)
    assert parts_of(crowded)["passing"] * GIB == pytest.approx(token * (prompt + cached - 1024), rel=1e-6)
    assert 8_281 / 1024 < sum(parts_of(crowded).values()) < 8_585 / 1024


def test_a_generation_of_a_mixture_keeps_its_workspaces_and_a_tied_head_its_segment() -> None:
    """Measured by AgileRL: 33,037 MiB of OLMoE, 10,322 of SmolLM2 (sixteen sequences of 4,096, and four)."""
    mixture = changed(COUNTED, group_size=16, gpu_memory_utilization=0.84, lora_rank=8)
    measured = {"value": 33_037 / 1024, "unit": "GiB device used (NVML peak in generation)"}
    point = MeasuredPoint.model_validate(mixture.model_dump() | {"kind": "rollout_peak", "measured": measured})
    assert sum(parts_of(point).values()) == pytest.approx(33_037 / 1024, rel=0.02)
    tied = changed(RIG["agilerl-smollm2-1.7b-l4-s4096-mb8-g4-r8-u450"], padding=None)
    point = MeasuredPoint.model_validate(tied.model_dump() | {"kind": "rollout_peak", "measured": measured})
    assert parts_of(point)["graphs"] == (4 + 3) * 24 * 300 * KIB / GIB  # not of the fraction under Model Runner V2
    assert parts_of(point)["unused"] == 49_152 * 2048 * 2 / GIB
    assert sum(parts_of(point).values()) == pytest.approx(10_322 / 1024, rel=0.005)


def test_a_gpu_whose_nvml_total_nobody_said_is_refused() -> None:
    answer = predict(RIG["agilerl-qwen2.5-0.5b-l4-s512-mb1-g4-r8-u200-asleep"].model_copy(update={"gpu": "1x A30"}))
    assert isinstance(answer, Refusal)
    assert "what NVML counts for the driver of a30" in answer.reason
