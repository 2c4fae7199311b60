"""ms-swift's commands as jobs; facts of its argument classes at the table's commit."""

from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import SpecError
from rlplan.foreign.check import Asked, Checked, check, import_job
from rlplan.foreign.convert import Imported
from rlplan.foreign.source import read_source
from rlplan.spec.job import JobSpec

GRPO = (
    "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-7B-Instruct --use_vllm true "
    "--vllm_mode colocate "
)
"""GRPO on eight GPUs with a colocated engine."""
REPORTED = (
    "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model Qwen/QwQ-32B --attn_impl flash_attn --use_vllm true "
    "--vllm_mode colocate --vllm_gpu_memory_utilization 0.8 --vllm_max_model_len 8192 --train_type full "
    "--torch_dtype bfloat16 --max_completion_length 2048 --per_device_train_batch_size 1 "
    "--gradient_accumulation_steps 8 --max_length 2048 --num_generations 8 --deepspeed zero3 --sleep_level 1 "
    "--offload_model true --offload_optimizer true --vllm_tensor_parallel_size 8"
)
"""modelscope/ms-swift issue 3871: out of memory on eight A800 of 80 GB."""


def write(folder: Path, command: str) -> Path:
    path = folder / "train.sh"
    path.write_text(command + "\n")
    return path


def import_command(folder: Path, command: str, hardware: str = "8xH100") -> tuple[Imported, JobSpec]:
    return import_job(read_source(write(folder, command), None), Asked(hardware))


def check_command(folder: Path, command: str, hardware: str) -> Checked:
    return check(read_source(write(folder, command), None), Asked(hardware))


def test_a_command_leaves_the_rest_to_upstream_s_defaults(tmp_path: Path) -> None:
    """TunerArguments, TrainArgumentsMixin: LoRA of rank 8 and alpha 32, one row a GPU, weight decay 0.1."""
    _, job = import_command(tmp_path, "swift sft --model Qwen/Qwen2.5-7B-Instruct --max_length 4096")
    training, work = job.training, job.workload
    assert training.lora is not None
    assert (training.lora.rank, training.lora.alpha, training.lora.dtype) == (8, 32, "float32")
    assert (job.algorithm.name, job.algorithm.weight_decay, job.algorithm.learning_rate) == ("sft", 0.1, 1e-4)
    assert (work.micro_batch_size_per_gpu, work.max_seq_len, training.gradient_checkpointing) == (1, 4096, True)
    assert work.num_prompts_per_step == 16  # ceil(16 / rows / GPUs) passes


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        ("sft --deepspeed zero3 --tuner_type full", {"zero_stage": 3, "backend": "deepspeed", "lora": None}),
        ("sft --deepspeed zero2_offload", {"zero_stage": 2, "offloads_optimizer": True, "offloads_parameters": False}),
        ("sft --deepspeed zero3_offload", {"zero_stage": 3, "offloads_optimizer": True, "offloads_parameters": True}),
        ("sft --fsdp fsdp2 --gradient_checkpointing false", {"backend": "fsdp2", "gradient_checkpointing": True}),
        ("sft --tuner_type full", {"master_dtype": "bfloat16", "zero_stage": 0}),
        ("sft --tuner_type full --deepspeed zero2", {"master_dtype": "float32"}),
        ("sft --sequence_parallel_size 4 --deepspeed zero3", {"ulysses": 4}),
        ("sft --use_liger_kernel true", {"logits": "fused"}),
        ("sft --optim adamw_bnb_8bit", {"optimizer": "adamw_8bit"}),
    ],
)
def test_trainer_settings_are_read(flags: str, facts: dict[str, Any], tmp_path: Path) -> None:
    command = f"NPROC_PER_NODE=8 swift {flags} --model Qwen/Qwen2.5-7B-Instruct --max_length 2048"
    _, job = import_command(tmp_path, command)
    assert {key: getattr(job.training, key) for key in facts} == facts


