"""Predicted against measured: ranges, verdicts, refusals, and settings that no predictor may stumble over."""

from typing import Any

import pytest

from rlplan.accuracy.compare import AccuracyReport, compare, compare_point, relative_error
from rlplan.accuracy.named_models import has_quantized_name, model_by_name
from rlplan.accuracy.points import MeasuredPoint, Statistic
from rlplan.accuracy.predict import validate_job
from rlplan.accuracy.predictions import CannotPredict, Prediction
from rlplan.accuracy.serving_points import engine_job
from rlplan.accuracy.settings import find_gpu
from rlplan.planner.serving import ServingJob


def make_point(kind: str = "vllm_weights", **overrides: Any) -> MeasuredPoint:
    fields: dict[str, Any] = {
        "id": "a",
        "kind": kind,
        "model": "meta-llama/Llama-3.1-8B",
        "gpu": "H100 80GB",
        "settings": {"tp": 1},
        "measured": {"value": 15.0, "unit": "GiB"},
    }
    return MeasuredPoint(**fields | overrides)


@pytest.mark.parametrize(("predicted", "error"), [(3.0, -0.25), (4.0, 0.0), (4.5, 0.0), (6.0, 0.2)])
def test_a_range_is_hit_inside_and_missed_by_its_nearest_bound(predicted: float, error: float) -> None:
    point = make_point(measured={"value": [4, 5], "unit": "GiB"})
    assert relative_error(point, Prediction(predicted)) == pytest.approx(error)


def test_a_verdict_is_right_or_wrong() -> None:
    point = make_point(measured={"value": "13b", "unit": "largest model"})
    assert relative_error(point, Prediction("13b", is_right=True)) == 0
    assert relative_error(point, Prediction("30b", is_right=False)) == 1


def test_a_summary_has_median_largest_and_bias() -> None:
    points = [make_point(id=str(value), measured={"value": value, "unit": "GiB"}) for value in (14.0, 15.0, 16.0)]
    report = compare(points)
    assert isinstance(report, AccuracyReport)
    assert set(report.as_json()["summary"]["vllm_weights"]) == {
        *("n", "predicted", "median_abs", "max_abs", "bias", "inside")
    }
    assert set(report.as_json()["points"][0]) == {
        *("id", "kind", "measured", "predicted", "unit", "relative_error", "interval", "status"),
        *("reason", "without_effect", "assumed"),
    }
    summary = report.summary["vllm_weights"]
    assert summary.max_abs == pytest.approx(14.98875 / 14 - 1, rel=1e-4)


def test_an_unknown_kind_is_refused_with_the_nearest_one() -> None:
    compare([])
    assert "vllm_weights" in (compare_point(make_point("vllm_weigths")).reason or "")


HOSTILE = [None, -1, 0, 1.5, 10**30, True, "x" * 10_000, [], {}, float("1e308")]


@pytest.mark.parametrize("kind", ["vllm_weights", "vllm_kv", "kv_per_token", "serving_tpot", "param_count"])
@pytest.mark.parametrize("key", ["tp", "dtype", "max_model_len", "available_kv_gib", "isl", "vllm", "quant", "config"])
def test_hostile_settings_are_predicted_or_refused_and_never_break(kind: str, key: str) -> None:
    compare([])
    for value in HOSTILE:
        compared = compare_point(make_point(kind, settings={"osl": 10, "max_seq_len": 100, key: value}))
        assert compared.status in ("predicted", "refused")


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8", 8_030_261_248),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", 7_615_616_512),
        ("Qwen2.5-1.5B-class", 1_543_714_304),
        ("Mistral-7B-Instruct-v0.3", 7_248_023_552),
        ("google/gemma-2-9b-it", 9_241_705_984),
    ],
)
def test_models_are_found_by_the_names_that_people_use(name: str, num_parameters: int) -> None:
    assert model_by_name(name).num_parameters == num_parameters


@pytest.mark.parametrize("name", ["72B class", "large MoE, Megatron", "", "x" * 5000, "Qwen/Qwen99-7B"])
def test_models_that_nobody_knows_are_refused(name: str) -> None:
    with pytest.raises(CannotPredict):
        model_by_name(name)


def test_a_config_of_a_point_says_how_its_weights_are_quantised() -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 256,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64},
    }
    point = make_point(settings={"config": config, "tp": 1})
    assert has_quantized_name(point)
    quantized = ServingJob(validate_job(engine_job(point))).quantization
    assert quantized is not None
    assert (quantized.form.name, quantized.form.block) == ("awq", (1, 64))


@pytest.mark.parametrize(
    ("unit", "statistic"),
    [
        ("GiB max reserved", Statistic.RESERVED),
        ("GB (1e9) max allocated", Statistic.ALLOCATED),
        ("GB average allocated", Statistic.MEAN_ALLOCATED),
        ("GiB/GPU", Statistic.UNSTATED),
    ],
)
def test_the_unit_says_what_was_counted(unit: str, statistic: Statistic) -> None:
    assert make_point(measured={"value": 1.0, "unit": unit}).measured.statistic is statistic


@pytest.mark.parametrize(
    ("words", "profile"),
    [
        ("8x H100 80GB", "h100-sxm"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("A100-SXM4-40GB", "a100-sxm-40gb"),
        ("a100_sxm", "a100-sxm-80gb"),
        ("b200_sxm", "b200"),
        ("V100-SXM2-32GB", "v100-sxm-32gb"),
        ("1x NVIDIA L4 24GB", "l4"),
        ("Tesla T4", "t4"),
        ("RTX A6000 48GB", "rtx-a6000"),
        ("80GB-class", None),
        ("", None),
        ("x" * 10_000, None),
    ],
)
def test_gpus_are_found_by_the_words_of_logs_and_issues(words: str, profile: str | None) -> None:
    gpu = find_gpu(make_point(gpu=words))
    assert (gpu.name if gpu else None) == profile


def test_a_dtype_of_fp8_says_what_is_quantised() -> None:
    compare([])
    plain, quantised = (compare_point(make_point(settings={"dtype": dtype})).predicted for dtype in ("bf16", "fp8"))
    assert isinstance(plain, float)
    assert isinstance(quantised, float)
    assert 0.5 < quantised / plain < 0.6, "embeddings and head stay"
