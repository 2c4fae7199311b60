"""DeepSpeed-Chat's steps as jobs; facts of its scripts and parsers at the table's commit."""

from pathlib import Path

import pytest

from rlplan.errors import SpecError
from rlplan.foreign.check import Asked, import_job
from rlplan.foreign.source import read_source
from rlplan.spec.job import JobSpec

COMMON = (
    "deepspeed main.py --data_split 2,4,4 --max_seq_len 512 --model_name_or_path meta-llama/Llama-2-7b-hf --offload "
)
PPO = (
    "deepspeed main.py --data_split 2,4,4 --actor_model_name_or_path meta-llama/Llama-2-7b-hf --actor_zero_stage 3 "
    "--critic_model_name_or_path meta-llama/Llama-2-7b-hf --critic_zero_stage 3 --actor_gradient_checkpointing "
    "--per_device_training_batch_size 4 --per_device_generation_batch_size 8 --generation_batches 2 "
)


def import_script(folder: Path, command: str) -> JobSpec:
    folder.mkdir(exist_ok=True)
    (folder / "run.sh").write_text(command + "\n")
    return import_job(read_source(folder / "run.sh", None), Asked("8xA100"))[1]


@pytest.mark.parametrize(
    ("folder", "flags", "algorithm"),
    [
        ("step1_supervised_finetuning", "", "sft"),
        ("step2_dpo_finetuning", "", "dpo"),
        ("elsewhere", "--num_padding_at_beginning 0", "reward_modeling"),
        ("elsewhere", "--beta 0.2", "dpo"),
        ("elsewhere", "", "sft"),
    ],
)
def test_flags_and_the_folder_tell_the_step(folder: str, flags: str, algorithm: str, tmp_path: Path) -> None:
    job = import_script(tmp_path / folder, COMMON + flags)
    assert job.algorithm.name == algorithm
    assert (job.training.dtype, job.training.offloads_optimizer) == ("float16", True)


def test_ppo_has_a_batch_of_experience_and_two_models(tmp_path: Path) -> None:
    job = import_script(tmp_path, PPO)
    work = job.workload
    assert (work.num_prompts_per_step, work.mini_batch_size, work.micro_batch_size_per_gpu) == (128, 32, 4)
    assert all(str(role.path).endswith("Llama-2-7b-hf") for role in (job.roles.value, job.roles.reward))
    assert (job.training.zero_stage, job.algorithm.kl_coef, job.rollout.engine) == (3, 0.1, "transformers")


def test_adapters_of_the_policy_beside_a_full_critic_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as refused:
        import_script(tmp_path, PPO + "--actor_lora_dim 128")
    assert "critic that trains in full" in refused.value.rule


def test_the_reference_is_a_copy_also_beside_adapters(tmp_path: Path) -> None:
    """Upstream loads a second model in step 2 (DPO), and in step 3."""
    job = import_script(tmp_path, COMMON + "--beta 0.1 --lora_dim 64 --only_optimize_lora")
    assert job.training.lora is not None
    assert str(job.roles.reference.path).endswith("Llama-2-7b-hf")


def test_adapters_have_a_learning_rate_and_a_scale_of_their_own(tmp_path: Path) -> None:
    """Source: dschat/utils, utils.py (get_optimizer_grouped_parameters), module/lora.py (lora_scaling / lora_dim)."""
    job = import_script(tmp_path, COMMON + "--learning_rate 1e-4 --lora_dim 128 --only_optimize_lora")
    assert job.training.lora is not None
    assert (job.algorithm.learning_rate, job.training.lora.alpha) == (5e-4, 1)
    stated = import_script(tmp_path, COMMON + "--lora_learning_rate 2e-4 --lora_dim 128 --only_optimize_lora")
    assert stated.algorithm.learning_rate == 2e-4
    assert import_script(tmp_path, COMMON + "--learning_rate 1e-4").algorithm.learning_rate == 1e-4
