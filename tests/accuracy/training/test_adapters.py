"""Adapters beside frozen weights: what a rank of Megatron-Core holds of both, and that no part falls below zero."""

import random

import pytest

from rlplan.accuracy.compare import compare_point, predict
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.predictions import Prediction
from rlplan.spec.models.catalogue import find_model

SWIFT = {
    "framework": "Megatron-LM (megatron sft of ms-swift)",
    "gpus": 2,
    "tp": 1,
    "pp": 1,
    "ep": 2,
    "micro_batch": 8,
    "seq": 2048,
    "precision": "bf16",
    "recompute": "full uniform",
    "ce_fusion": True,
    "method": "lora",
    "lora_r": 8,
    "targets": "all-linear",
}
GIB_EACH = {"value": 62.0, "unit": "GiB/GPU max reserved"}
MIXTURE = MeasuredPoint(
    id="megatron-lora-mixture",
    kind="train_peak",
    model="Qwen/Qwen3-30B-A3B",
    gpu="2x A100-80GB",
    settings=SWIFT,
    measured=GIB_EACH,  # type: ignore[arg-type]
    source="https://github.com/modelscope/ms-swift/blob/main/examples/megatron/lora/moe.sh",
)
"""Published: the first line of the script says `2 * 62GiB`."""


def predict_parts(point: MeasuredPoint) -> dict[str, float]:
    answer = predict(point)
    assert isinstance(answer, Prediction), answer
    return answer.parts


def test_a_megatron_rank_with_adapters_holds_its_share_of_the_frozen_mixture() -> None:
    """Worked by hand: with ep 2 a rank holds half of the experts of 30.5 billion weights, and adapters of rank 8."""
    model = find_model("Qwen/Qwen3-30B-A3B")
    experts = 48 * 128 * 3 * 2048 * 768
    frozen = 2 * (model.num_parameters - experts + experts // 2)
    beside_experts = 48 * 64 * 3 * 8 * (2048 + 768)
    in_attention = 48 * 8 * ((2048 + 4096) * 2 + (2048 + 512) * 2)
    trained = beside_experts + in_attention
    parts = predict_parts(MIXTURE)
    assert parts["weights"] == pytest.approx((frozen + 2 * trained) / 2**30, rel=1e-3)
    assert parts["gradients"] == pytest.approx(4 * trained / 2**30, rel=1e-3)


def test_a_published_peak_of_megatron_lora_on_a_mixture_is_predicted_within_a_fifth() -> None:
    error = compare_point(MIXTURE).relative_error
    assert error is not None
    assert abs(error) <= 0.2


def test_no_part_of_a_training_peak_is_below_zero_whatever_is_trained_and_however_it_is_cut() -> None:
    rng, predicted = random.Random(0), 0
    models = ("Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V2-Lite", "openai/gpt-oss-20b", "Qwen/Qwen2.5-7B")
    for _ in range(500):
        cut = {axis: rng.choice((1, 1, 2, 4, 8)) for axis in ("tp", "pp", "ep", "etp", "cp")}
        changed = SWIFT | cut | {"gpus": rng.choice((1, 2, 8, 16, 64))}
        changed["framework"] = rng.choice(("Megatron-LM", "Megatron-Bridge", "torchtune", "prime-rl", "DeepSpeed"))
        changed["method"] = rng.choice(("lora", "full", "qlora", "dora"))
        changed["targets"] = rng.choice(("all-linear", "q_proj,v_proj", None))
        changed["zero_stage"] = rng.choice((None, 3)) if changed["framework"] == "DeepSpeed" else None
        settings = {key: value for key, value in changed.items() if value is not None}
        answer = predict(MIXTURE.model_copy(update={"model": rng.choice(models), "settings": settings}))
        if isinstance(answer, Prediction):
            predicted += 1
            assert min(answer.parts.values()) >= 0, (settings, answer.parts)
    assert predicted >= 20  # 60 before a plan had to be able to run it


def test_a_part_below_zero_is_a_bug_of_ours() -> None:
    with pytest.raises(AssertionError, match=r"weights = -1\.5, below 0"):
        Prediction(3.0, parts={"weights": -1.5, "logits": 4.5})
