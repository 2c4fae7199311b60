"""DeepSpeed and FSDP settings of a TRL job, in every form."""

import json
from pathlib import Path

import pytest

from rlplan.foreign.convert import convert
from rlplan.foreign.documents import flatten_keys
from rlplan.foreign.settings import Settings
from rlplan.foreign.source import read_source

ZERO3 = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": "auto"}}
PYTHON = "from trl import GRPOConfig, GRPOTrainer\nGRPOTrainer('Qwen/Qwen2.5-7B', len, GRPOConfig('x', {}))\n"


def read(folder: Path, name: str, text: str) -> Settings:
    (folder / "ds.json").write_text(json.dumps(ZERO3))
    (folder / "train.py").write_text(PYTHON.format("beta=0.1"))
    (folder / name).write_text(text)
    return read_source(folder / name, None)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("own.py", PYTHON.format("deepspeed='ds.json'")),
        ("own.py", PYTHON.format(f"deepspeed={ZERO3!r}")),
        ("grpo.yaml", "num_generations: 8\ndeepspeed: ds.json\n"),
        ("run.sh", "accelerate launch --use_deepspeed --deepspeed_config_file ds.json train.py\n"),
        ("run.sh", "accelerate launch --use_deepspeed --zero_stage 3 --offload_optimizer_device cpu train.py\n"),
        ("run.sh", "trl grpo --num_generations 8 --deepspeed ds.json\n"),
    ],
)
def test_deepspeed_is_read(name: str, text: str, tmp_path: Path) -> None:
    settings = read(tmp_path, name, text)
    assert settings.value("accelerate.distributed_type") == "DEEPSPEED"
    assert settings.value("accelerate.deepspeed_config.zero_stage") == 3
    assert settings.value("accelerate.deepspeed_config.offload_optimizer_device") == "cpu"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("own.py", PYTHON.format("fsdp='full_shard auto_wrap offload'")),
        (
            "run.sh",
            (
                "accelerate launch --use_fsdp --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP "
                "--fsdp_offload_params true train.py\n"
            ),
        ),
    ],
)
def test_fsdp_is_read(name: str, text: str, tmp_path: Path) -> None:
    settings = read(tmp_path, name, text)
    assert settings.value("accelerate.distributed_type") == "FSDP"
    assert settings.value("accelerate.fsdp_config.fsdp_auto_wrap_policy") == "TRANSFORMER_BASED_WRAP"
    assert settings.value("accelerate.fsdp_config.fsdp_offload_params") is True


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    settings = read(tmp_path, "own.py", PYTHON.format("deepspeed='other.json'"))
    assert settings.notes == ("own.py:2: 'other.json' was not found and not read; ZeRO stage 2 is counted",)


@pytest.mark.parametrize(
    ("name", "stage", "device", "words"),
    [
        ("ds_z3_bf16.json", 3, "none", "ZeRO stage 3 by its name"),
        ("stage_1.json", 1, "none", "ZeRO stage 1 by its name"),
        ("zero3-offload.json", 3, "cpu", "ZeRO stage 3 by its name, with the optimizer on the CPU"),
        ("config_v3.json", 2, "none", "ZeRO stage 2 is counted"),
    ],
)
def test_a_missing_file_of_deepspeed_is_counted_by_its_name(
    name: str, stage: int, device: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(f"{{model_name_or_path: Qwen/Qwen3-4B, max_length: 512, packing: true, deepspeed: {name}}}")
    settings = read_source(path, None)
    assert settings.value("accelerate.deepspeed_config.zero_stage") == stage
    assert settings.value("accelerate.deepspeed_config.offload_optimizer_device") == device
    assert settings.notes[-1].endswith(words)


@pytest.mark.parametrize(
    ("precision", "dtype", "master"),
    [
        ({}, "bfloat16", "float32"),
        ({"bf16": True}, "bfloat16", "float32"),
        ({"bf16": False}, "float32", "float32"),
        ({"bf16": False, "dtype": "float32"}, "float32", "float32"),
        ({"bf16": False, "dtype": "bfloat16"}, "bfloat16", "bfloat16"),
        ({"bf16": False, "model_init_kwargs": {"dtype": "bfloat16"}}, "bfloat16", "bfloat16"),
        ({"bf16": False, "fp16": True}, "float16", "float32"),
        ({"fp16": True}, "float16", "float32"),
        ({"bf16": False, "mixed_precision": "bf16"}, "bfloat16", "float32"),
        ({"bf16": False, "mixed_precision": "fp16"}, "float16", "float32"),
        ({"bf16": False, "mixed_precision": "no"}, "float32", "float32"),
    ],
    ids=str,
)
@pytest.mark.parametrize("trainer", [{"num_generations": 8}, {"trainer": "sft"}], ids=["grpo", "sft"])
def test_the_type_of_training_is_the_one_that_trl_and_transformers_choose(
    trainer: dict[str, object], precision: dict[str, object], dtype: str, master: str, tmp_path: Path
) -> None:
    """TRL 1.16's base configuration has `bf16 = not fp16` where it is None, and loads weights in float32 unless `dtype`
    says another. In transformers 5.19, ACCELERATE_MIXED_PRECISION, which `accelerate launch` sets, holds where neither
    fp16 nor bf16 is true.
    """
    config = {"model_name_or_path": "Qwen/Qwen2.5-7B-Instruct", "num_processes": 8, **trainer, **precision}
    (tmp_path / "job.yaml").write_text(json.dumps(config))
    values = flatten_keys(convert(read_source(tmp_path / "job.yaml", "trl"), "H100", None).data)
    assert (values["training.dtype"], values["training.master_dtype"]) == (dtype, master)