@pytest.mark.parametrize(
    ("kind", "flags", "algorithm", "samples"),
    [
        ("rlhf", "", "dpo", 2),
        ("rlhf", "--rlhf_type kto", "kto", 2),
        ("rlhf", "--rlhf_type simpo", "dpo", 2),
        ("rlhf", "--rlhf_type rm --tuner_type full", "reward_modeling", 2),
        ("pt", "", "sft", 1),
    ],
)
def test_the_command_and_rlhf_type_decide_the_method(
    kind: str, flags: str, algorithm: str, samples: int, tmp_path: Path
) -> None:
    command = f"swift {kind} {flags} --model Qwen/Qwen2.5-7B-Instruct --max_length 2048 --gradient_accumulation_steps 1"
    _, job = import_command(tmp_path, command)
    assert (job.algorithm.name, job.workload.num_samples_per_prompt) == (algorithm, samples)
    assert job.roles.reference.is_precomputed is ("simpo" in flags)


def test_grpo_has_upstream_s_defaults(tmp_path: Path) -> None:
    """GRPOArgumentsMixin and RLHFArguments: beta 0.04, utilization 0.9, no sleep, temperature 0.9."""
    imported, job = import_command(tmp_path, GRPO + "--gradient_accumulation_steps 4 --per_device_train_batch_size 2")
    assert (job.algorithm.name, job.algorithm.kl_coef, job.workload.temperature) == ("grpo", 0.04, 0.9)
    assert (job.workload.num_prompts_per_step, job.workload.num_samples_per_prompt) == (8, 8)
    assert imported.share is not None
    assert (imported.share.value, job.placement.placement, job.rollout.max_num_seqs) == (0.9, "hybrid", 8)


