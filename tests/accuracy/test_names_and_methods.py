"""Names of models and GPUs as sources write them, methods of adapters, losses, passes without gradient."""

from typing import Any

import pytest

from rlplan.accuracy.compare import predict
from rlplan.accuracy.files.reading import bundled_points
from rlplan.accuracy.named_models import model_by_name, shape_entries
from rlplan.accuracy.points import Measured, MeasuredPoint
from rlplan.accuracy.predictions import CannotPredict, Prediction, Refusal
from rlplan.accuracy.settings import find_gpu

POINTS = {point.id: point for point in bundled_points()}
PEFT = POINTS["peft-lora-rank10-target-mlp"].model_copy(update={"id": "peft"})
GIB = Measured(value=1.0, unit="GiB max allocated")


def predict_value(point: MeasuredPoint) -> float:
    answer = predict(point)
    assert isinstance(answer, Prediction), answer
    assert isinstance(answer.value, int | float)
    return float(answer.value)


@pytest.mark.parametrize("name", [name for name, entry in shape_entries().items() if "num_parameters" in entry])
def test_a_shape_beside_the_catalogue_has_its_published_number_of_parameters(name: str) -> None:
    assert model_by_name(name).num_parameters == shape_entries()[name]["num_parameters"]


def test_every_shape_beside_the_catalogue_is_read() -> None:
    assert all(model_by_name(name).num_parameters > 10**7 for name in shape_entries())


@pytest.mark.parametrize(
    ("spelled", "meant"),
    [
        ("Llama 2 7B", "meta-llama/Llama-2-7b-hf"),
        ("llama3.1-70b instruct", "meta-llama/Llama-3.1-70B"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "mistralai/Mistral-Small-24B-Base-2501"),
        ("Qwen/Qwen3-4B-Thinking-2507", "Qwen/Qwen3-4B"),
        ("NousResearch/Hermes-3-Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("casperhansen/llama-3-70b-instruct-awq", "meta-llama/Meta-Llama-3-70B"),
        ("lmsys/vicuna-13b-v1.3", "meta-llama/Llama-2-13b-hf"),
    ],
)
def test_a_model_is_known_by_its_spellings_and_its_fine_tunes(spelled: str, meant: str) -> None:
    assert model_by_name(spelled).num_parameters == model_by_name(meant).num_parameters


@pytest.mark.parametrize(
    "name", ["Qwen3-Embedding-8B", "7B", "llama", "Qwen/Qwen2.5-0.5B (tiny)", "Llama-3.1-8B-draft"]
)
def test_a_name_that_may_be_another_shape_is_refused(name: str) -> None:
    with pytest.raises(CannotPredict, match="not in the catalogue"):
        model_by_name(name)


@pytest.mark.parametrize(
    ("gpu", "profile"),
    [
        ("4xH100", "h100-sxm"),
        ("NVIDIA A10G", "a10g"),
        ("RTX PRO 6000 Blackwell", "rtx-pro-6000"),
        ("GH200 144GB", None),
    ],
)
def test_a_gpu_is_known_by_its_spellings_and_never_by_another_size(gpu: str, profile: str | None) -> None:
    known = find_gpu(PEFT.model_copy(update={"gpu": gpu}))
    assert (known.name if known else None) == profile


def test_an_average_of_reserved_memory_is_refused() -> None:
    unit = Measured(value=1.0, unit="bytes, avg reserved")
    assert isinstance(predict(PEFT.model_copy(update={"measured": unit})), Refusal)


def test_a_stated_loss_decides_the_logits() -> None:
    settings = {"micro_batch": 1, "seq": 4096, "act_ckpt": True, "method": "full", "framework": "torch"}
    point = MeasuredPoint(id="a", kind="train_peak", model="Qwen/Qwen2.5-0.5B", measured=GIB)
    plain, in_place, fused = (
        predict_value(point.model_copy(update={"settings": settings | {"loss": loss}}))
        for loss in ("plain", "in_place", "fused")
    )
    assert plain > in_place > fused
    assert plain - in_place == pytest.approx(151_936 * 4096 * 6 / 2**30, rel=0.02)  # 12 bytes a word against 6


def test_a_scoring_pass_holds_weights_and_logits_and_a_value_model_no_logits() -> None:
    point = MeasuredPoint(
        id="a", kind="logprob_peak", model="Qwen/Qwen2.5-0.5B", measured=GIB, settings={"micro_batch": 1, "seq": 4096}
    )
    reference, value = (
        predict_value(point.model_copy(update={"settings": {**point.settings, "role": role}}))
        for role in ("reference", "value")
    )
    weights = predict_value(point.model_copy(update={"kind": "logprob_steady"}))
    assert weights == pytest.approx(2 * 494_032_768 / 2**30)
    assert reference - weights == pytest.approx(10 * 151_936 * 1024 / 2**30, rel=0.01)  # 1,024 rows at a time
    assert value < reference
    tiny = point.model_copy(update={"settings": {**point.settings, "is_tiny": True}})
    assert isinstance(predict(tiny), Refusal)


def test_old_engines_load_the_same_weights_and_their_profile_is_refused() -> None:
    point = MeasuredPoint(
        id="a",
        kind="vllm_weights",
        model="Llama-2-7b",
        settings={"vllm": "0.4.2"},
        measured=Measured(value=1, unit="GiB"),
    )
    assert predict_value(point) == pytest.approx(12.55, abs=0.01)
    assert isinstance(predict(point.model_copy(update={"kind": "vllm_activation_peak"})), Refusal)


def refusal(kind: str, **settings: Any) -> str:
    measured = Measured(value=1.0, unit="GiB")
    point = MeasuredPoint(id="a", kind=kind, model="Qwen/Qwen3-8B", gpu="H100", settings=settings, measured=measured)
    answer = predict(point)
    assert isinstance(answer, Refusal), answer
    return answer.reason


@pytest.mark.parametrize("key", ["tp", "pp", "ep", "dcp"])
def test_more_ranks_than_any_machine_has_are_refused(key: str) -> None:
    for kind in ("vllm_weights", "kv_per_token"):
        assert "ranks" in refusal(kind, available_kv_gib=20.0, **{key: 10**9})
