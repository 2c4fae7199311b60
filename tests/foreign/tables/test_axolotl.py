"""axolotl's YAML as jobs; facts of its schemas and loaders at the table's commit."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import SpecError
from rlplan.foreign.check import Asked, import_job
from rlplan.foreign.convert import Imported
from rlplan.foreign.source import read_source
from rlplan.spec.job import JobSpec

QLORA: dict[str, Any] = {
    "base_model": "Qwen/Qwen2.5-3B-Instruct",
    "load_in_4bit": True,
    "adapter": "qlora",
    "lora_r": 32,
    "lora_alpha": 16,
    "lora_target_linear": True,
    "sequence_len": 2048,
    "sample_packing": True,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 4,
    "optimizer": "adamw_bnb_8bit",
    "bf16": "auto",
    "gradient_checkpointing": True,
}
FULL = {key: value for key, value in QLORA.items() if "lora" not in key and key not in ("load_in_4bit", "adapter")}
FSDP = {"fsdp_version": 2, "fsdp_config": {"offload_params": False, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
CUT = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"


def import_yaml(folder: Path, data: dict[str, Any]) -> tuple[Imported, JobSpec]:
    path = folder / "train.yaml"
    path.write_text(json.dumps(data))
    return import_job(read_source(path, None), Asked("8xH100"))


def test_qlora_is_read_with_its_base_and_packed_rows(tmp_path: Path) -> None:
    imported, job = import_yaml(tmp_path, QLORA)
    training = job.training
    assert training.lora is not None
    assert (training.lora.rank, training.lora.base_dtype, training.optimizer) == (32, "nf4", "adamw_8bit")
    assert (job.algorithm.name, job.workload.max_seq_len, job.workload.num_prompts_per_step) == ("sft", 2048, 32)
    assert any(entry.key == "sample_packing" and "full" in entry.why for entry in imported.left)


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({}, {"master_dtype": "bfloat16", "zero_stage": 0}),
        ({"deepspeed": "deepspeed_configs/zero2.json"}, {"master_dtype": "float32", "zero_stage": 2}),
        (
            {"deepspeed": "deepspeed_configs/zero3_bf16_cpuoffload_all.json"},
            {"zero_stage": 3, "offloads_optimizer": True},
        ),
        (FSDP, {"backend": "fsdp2", "master_dtype": "bfloat16", "zero_stage": 3}),  # its own fsdp2_prepare_model
        ({"gradient_checkpointing": "offload"}, {"gradient_checkpointing": True, "offloads_activations": True}),
        ({"gradient_checkpointing": None}, {"gradient_checkpointing": False}),
        ({"plugins": [CUT]}, {"logits": "fused"}),
        ({"chunked_cross_entropy": True}, {"logits": "chunked"}),
        ({"context_parallel_size": 2} | FSDP, {"cp": 2}),
        ({"optimizer": "muon"}, {"optimizer": "muon"}),
    ],
)
def test_trainer_settings_are_read(changes: dict[str, Any], facts: dict[str, Any], tmp_path: Path) -> None:
    _, job = import_yaml(tmp_path, FULL | changes)
    assert {key: getattr(job.training, key) for key in facts} == facts


@pytest.mark.parametrize(
    ("changes", "algorithm"),
    [
        ({"rl": "dpo"}, "dpo"),
        ({"rl": "orpo"}, "dpo"),
        ({"rl": "kto"}, "kto"),
        ({"reward_model": True}, "reward_modeling"),
        ({"rl": "grpo", "trl": {"use_vllm": True, "vllm_mode": "colocate"}, "vllm": {"max_model_len": 4096}}, "grpo"),
    ],
)
def test_rl_decides_the_method(changes: dict[str, Any], algorithm: str, tmp_path: Path) -> None:
    _, job = import_yaml(tmp_path, FULL | changes)
    assert (job.algorithm.name, job.roles.reference.is_precomputed) == (algorithm, changes.get("rl") == "orpo")
    assert job.framework == "axolotl@0.18.0"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rl": "ebft"}, "EBFT"),
        ({"unfrozen_parameters": ["lm_head"]}, "a part of the weights"),
        ({"tensor_parallel_size": 2}, "tensor parallelism"),
        ({"qat": {"weight_dtype": "int4"}}, "QAT"),
        ({"adapter": "lora"}, "lora_r"),
        ({"finetuning_type": "lora", "cutoff_len": 2048}, "keys of one stack"),
        ({"base_model": "Qwen/Qwen3-30B-A3B", "adapter": "qlora", "load_in_4bit": True, "lora_r": 8}, "routed experts"),
    ],
)
def test_what_no_job_can_state_is_refused_for_that_reason(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as refused:
        import_yaml(tmp_path, FULL | changes)
    assert words in refused.value.rule


def test_grpo_is_read_below_trl_and_vllm(tmp_path: Path) -> None:
    trl = {"use_vllm": True, "vllm_mode": "colocate", "num_generations": 4, "max_completion_length": 256}
    changes = {"rl": "grpo", "trl": trl, "vllm": {"max_model_len": 4096, "gpu_memory_utilization": 0.5}}
    imported, job = import_yaml(tmp_path, FULL | changes)
    work = job.workload
    assert (work.num_samples_per_prompt, work.max_response_len, work.max_prompt_len) == (4, 256, 3840)
    assert imported.share is not None
    assert imported.share.value == 0.5


def test_the_engine_is_a_server_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    """Upstream's validation sets `vllm_mode` to `server`."""
    with pytest.raises(SpecError) as refused:
        import_yaml(tmp_path, FULL | {"rl": "grpo", "trl": {"use_vllm": True}})
    assert "number of training GPUs is not given" in refused.value.rule


def test_a_command_names_the_file_and_overrides_its_keys(tmp_path: Path) -> None:
    (tmp_path / "qlora.yml").write_text(json.dumps(QLORA))
    (tmp_path / "run.sh").write_text(
        "accelerate launch --num_processes 4 -m axolotl.cli.train qlora.yml --micro-batch-size 2\n"
    )
    _, job = import_job(read_source(tmp_path / "run.sh", None), Asked("H100"))
    assert (job.hardware.num_devices, job.workload.micro_batch_size_per_gpu) == (4, 2)
