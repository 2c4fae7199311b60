"""TRL's trainers that are given their answers, and which of its trainers a file is for."""

from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import SpecError
from rlplan.foreign.check import Asked, check
from rlplan.foreign.convert import Imported, convert
from rlplan.foreign.documents import flatten_keys
from rlplan.foreign.source import read_source
from rlplan.spec.files.job_file import job_from
from rlplan.spec.resolved import settle

MODEL = "model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct\n"


def import_config(folder: Path, text: str, *outside: str, hardware: str = "1xH100") -> Imported:
    (folder / "train.yaml").write_text(MODEL + text)
    return convert(read_source(folder / "train.yaml", None, outside), hardware, None)


def job(folder: Path, text: str, *outside: str, hardware: str = "1xH100") -> dict[str, Any]:
    return flatten_keys(import_config(folder, text, *outside, hardware=hardware).data)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("packing: true\n", "sft"),
        ("label_smoothing: 0.1\n", "dpo"),
        ("desirable_weight: 1.0\n", "kto"),
        ("center_rewards_coefficient: 0.01\n", "reward_modeling"),
        ("num_generations: 8\n", "grpo"),
        ("trainer: sft\n", "sft"),
    ],
)
def test_a_yaml_file_is_for_the_trainer_that_alone_has_its_keys(text: str, name: str, tmp_path: Path) -> None:
    assert job(tmp_path, text)["algorithm.name"] == name


@pytest.mark.parametrize("text", ["per_device_train_batch_size: 8\n", "max_length: 2048\n", ""])
@pytest.mark.parametrize("source", [None, "trl", "trl_given"])
def test_a_yaml_file_that_any_trainer_could_read_is_refused_and_its_way_out_can_be_typed(
    text: str, source: str | None, tmp_path: Path
) -> None:
    (tmp_path / "train.yaml").write_text(MODEL + text)
    with pytest.raises(SpecError, match=r"which of TRL's trainers(?s:.*)--set trainer=sft"):
        read_source(tmp_path / "train.yaml", source)
    for trainer, name in (("sft", "sft"), ("grpo", "grpo")):
        settings = read_source(tmp_path / "train.yaml", source, [f"trainer={trainer}"])
        assert flatten_keys(convert(settings, "1xH100", None).data)["algorithm.name"] == name


def test_a_trainer_that_is_not_read_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("trl rloo --model_name_or_path Qwen/Qwen2.5-0.5B --num_generations 2\n")
    with pytest.raises(SpecError, match="rloo, a trainer of TRL, is not read"):
        read_source(tmp_path / "train.sh", None)


@pytest.mark.parametrize("trainer", ["sft", "dpo", "kto"])
@pytest.mark.parametrize("liger", ["true", "false"])
def test_logits_are_in_chunks_whatever_liger_is_told(trainer: str, liger: str, tmp_path: Path) -> None:
    """TRL 1.16.0, sft_trainer.py, dpo_trainer.py, kto_trainer.py: `add_fused_lm_head`, unconditional."""
    read = import_config(tmp_path, f"trainer: {trainer}\nuse_liger_kernel: {liger}\n", hardware="1xH100")
    assert settle(job_from(read.data, ())).training.logits == "fused"


def peak(folder: Path, text: str, *overrides: str) -> int:
    (folder / "train.yaml").write_text(MODEL + text)
    plan = check(read_source(folder / "train.yaml", None), Asked("1xH100", overrides=overrides)).plan
    assert plan is not None
    return plan.binding.num_bytes


SIZE = 1_543_714_304
"""Parameters of Qwen2.5-1.5B, its tied table once."""


def test_a_reference_in_float32_takes_two_bytes_a_parameter_more_and_one_that_is_computed_before_none(
    tmp_path: Path,
) -> None:
    whole = peak(tmp_path, "trainer: dpo\n")
    assert whole - peak(tmp_path, "trainer: dpo\n", "roles.reference.dtype=bfloat16") == pytest.approx(
        2 * SIZE, rel=0.01
    )
    assert whole - peak(tmp_path, "trainer: dpo\nprecompute_ref_log_probs: true\n") >= 4 * SIZE


