"""Every setting of a point is read, or refuses it by name, or is listed as without effect with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlplan.accuracy.compare import Comparison, compare, predict
from rlplan.accuracy.files.reading import bundled_points, read_points
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.predictions import Prediction

SETTINGS: dict[str, Any] = {"framework": "torch", "seq": 1024, "micro_batch": 1, "act_ckpt": True, "dtype": "bf16"}


def compare_training(folder: Path, **settings: Any) -> Comparison:
    """The comparison by `rlplan accuracy FILE` of one training peak in the user's own file."""
    beside = settings.pop("beside", {})
    point = {
        "id": "mine",
        "kind": "train_peak",
        "model": "Qwen/Qwen2.5-7B",
        "gpu": "1x H100",
        "settings": {key: value for key, value in (SETTINGS | settings).items() if value is not None},
        "measured": {"value": 20.0, "unit": "GiB/GPU max allocated"},
        **beside,
    }
    (folder / "points.json").write_text(json.dumps([point]))
    return compare(read_points(folder / "points.json")).points[0]


def gib(folder: Path, **settings: Any) -> float:
    comparison = compare_training(folder, **settings)
    assert isinstance(comparison.predicted, float), comparison.reason
    return comparison.predicted


def reason(folder: Path, **settings: Any) -> str:
    comparison = compare_training(folder, **settings)
    assert comparison.reason is not None, comparison.predicted
    return comparison.reason


def test_a_point_with_a_lora_rank_is_read_as_lora(tmp_path: Path) -> None:
    """Worked by hand: 7.6e9 weights of 2 bytes are 14.2 GiB; full training in bf16 keeps four of that size."""
    full, lora = gib(tmp_path), gib(tmp_path, lora_rank=64)
    assert full > 4 * 14.1
    assert 14.2 < lora < 20
    assert gib(tmp_path, lora_rank=8) < lora
    assert gib(tmp_path, lora_rank=0) == full


@pytest.mark.parametrize(
    "spelled",
    [
        {"lora_r": 64},
        {"rank": 64},
        {"lora": {"rank": 64}},
        {"lora": True, "r": 64},
        {"method": "lora", "lora_rank": 64, "lora_alpha": 32},
        {"task": "SFT LoRA(r=64)"},
    ],
)
def test_lora_is_read_from_the_spellings_that_people_use(tmp_path: Path, spelled: dict[str, Any]) -> None:
    assert gib(tmp_path, **spelled) == gib(tmp_path, lora_rank=64)


@pytest.mark.parametrize("key", ["lora_targets", "targets", "target_modules", "lora_target_modules"])
def test_adapted_layers_are_read(tmp_path: Path, key: str) -> None:
    attention = gib(tmp_path, lora_rank=64, **{key: "q_proj,k_proj,v_proj,o_proj"})
    assert attention == gib(tmp_path, lora_rank=64, **{key: ["q", "k", "v", "o"]})
    assert attention < gib(tmp_path, lora_rank=64, **{key: "all-linear"})
    assert "names layer 'lm_head'" in reason(tmp_path, lora_rank=64, **{key: "q_proj,lm_head"})


def test_what_adapters_and_frozen_weights_are_kept_in_is_read(tmp_path: Path) -> None:
    plain = gib(tmp_path, lora_rank=64, lora_targets="all-linear", act_ckpt=False)
    assert gib(tmp_path, lora_rank=64, lora_targets="all-linear", act_ckpt=False, adapters="policy, fp32") > plain
    twice = {"lora_rank": 64, "lora_targets": "all-linear", "adapters": "policy + reference adapter, fp32"}
    assert "a second set of adapters" in reason(tmp_path, **twice)
    assert gib(tmp_path, lora_rank=64, base_dtype="nf4") < gib(tmp_path, lora_rank=64, base_dtype="bf16") - 8
    dropped, kept = (gib(tmp_path, lora_rank=64, act_ckpt=False, lora_dropout=value) for value in (0.05, 0))
    assert dropped > kept
    assert "says 'purple'" in reason(tmp_path, lora_rank=64, adapters="purple")


