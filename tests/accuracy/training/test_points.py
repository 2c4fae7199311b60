"""Published training peaks: how near the formulas come, what is read, what is refused."""

import random
from typing import Any

import pytest

from rlplan.accuracy.compare import Comparison, compare_point, predict
from rlplan.accuracy.files.reading import bundled_points, published_points
from rlplan.accuracy.points import Measured, MeasuredPoint
from rlplan.accuracy.predictions import Prediction, Refusal
from rlplan.accuracy.training.job import training_job

KINDS = ("train_peak", "train_steady", "max_model_size")
POINTS = {point.id: point for point in bundled_points() if point.kind in KINDS}
TITAN = POINTS["titan-t1b-mem"]
PEFT = POINTS["peft-lora-rank10-target-mlp"]
LITGPT = POINTS["litgpt-l7-mb1"]


def compare_kind(kind: str) -> list[Comparison]:
    return [compare_point(point) for point in POINTS.values() if point.kind == kind]


def list_errors(kind: str) -> list[float]:
    return sorted(
        abs(comparison.relative_error) for comparison in compare_kind(kind) if comparison.relative_error is not None
    )


def change_settings(point: MeasuredPoint, **settings: Any) -> MeasuredPoint:
    """The point under other settings; None takes one away."""
    merged = {key: value for key, value in (point.settings | settings).items() if value is not None}
    return point.model_copy(update={"settings": merged})


def predict_value(point: MeasuredPoint) -> float:
    answer = predict(point)
    assert isinstance(answer, Prediction), answer
    assert not isinstance(answer.value, str)
    return answer.value


def find_reason(point: MeasuredPoint) -> str:
    answer = predict(point)
    assert isinstance(answer, Refusal), answer
    return answer.reason


