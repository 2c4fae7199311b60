"""LLaMA-Factory's YAML as jobs; facts of its argument classes and adapters at the table's commit."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import SpecError
from rlplan.foreign.check import Asked, import_job
from rlplan.foreign.source import read_source
from rlplan.spec.job import JobSpec

DPO: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen2.5-7B-Instruct",
    "stage": "dpo",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_target": "all",
    "pref_beta": 0.1,
    "pref_loss": "sigmoid",
    "cutoff_len": 2048,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "learning_rate": 5.0e-6,
    "bf16": True,
}
Z3 = {"deepspeed": "examples/deepspeed/ds_z3_config.json"}


def import_yaml(folder: Path, data: dict[str, Any]) -> JobSpec:
    path = folder / "train.yaml"
    path.write_text(json.dumps(data))
    return import_job(read_source(path, None), Asked("8xH100"))[1]


def test_preferences_with_adapters_are_read(tmp_path: Path) -> None:
    """Upstream's alpha is twice the rank; adapters are in float32, the base is in 16 bits."""
    job = import_yaml(tmp_path, DPO)
    assert job.training.lora is not None
    assert (job.training.lora.rank, job.training.lora.alpha, job.training.lora.dtype) == (8, 16, "float32")
    assert (job.algorithm.name, job.algorithm.kl_coef, job.workload.num_prompts_per_step) == ("dpo", 0.1, 64)
    assert (job.workload.max_seq_len, job.workload.micro_batch_size_per_gpu) == (2048, 2)


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({}, {"master_dtype": "float32", "gradient_checkpointing": True, "logits": "auto"}),
        ({"pure_bf16": True}, {"master_dtype": "bfloat16"}),
        (Z3, {"zero_stage": 3, "master_dtype": "float32"}),
        ({"deepspeed": "examples/deepspeed/ds_z3_offload_config.json"}, {"offloads_parameters": True}),
        ({"disable_gradient_checkpointing": True}, {"gradient_checkpointing": False}),
        ({"use_unsloth_gc": True}, {"offloads_activations": True}),
        ({"bf16": False}, {"dtype": "float32"}),
        ({"enable_liger_kernel": True}, {"logits": "fused"}),
        ({"optim": "paged_adamw_8bit"}, {"optimizer": "adamw_8bit"}),
        ({"finetuning_type": "lora", "quantization_bit": 4}, {"backend": "deepspeed"}),
    ],
)
def test_trainer_settings_are_read(changes: dict[str, Any], facts: dict[str, Any], tmp_path: Path) -> None:
    job = import_yaml(tmp_path, DPO | {"stage": "sft", "finetuning_type": "full"} | changes)
    assert {key: getattr(job.training, key) for key in facts} == facts


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_reward_model_has_the_logits_of_its_language_head(kind: str, tmp_path: Path) -> None:
    """Upstream loads a value head beside the language head, which computes and upcasts all logits."""
    job = import_yaml(tmp_path, DPO | {"stage": "rm", "finetuning_type": kind})
    assert (job.algorithm.name, job.training.logits) == ("dpo", "in_place")
    assert job.roles.reference.is_precomputed


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"finetuning_type": "freeze"}, "last layers"),
        ({"finetuning_type": "full", "use_galore": True}, "GaLore"),
        ({"finetuning_type": "full", "use_badam": True}, "BAdam"),
        ({"use_unsloth": True}, "Unsloth"),
        ({"use_kt": True}, "KTransformers"),
        ({"stage": "ppo", "reward_model": "x"}, "PPO"),
        ({"do_train": False, "do_predict": True}, "trains nothing"),
        ({"tensor_model_parallel_size": 4}, "Megatron"),
    ],
)
def test_what_no_job_can_state_is_refused_for_that_reason(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as refused:
        import_yaml(tmp_path, DPO | changes)
    assert words in refused.value.rule


def test_a_command_names_the_file_and_overrides_its_keys(tmp_path: Path) -> None:
    (tmp_path / "dpo.yaml").write_text(json.dumps(DPO))
    (tmp_path / "run.sh").write_text(
        "FORCE_TORCHRUN=1 NNODES=2 NPROC_PER_NODE=8 llamafactory-cli train dpo.yaml cutoff_len=4096 lora_rank=16 "
        "--lora_target q_proj,v_proj\n"
    )
    job = import_job(read_source(tmp_path / "run.sh", None), Asked("H100"))[1]
    assert job.training.lora is not None
    assert (job.hardware.num_devices, job.workload.max_seq_len, job.training.lora.rank) == (16, 4096, 16)
    assert job.training.lora.target_modules == ("q_proj", "v_proj")


def test_accelerate_s_shipped_file_turns_fsdp_on(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(json.dumps(DPO | {"stage": "sft", "quantization_bit": 4}))
    (tmp_path / "run.sh").write_text(
        "accelerate launch --config_file examples/accelerate/fsdp_config.yaml src/train.py sft.yaml\n"
    )
    job = import_job(read_source(tmp_path / "run.sh", None), Asked("2xH100"))[1]
    assert (job.backend, job.training.lora.base_dtype if job.training.lora else "") == ("fsdp2", "nf4")


def test_a_command_whose_file_is_missing_says_so(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("llamafactory-cli train elsewhere.yaml\n")
    with pytest.raises(SpecError, match=r"'elsewhere.yaml' was not found"):
        read_source(tmp_path / "run.sh", None)