def test_out_of_memory_in_generation_where_deepspeed_s_fp32_weights_stay_on_the_gpu(tmp_path: Path) -> None:
    """modelscope/ms-swift issue 3871, with offload_model and offload_optimizer."""
    checked = check_command(tmp_path, REPORTED, "8xA100")
    assert checked.plan is not None
    assert not checked.fits
    assert checked.plan.binding.action_id == "generate"
    smaller = REPORTED.replace("utilization 0.8", "utilization 0.6")
    plan = check_command(tmp_path, smaller, "8xA100").plan
    assert plan is not None
    assert plan.fit.may_fit


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("CUDA_VISIBLE_DEVICES=0,1 swift sft --model Qwen/Qwen2.5-7B --max_length 64", "spreads the layers"),
        ("swift sft --model Qwen/Qwen2.5-7B --tuner_type boft --max_length 64", "only full training and LoRA"),
        ("swift sft --model Qwen/Qwen2.5-7B --use_galore true --max_length 64", "GaLore"),
        ("swift sft --model Qwen/Qwen2.5-7B --task_type embedding --max_length 64", "embeddings"),
        ("swift rlhf --rlhf_type gkd --model Qwen/Qwen2.5-7B", "cannot be stated"),
        ("swift sft --model Qwen/Qwen2.5-7B --packing true", "packed rows"),
        (GRPO.replace("colocate", "server"), "GPUs of its own"),
        ("megatron rlhf --rlhf_type gkd --model Qwen/Qwen2.5-7B", "cannot be stated"),
        ("megatron sft --model Qwen/Qwen2.5-7B --fp8_param_gather true --max_length 64", "float8"),
    ],
)
def test_what_no_job_can_state_is_refused_for_that_reason(command: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as refused:
        import_command(tmp_path, command)
    assert words in refused.value.rule


@pytest.mark.parametrize("command", ["swift infer --model x", "swift export --adapters x", "megatron export --model x"])
def test_a_command_that_trains_nothing_is_named(command: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"of (ms-swift|Megatron-SWIFT) is not read"):
        read_source(write(tmp_path, command), None)


def test_the_size_of_the_server_is_read_where_the_same_script_starts_it(tmp_path: Path) -> None:
    server = (
        "swift rollout --model Qwen/Qwen2.5-7B-Instruct --vllm_tensor_parallel_size 2 --vllm_data_parallel_size 2 &\n"
    )
    _, job = import_command(
        tmp_path, server + GRPO.replace("colocate", "server").replace("=8", "=4") + "--per_device_train_batch_size 8"
    )
    assert (job.rollout.tp, job.placement.num_generation_devices, job.placement.placement) == (2, 4, "disaggregated")


def test_layers_trained_beside_adapters_are_named_as_not_counted(tmp_path: Path) -> None:
    command = "swift sft --model Qwen/Qwen2.5-7B-Instruct --max_length 512 --modules_to_save embed_tokens lm_head"
    imported, _ = import_command(tmp_path, command)
    assert imported.not_counted == ("modules_to_save=embed_tokens lm_head",)


FULL = "--tuner_type full --torch_dtype bfloat16 --per_device_train_batch_size 1 --packing true --attn_impl flash_attn "
RECOMPUTED = "--recompute_granularity full --recompute_method uniform --recompute_num_layers 1 --micro_batch_size 1 "
PUBLISHED = [
    ("swift sft --model Qwen/Qwen2.5-7B --deepspeed zero3 --max_length 16384 --use_liger_kernel true " + FULL, 4, 43),
    ("swift sft --model Qwen/Qwen2.5-7B --deepspeed zero3 --max_length 8192 --use_liger_kernel true " + FULL, 4, 44),
    ("swift rlhf --rlhf_type dpo --model Qwen/Qwen2.5-7B-Instruct --deepspeed zero3 --max_length 8192 " + FULL, 4, 50),
    (
        "swift rlhf --rlhf_type dpo --model Qwen/Qwen2.5-VL-7B-Instruct --deepspeed zero3 --max_length 8192 " + FULL,
        4,
        50,
    ),
    ("swift sft --model Qwen/Qwen2.5-7B-Instruct --packing true --max_length 2048", 1, 22),
    ("swift sft --model Qwen/Qwen2.5-VL-7B-Instruct --packing true --max_length 8192 --deepspeed zero2", 4, 36),
    ("swift sft --model Qwen/Qwen2.5-7B-Instruct --quant_method bnb --quant_bits 4 --max_length 2048", 1, 10),
    (
        "megatron sft --model Qwen/Qwen2.5-7B --tensor_model_parallel_size 4 --sequence_parallel true --packing true "
        "--global_batch_size 8 --max_length 32768 " + RECOMPUTED,
        4,
        50,
    ),
    (
        "megatron rlhf --rlhf_type dpo --model Qwen/Qwen3-4B-Instruct-2507 --tensor_model_parallel_size 4 "
        "--sequence_parallel true --packing true --global_batch_size 4 --max_length 8192 " + RECOMPUTED,
        4,
        28,
    ),
    (
        "megatron sft --model Qwen/Qwen3-30B-A3B-Base --tuner_type lora --lora_rank 32 --sequence_parallel true "
        "--packing true --expert_model_parallel_size 4 --max_length 8192 " + RECOMPUTED,
        4,
        49,
    ),
]
"""Commands of upstream's examples with packed rows, or with a row a GPU, and the published memory of a GPU in GiB."""


@pytest.mark.parametrize(("command", "num_gpus", "published"), PUBLISHED)
def test_peaks_are_near_those_that_upstream_s_examples_publish(
    command: str, num_gpus: int, published: float, tmp_path: Path
) -> None:
    """examples/ of the table's commit: nine of ten within 15 %, all within 20 %."""
    plan = check_command(tmp_path, f"NPROC_PER_NODE={num_gpus} {command}", f"{num_gpus}xA100").plan
    assert plan is not None
    assert plan.binding.num_bytes / 2**30 == pytest.approx(published, rel=0.2)


def test_megatron_swift_is_read_with_its_parallelism(tmp_path: Path) -> None:
    """MegatronArguments: expert_tensor_parallel_size 1, global_batch_size 16, full training."""
    _, job = import_command(
        tmp_path,
        "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-30B-A3B --tensor_model_parallel_size 2 --max_length 8192 "
        "--expert_model_parallel_size 4 --sequence_parallel true --recompute_granularity full "
        "--recompute_method uniform --recompute_num_layers 1 --optimizer_cpu_offload true "
        "--use_precision_aware_optimizer true --no_save_optim true",
    )
    training = job.training
    assert (job.backend, training.tp, training.ep, training.etp, training.zero_stage) == ("megatron", 2, 4, 1, 1)
    assert (training.gradient_checkpointing, training.offloads_optimizer, training.lora) == (True, True, None)
    assert (job.workload.num_prompts_per_step, job.workload.max_seq_len) == (16, 8192)


def test_megatron_grpo_counts_completions(tmp_path: Path) -> None:
    """Batch sizes count completions: 128 x 4 / 8 prompts in a step of generation."""
    _, job = import_command(
        tmp_path,
        "NPROC_PER_NODE=8 megatron rlhf --rlhf_type grpo --model Qwen/Qwen2.5-3B-Instruct --global_batch_size 128 "
        "--micro_batch_size 4 --steps_per_generation 4 --num_generations 8 --vllm_mode colocate --max_length 2048",
    )
    work = job.workload
    assert (work.num_prompts_per_step, work.mini_batch_size, work.micro_batch_size_per_gpu) == (64, 128, 4)


def test_division_by_expr_is_followed_as_upstream_s_examples_have_it(tmp_path: Path) -> None:
    script = (
        "nproc_per_node=2\nNPROC_PER_NODE=$nproc_per_node swift sft --model Qwen/Qwen2.5-7B --max_length 64 "
        "--gradient_accumulation_steps $(expr 16 / $nproc_per_node)"
    )
    settings = read_source(write(tmp_path, script), None)
    assert settings.value("gradient_accumulation_steps") == 8
    assert settings.value("accelerate.num_processes") == 2


FULL_32B = "NPROC_PER_NODE=8 swift sft --model Qwen/Qwen2.5-32B --tuner_type full --max_length 2048 --deepspeed zero2"


def test_settings_from_outside_are_read_as_those_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, FULL_32B)
    assert import_job(read_source(path, None, ["deepspeed=zero3"]), Asked("8xH100"))[1].training.zero_stage == 3
    other = write(tmp_path, GRPO + "--gradient_accumulation_steps 1")
    method = ["rlhf_type=kto", "max_length=512"]
    assert import_job(read_source(other, None, method), Asked("8xH100"))[1].algorithm.name == "kto"


def test_changes_that_help_are_named_in_upstream_s_words(tmp_path: Path) -> None:
    changes = [change.values for change in check_command(tmp_path, FULL_32B, "8xH100").changes]
    assert {"deepspeed": "zero3"} in changes


def test_a_file_of_megatron_swift_is_not_taken_for_one_of_ms_swift(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(
        "{model: Qwen/Qwen3-30B-A3B, tuner_type: lora, max_length: 2048, split_dataset_ratio: 0.01, "
        "micro_batch_size: 1, global_batch_size: 4, expert_model_parallel_size: 4, no_save_optim: true}"
    )
    _, job = import_job(read_source(path, None), Asked("4xH100"))
    assert (job.framework, job.backend, job.training.ep) == ("megatron_swift@4.6.0", "megatron", 4)


def test_prompts_fill_what_the_engine_s_length_leaves_for_them(tmp_path: Path) -> None:
    words = "--max_length 4096 --max_completion_length 1024 --per_device_train_batch_size 8 --vllm_max_model_len "
    work = [import_command(tmp_path, GRPO + words + length)[1].workload for length in ("3072", "8192")]
    assert [job.max_prompt_len for job in work] == [2048, 4096]