def test_a_setting_that_nobody_reads_is_refused_by_name_and_never_dropped(tmp_path: Path) -> None:
    text = reason(tmp_path, lora_rnk=64)
    assert "setting 'lora_rnk' is 64, which no formula of train_peak reads" in text
    assert "Did you mean 'lora_rank'?" in text
    assert "'freeze_layers'" in reason(tmp_path, freeze_layers=20)
    assert "'lora_scope'" in reason(tmp_path, lora_rank=8, lora={"scope": "vision"})
    assert gib(tmp_path, note="freeze_layers 20", freeze_layers=None) == gib(tmp_path)


def test_a_key_beside_the_settings_counts_as_one(tmp_path: Path) -> None:
    assert gib(tmp_path, beside={"lora_rank": 64}) == gib(tmp_path, lora_rank=64)
    assert "'setings'" in reason(tmp_path, beside={"setings": {"lora_rank": 64}})


def test_settings_without_effect_are_listed_with_the_reason(tmp_path: Path) -> None:
    comparison = compare_training(
        tmp_path, tokens_per_s=1650, dataset="alpaca", attn="sdpa", lora_rank=8, lora_alpha=16
    )
    assert comparison.without_effect == {
        "tokens_per_s": "was measured or estimated beside this point",
        "dataset": "says where the number comes from",
        "attn": "no kernel of flash attention stores scores",
        "lora_alpha": "scales what adapters give; no bytes",
    }
    assert "'attn' is 'eager'" in reason(tmp_path, attn="eager")


def test_what_is_taken_where_nothing_is_stated_is_listed(tmp_path: Path) -> None:
    assert compare_training(tmp_path, optimizer=None, dtype=None).assumed == {"optimizer": "adamw", "precision": "bf16"}
    assert compare_training(tmp_path, optimizer="adamw", dtype="bf16").assumed == {}


@pytest.mark.parametrize("kind", ["train_peak", "train_steady", "vllm_weights"])
def test_a_size_that_was_measured_in_no_unit_of_size_is_refused_whatever_the_kind(tmp_path: Path, kind: str) -> None:
    measured = {"kind": kind, "measured": {"value": 20.0, "unit": "tokens"}}
    assert reason(tmp_path, beside=measured) == "unit 'tokens' is no size"


def test_settings_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    assert "full training, and setting 'lora_rank' speaks of LoRA" in reason(tmp_path, method="full", lora_rank=8)
    assert "'max_length' is 4096" in reason(tmp_path, max_length=4096)
    assert gib(tmp_path, max_length=1024) == gib(tmp_path)
    assert "does not divide 1 GPUs" in reason(tmp_path, gpus=1, dp=3)
    assert "do not say which type" in reason(tmp_path, dtype=None, bf16=False)


def test_an_algorithm_with_models_of_its_own_is_refused_and_one_pass_of_lora_is_not(tmp_path: Path) -> None:
    assert "GRPO has passes or models beside the policy's" in reason(tmp_path, algo="grpo")
    assert gib(tmp_path, algo="grpo", lora_rank=8) == gib(tmp_path, lora_rank=8)
    assert "PPO" in reason(tmp_path, algo="ppo", lora_rank=8)


def test_gradients_that_accumulate_are_there_before_the_last_pass(tmp_path: Path) -> None:
    assert gib(tmp_path, grad_accum=8, seq=8192) > gib(tmp_path, grad_accum=1, seq=8192)


def test_degrees_of_parallelism_say_how_many_gpus_there_are_where_nothing_else_does(tmp_path: Path) -> None:
    many = gib(tmp_path, zero_stage=3, dp=8, beside={"gpu": "H100"})
    assert many == gib(tmp_path, zero_stage=3, gpus=8)


def test_of_every_bundled_prediction_all_settings_are_read_or_listed() -> None:
    points = [point for point in bundled_points() if not point.kind.startswith("serving")]
    for point in points:
        unknown = point.model_copy(update={"settings": point.settings | {"zzz_unknown": 1}})
        if isinstance(predict(point), Prediction):
            answer = predict(unknown)
            assert not isinstance(answer, Prediction), point.id
            assert "'zzz_unknown' is 1" in answer.reason


def test_a_hand_over_and_an_rl_step_drop_no_setting_either() -> None:
    for kind in ("rl_step_time", "weight_sync_time"):
        points = (point for point in bundled_points() if point.kind == kind)
        point = next(point for point in points if isinstance(predict(point), Prediction))
        answer = predict(MeasuredPoint.model_validate(point.model_dump() | {"interruption_budget": 4}))
        assert not isinstance(answer, Prediction)
        assert "'interruption_budget' is 4" in answer.reason