def test_a_reference_is_kept_in_the_type_of_the_policy_s_weights(tmp_path: Path) -> None:
    """TRL 1.16.0, dpo_trainer.py: `ref_model_init_kwargs.setdefault("dtype", self.model.dtype)`, float32 by default."""
    usual = job(tmp_path, "trainer: dpo\n")
    half = job(tmp_path, "trainer: dpo\ndtype: bfloat16\n")
    deepspeed = job(tmp_path, "trainer: dpo\naccelerate_config: zero3\n")
    assert usual["roles.reference.dtype"] == "float32"
    assert "roles.reference.dtype" not in half
    assert "roles.reference.dtype" not in deepspeed
    grpo = job(tmp_path, "trainer: grpo\nbeta: 0.04\n")
    assert grpo["roles.reference.dtype"] == "float32"
    assert "roles.reference.dtype" not in job(tmp_path, "trainer: grpo\n")


def test_log_probs_of_a_reference_that_are_computed_before_training_need_no_reference(tmp_path: Path) -> None:
    imported = import_config(tmp_path, "trainer: dpo\nprecompute_ref_log_probs: true\n")
    assert flatten_keys(imported.data)["roles.reference.is_precomputed"] is True
    assert any("before training" in note for note in imported.notes)
    assert not any(entry.key == "precompute_ref_log_probs" for entry in imported.left)


def test_kto_trains_on_as_many_answers_a_pass_as_it_is_told(tmp_path: Path) -> None:
    """TRL 1.16.0, kto_trainer.py: the pass with gradients is over the batch; that for the KL term has none."""
    imported = import_config(tmp_path, "trainer: kto\nper_device_train_batch_size: 8\n")
    work = flatten_keys(imported.data)
    assert (work["workload.micro_batch_size_per_gpu"], work["workload.num_prompts_per_step"]) == (8, 8)


def test_sequences_without_a_limit_are_said_to_be_counted_at_one(tmp_path: Path) -> None:
    imported = import_config(tmp_path, "trainer: sft\nmax_length: null\n")
    work = flatten_keys(imported.data)
    assert work["workload.max_prompt_len"] + work["workload.max_response_len"] == 1024
    assert any(note.startswith("max_length=None cuts nothing") for note in imported.notes)
    longer = job(tmp_path, "trainer: sft\nmax_length: null\n", "max_length=4096")
    assert longer["workload.max_prompt_len"] + longer["workload.max_response_len"] == 4096


def test_a_base_in_8_bits_is_counted_in_half_with_a_note_that_it_takes_less(tmp_path: Path) -> None:
    imported = import_config(tmp_path, "trainer: sft\nuse_peft: true\nload_in_8bit: true\n")
    assert flatten_keys(imported.data)["training.master_dtype"] == "bfloat16"
    assert "an 8-bit base is predicted in bfloat16, a byte per parameter more than it takes" in imported.notes


def test_adapters_of_a_reward_model_are_said_not_to_be_counted(tmp_path: Path) -> None:
    imported = import_config(tmp_path, "trainer: reward\nuse_peft: true\n")
    assert "training.lora.rank" not in flatten_keys(imported.data)
    assert any(note.startswith("adapters of a reward model are ignored") for note in imported.notes)


def test_an_optimizer_step_of_several_generations_is_one_step(tmp_path: Path) -> None:
    """A generation gives 4 rollouts, and 64 are accumulated: `generation_batch_size` 4 of `num_generations` 4."""
    text = "num_generations: 4\ngeneration_batch_size: 4\nper_device_train_batch_size: 1\n"
    imported = job(tmp_path, text + "gradient_accumulation_steps: 64\n")
    assert (imported["workload.num_prompts_per_step"], imported["workload.mini_batch_size"]) == (16, 64)
    assert imported["rollout.max_num_seqs"] == 4


def test_sizes_that_do_not_divide_are_named_with_their_values(tmp_path: Path) -> None:
    text = "num_generations: 6\nper_device_train_batch_size: 1\n"
    with pytest.raises(SpecError) as caught:
        job(tmp_path, text)
    assert caught.value.what == (
        "per_device_train_batch_size = 1 x hardware.num_devices = 1 x gradient_accumulation_steps = 1 "
        "/ num_generations = 6 is not a whole number"
    )
    assert caught.value.way_out == "--set num_generations=VALUE or --set per_device_train_batch_size=VALUE"