def test_training_peaks_are_within_six_percent_at_the_median_and_fifteen_at_the_ninetieth_percentile() -> None:
    errors = list_errors("train_peak")
    assert len(errors) >= 0.75 * len(compare_kind("train_peak"))
    assert errors[len(errors) // 2] <= 0.06
    assert errors[int(0.9 * len(errors))] <= 0.15


def test_steady_states_are_within_two_percent() -> None:
    assert max(list_errors("train_steady")) <= 0.02


def test_a_steady_state_needs_no_tokens_and_no_shape() -> None:
    point = POINTS["ds-z3-6.86b-alloc"]
    assert predict_value(change_settings(point, seq=None, micro_batch=None, act_ckpt=None)) == predict_value(point)
    unknown = point.model_copy(update={"model": "somebody/a-model-of-their-own"})
    assert "not in the catalogue" in find_reason(unknown)


def test_deepspeeds_settings_are_read_as_its_config_and_as_tables_write_them() -> None:
    point = POINTS["ds-z3-6.86b-peak"]
    assert predict_value(change_settings(point, zero_stage=None, zero="ZeRO-3")) == predict_value(point)
    quoted = change_settings(point, param_persistence_threshold=None, stage3_param_persistence_threshold=0)
    assert predict_value(quoted) == predict_value(point)
    assert predict_value(change_settings(point, offload_optimizer={"device": "cpu"})) < predict_value(point) / 2
    assert "stages are 0 to 3" in find_reason(change_settings(point, zero_stage=4))


def test_the_largest_model_that_trains_is_the_one_that_was_trained() -> None:
    assert list_errors("max_model_size") == [0.0, 0.0]


def test_every_refusal_says_what_is_missing() -> None:
    refused = [comparison for kind in KINDS for comparison in compare_kind(kind) if comparison.relative_error is None]
    assert refused
    words = ("not stated", "catalogue", "a job", "cannot express", "is not known", "AutoTP does not cut")
    assert all(comparison.reason and any(word in comparison.reason for word in words) for comparison in refused)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"seq": None}, {"max_seq_length": 8192}),
        ({"lbs": None}, {"micro_batch_size": 2}),
        ({"ac": None}, {"activation_checkpointing": "selective op"}),
        ({"gpus": None}, {"num_gpus": 8}),
    ],
)
def test_a_setting_means_the_same_under_every_name(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert predict_value(change_settings(TITAN, **old, **new)) == predict_value(TITAN)


@pytest.mark.parametrize("key", ["seq", "lbs", "ac"])
def test_a_setting_that_decides_the_peak_is_never_guessed(key: str) -> None:
    assert "not stated" in find_reason(change_settings(TITAN, **{key: None}))


def test_samples_of_unknown_length_are_refused() -> None:
    base = POINTS["tt-3b-compile"]
    assert "not packed" in find_reason(change_settings(base, cumulative_techniques=["compile"]))


@pytest.mark.parametrize("method", ["boft", "hra", "qlora int8", "something new", "lora dpo", "vera", "dora"])
def test_a_method_that_no_job_says_is_refused(method: str) -> None:
    words = ("a job trains all weights, or LoRA", "NF4 is the only 4-bit format", "more passes than one")
    assert any(word in find_reason(change_settings(PEFT, method=method)) for word in words)


def test_the_number_of_trained_parameters_tells_which_layers_are_adapted() -> None:
    lora = training_job(PEFT.model_copy(update={"id": "lora-rank10"}))["training"]["lora"]
    assert (lora["rank"], lora["target_modules"]) == (10, ["down_proj", "gate_proj", "up_proj"])


def test_reserved_memory_is_more_than_allocated_and_the_process_has_more_still() -> None:
    values = []
    for unit in ("GiB max allocated", "GiB max reserved", "GiB nvidia-smi"):
        measured = TITAN.measured.model_copy(update={"unit": unit})
        values.append(predict_value(TITAN.model_copy(update={"measured": measured, "gpu": "8x H100 80GB"})))
    assert values[0] < values[1] < values[2]


def test_parts_add_up_to_the_peak() -> None:
    answer = predict(TITAN)
    assert isinstance(answer, Prediction)
    assert sum(answer.parts.values()) == pytest.approx(answer.value)


def test_more_tokens_need_more_and_recomputation_needs_less() -> None:
    assert (
        predict_value(change_settings(LITGPT, micro_batch=2))
        > predict_value(LITGPT)
        > predict_value(change_settings(LITGPT, act_ckpt=True))
    )


def test_every_technique_of_torchtunes_ladder_takes_less() -> None:
    techniques = ["packed", "compile", "chunked_ce", "act_ckpt", "adamw8bit"]
    base = POINTS["tt-3b-compile"]
    steps = [techniques[:count] for count in range(1, len(techniques) + 1)]
    values = [predict_value(change_settings(base, cumulative_techniques=step)) for step in steps]
    assert values == sorted(set(values), reverse=True)
    assert len(values) == len(steps)
    assert "a job cannot express that" in find_reason(
        change_settings(base, cumulative_techniques=["packed", "optimizer_in_bwd"])
    )


def test_fsdp2_inside_a_pipeline_is_refused_by_name() -> None:
    reason = find_reason(change_settings(TITAN, pp=4, gpus=32))
    assert reason == "torchtitan with pipeline or expert parallel ranks: a job cannot express that with FSDP2"


@pytest.mark.parametrize(("word", "policy"), [("selective 2", "every_other_layer"), (["mlp"], ("mlp",))])
def test_recomputation_is_read_in_the_words_of_trainers(word: Any, policy: str | tuple[str, ...]) -> None:
    training = training_job(change_settings(TITAN, ac=word))["training"]
    assert (training["gradient_checkpointing"], training["recomputed"]) == (True, policy)


def test_megatrons_peaks_are_within_their_bounds() -> None:
    """SimuMax's rows to 2 % on average, Megatron-Bridge's recipes, with modules that are recomputed, within 8 %."""
    values = {
        comparison.id: abs(comparison.relative_error or 0.0)
        for comparison in compare_kind("train_peak")
        if comparison.relative_error is not None
    }
    simumax = [error for name, error in values.items() if name.startswith("simumax-")]
    bridge = [error for name, error in values.items() if name.startswith("mb-")]
    assert len(simumax) == 11
    assert sum(simumax) / len(simumax) <= 0.02
    assert len(bridge) == 8
    assert max(bridge) <= 0.08


def test_a_module_that_is_recomputed_keeps_less_and_all_of_a_layer_least() -> None:
    base = POINTS["mb-moonlight-rc-none-mem"]
    words = ("none", "moe_act", "moe_act+layernorm", ["layernorm", "moe", "mla_up_proj"], "full")
    peaks = [predict_value(change_settings(base, recompute=word)) for word in words]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)
    spelled = change_settings(base, recompute=None, recompute_granularity="selective", recompute_modules=["moe_act"])
    assert predict_value(spelled) == peaks[1]
    assert "known are" in find_reason(change_settings(base, recompute="moe_act+attention"))


@pytest.mark.parametrize(
    ("gpu", "largest"), [("1x A100 80GB", "13b"), ("1x A6000 48GB", "6.7b"), ("1x RTX 3090", "2.7b")]
)
def test_smaller_gpus_train_smaller_models(gpu: str, largest: str) -> None:
    point = POINTS["dschat-max-a10080gb"].model_copy(update={"gpu": gpu})
    answer = predict(point)
    assert isinstance(answer, Prediction)
    assert answer.value == largest


VALUES = [None, 0, -1, 3, 1 << 39, 1e9, 2.5, True, False, "", "x", "full", [], {}, "lora r9999999", "qlora", "fp8"]
KEYS = ("tp", "pp", "cp", "sp", "zero_stage", "gpus", "micro_batch", "seq", "rank", "method", "compile", "quant")


def test_broken_settings_are_refused_and_never_raise() -> None:
    rng = random.Random(0)
    for _ in range(600):
        point = rng.choice(list(POINTS.values()))
        settings = {rng.choice([*point.settings, *KEYS]): rng.choice(VALUES) for _ in range(2)}
        comparison = compare_point(point.model_copy(update={"settings": point.settings | settings}))
        assert comparison.relative_error is not None or comparison.reason


def test_prime_rl_shards_and_accumulates_on_one_gpu_too() -> None:
    point = POINTS["primerl-qwen3-0.6b-rl-full-s16384-recompute-fa3-1xh100-mem"]
    answer = predict(point.model_copy(update={"measured": Measured(value=12.5, unit="GiB max allocated")}))
    assert isinstance(answer, Prediction)
    states = sum(answer.parts[kind] for kind in ("weights", "optimizer", "gradients"))
    assert states == pytest.approx(16 * 596_049_920 / 2**30, rel=0.01)
    assert predict_value(change_settings(point, task="SFT Full")) > 3 * predict_value(
        point
    )  # fp32 logits whole, not by chunks of words
    assert predict_value(change_settings(point, task="RL LoRA(r=16)", lora_rank=16)) < 0.6 * predict_value(point)
    errors = [
        abs(comparison.relative_error or 0)
        for comparison in compare_kind("train_peak")
        if comparison.id.startswith("primerl-")
    ]
    assert sorted(errors)[len(errors) // 2] <= 0.025
    assert max(errors) <= 0.17


def test_prime_rls_peak_is_what_torch_reserves_where_a_point_does_not_say() -> None:
    point = POINTS["primerl-qwen3-4b-rl-lora16-s16384-recompute-fa3-8xh200-mem"]
    stated = {unit: point.model_copy(update={"measured": point.measured.model_copy(update={"unit": unit})})
              for unit in ("GiB/GPU max reserved", "GiB/GPU max allocated")}  # fmt: skip
    assert (
        predict_value(point)
        == predict_value(stated["GiB/GPU max reserved"])
        > predict_value(stated["GiB/GPU max allocated"])
    )


def test_adapters_beside_experts_read_rows_of_their_own_unless_a_point_names_its_layers() -> None:
    point = POINTS["primerl-qwen3-30b-a3b-rl-lora16-s65536-recompute-fa3-8xh200-mem"]
    named = change_settings(point, lora_targets="q_proj,k_proj,v_proj,o_proj")
    rows = 4 * 8 * (2 * 2048 + 768) * 65536 / 2**30
    assert predict_value(point) - predict_value(named) == pytest.approx(rows, rel=0.2)


def test_a_model_of_which_a_run_has_the_first_layers_is_cut_to_them() -> None:
    name = "simumax-llama3-405b-l4-tp8-pp1-dp1-mbc4-mem"
    errors = [
        abs(comparison.relative_error or 0)
        for comparison in compare_kind("train_peak")
        if comparison.id.startswith("simumax-")
    ]
    assert len(errors) == 11
    assert sum(errors) / len(errors) <= 0.03
    assert max(errors) <= 0.08
    long = POINTS["simumax-llama3-70b-l12-tp1-cp8-pp1-dp1-seq131072-mbc4-mem"]
    assert predict_value(change_settings(long, ce_fusion=None)) > predict_value(long)
    assert predict_value(change_settings(POINTS[name], sequence_parallel=False)) > predict_value(POINTS[name])
    assert "'layers' is 5" in find_reason(change_settings(POINTS[name], layers=5))
    mixture = POINTS["simumax-deepseekv2-tp1-ep8-pp1-dp8-l4-mbc4-mem"]
    assert predict_value(change_settings(mixture, dense_layers=3)) < predict_value(mixture)


def test_attention_without_a_fused_kernel_is_refused_by_name() -> None:
    point = POINTS["ds-z3-6.86b-peak"]
    gpt_oss = point.model_copy(update={"model": "openai/gpt-oss-20b"})
    assert "gpt-oss in transformers needs an attention kernel" in find_reason(change_settings(gpt_oss, attn="eager"))
    assert "gpt-oss in transformers needs an attention kernel" in find_reason(change_settings(gpt_oss, attn=None))
    assert "no fused kernel shares one key head" in find_reason(point.model_copy(update={"model": "tiiuae/falcon-7b"}))


def test_megatrons_native_fusion_scatters_its_gradient_into_a_second_fp32_copy_of_the_logits() -> None:
    points = {point.id: point for point in published_points()}
    point = points["swift-q7b-32k-mem"]
    fp32_logits = 152064 / 4 * 32768 * 4 / 2**30
    assert predict_value(point) - predict_value(change_settings(point, ce_fusion_impl="te")) >= fp32_logits
    for name in ("swift-q7b-32k-mem", "swift-q14b-h20-bf16-mem"):
        assert compare_point(points[name]).relative_error == pytest.approx(0, abs=0.05)
