"""OpenRLHF's flags as jobs; facts of the table's commit."""

from pathlib import Path

import pytest

from rlplan.foreign.check import Asked, check
from rlplan.foreign.convert import Imported, convert
from rlplan.foreign.documents import flatten_keys
from rlplan.foreign.source import read_source


def import_openrlhf(folder: Path, flags: str, hardware: str = "H100") -> Imported:
    script = folder / "train.sh"
    script.write_text(
        "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path Qwen/Qwen2.5-7B-Instruct "
        "--vllm.num_engines 2 --vllm.tensor_parallel_size 2 --actor.num_gpus_per_node 2 --ref.num_gpus_per_node 2 "
        f"{flags}\n"
    )
    return convert(read_source(script, None), hardware, None)


MODELS = "--reward.model_name_or_path Qwen/Qwen2.5-7B-Instruct --reward.num_gpus_per_node 1 "
RLOO = "--algo.advantage.estimator rloo "


@pytest.mark.parametrize(
    ("flags", "of_scorers", "of_all"),
    [
        (RLOO, 2, 8),
        (RLOO + "--algo.kl.init_coef 0", 0, 6),
        (RLOO + "--train.colocate_actor_ref", 0, 6),
        (RLOO + MODELS, 3, 9),
        (RLOO + MODELS + "--train.colocate_critic_reward", 3, 9),
        (RLOO + MODELS + "--train.colocate_actor_ref", 1, 7),
        (RLOO + MODELS + "--reward.remote_url http://127.0.0.1:5000/get_reward", 2, 8),
        (MODELS + "--train.colocate_critic_reward", 2, 8),
        (MODELS + "--train.colocate_critic_reward --train.colocate_actor_ref", 0, 6),
        (RLOO + MODELS + "--train.colocate_all", 0, 2),
        (RLOO + MODELS + "--train.colocate_all --train.async_enable", 0, 6),
    ],
)
def test_roles_of_openrlhf_have_gpus_of_their_own_unless_they_are_colocated(
    flags: str, of_scorers: int, of_all: int, tmp_path: Path
) -> None:
    values = flatten_keys(import_openrlhf(tmp_path, flags).data)
    assert (values["placement.num_scoring_devices"], values["hardware.num_devices"]) == (of_scorers, of_all)


def test_a_critic_of_openrlhf_starts_as_the_reward_model_and_is_laid_on_the_actor_s_gpus(tmp_path: Path) -> None:
    reward = "--reward.model_name_or_path Qwen/Qwen2.5-1.5B-Instruct "
    imported = import_openrlhf(tmp_path, reward)
    assert imported.data["roles"]["value"]["path"] == "Qwen/Qwen2.5-1.5B-Instruct"
    assert any(note.startswith("the critic's own GPUs") for note in imported.notes)
    together = import_openrlhf(tmp_path, f"{reward} --train.colocate_all")
    assert not any("critic" in note for note in together.notes)


def test_openrlhf_s_reward_model_is_not_loaded_where_rewards_come_from_elsewhere(tmp_path: Path) -> None:
    imported = import_openrlhf(tmp_path, f"{RLOO}{MODELS} --train.agent_func_path agent.py")
    assert "roles.reward.path" not in flatten_keys(imported.data)


def test_engines_of_an_asynchronous_openrlhf_have_their_own_gpus_whatever_is_colocated(tmp_path: Path) -> None:
    values = flatten_keys(import_openrlhf(tmp_path, RLOO + "--train.colocate_all --train.async_enable").data)
    assert values["placement.placement"] == "disaggregated"
    assert values["placement.num_generation_devices"] == 4


def test_a_host_with_the_critic_s_gpus_too_has_as_many_that_train_as_the_script_says(tmp_path: Path) -> None:
    imported = import_openrlhf(tmp_path, "--critic.num_gpus_per_node 2 --train.colocate_actor_ref", "8xH100")
    assert imported.data["hardware"]["num_devices"] == 6
    assert not any("the plan uses --hardware" in note for note in imported.notes)
    other = import_openrlhf(tmp_path, "--critic.num_gpus_per_node 2 --train.colocate_actor_ref", "10xH100")
    assert other.data["hardware"]["num_devices"] == 10
    assert any("says 6 GPUs" in note for note in other.notes)


@pytest.mark.parametrize(("flag", "expected"), [("", False), ("--train.partial_rollout_enable", True)])
def test_weights_interrupt_rollouts_of_an_asynchronous_run_where_it_says_so(
    flag: str, expected: bool, tmp_path: Path
) -> None:
    values = flatten_keys(import_openrlhf(tmp_path, f"{RLOO} --train.async_enable {flag}").data)
    assert values["placement.partial_rollouts"] is expected


def test_muon_of_openrlhf_is_counted_as_such(tmp_path: Path) -> None:
    assert import_openrlhf(tmp_path, RLOO + "--actor.optim muon").data["training"]["optimizer"] == "muon"


def test_what_lies_on_the_host_or_twice_on_the_gpu_is_said_with_its_direction(tmp_path: Path) -> None:
    left = {entry.key: entry.why for entry in import_openrlhf(tmp_path, RLOO + "--ref.offload --ds.zpg 8").left}
    assert left["ref.offload"].endswith("predicted on the GPU, which takes more")
    assert left["ds.zpg"].endswith("not predicted, so that the run takes more")


@pytest.mark.parametrize(("micro_batch", "mini_batch", "fits"), [(1, 8, True), (2, 16, False), (4, 32, False)])
def test_a_pass_of_openrlhf_holds_its_micro_batch_however_small_a_rank_s_share_is(
    micro_batch: int, mini_batch: int, fits: bool, tmp_path: Path
) -> None:
    """Published: OpenRLHF issue 908 on 16 H20, a micro-batch of 1 runs and one of 2 runs out of memory."""
    script = tmp_path / "train.sh"
    script.write_text(
        "python -m openrlhf.cli.train_ppo_ray --ref_num_nodes 1 --ref_num_gpus_per_node 4 --actor_num_nodes 1 "
        "--actor_num_gpus_per_node 8 --vllm_num_engines 1 --vllm_tensor_parallel_size 4 "
        "--advantage_estimator group_norm --use_kl_loss --kl_estimator k3 --pretrain Qwen/Qwen2.5-7B-Instruct "
        f"--rollout_batch_size 8 --train_batch_size 8 --micro_train_batch_size {micro_batch} "
        "--n_samples_per_prompt 8 --max_epochs 1 --prompt_max_len 13024 --generate_max_len 13024 --zero_stage 3 "
        "--bf16 --actor_learning_rate 1e-6 --init_kl_coef 0.05 --flash_attn --gradient_checkpointing "
        "--remote_rm_url reward.py\n"
    )
    checked = check(read_source(script, None), Asked("16xH20", None, ()))
    imported, values = checked.imported, flatten_keys(checked.imported.data)
    assert (values["workload.mini_batch_size"], values["workload.micro_batch_size_per_gpu"]) == (
        mini_batch,
        micro_batch,
    )
    raised = [note for note in imported.notes if note.startswith("train.batch_size = 8 is counted as")]
    assert len(raised) == (mini_batch > 8)
    assert checked.fits is fits


@pytest.mark.parametrize("program", ["train_sft", "train_rm", "train_dpo"])
def test_programs_without_rollouts_have_the_schedule_of_their_parsers(program: str, tmp_path: Path) -> None:
    """Each parser: cosine_with_min_lr, lr_warmup_ratio 0.03, min_lr_ratio 0.1, adam.betas (0.9, 0.95)."""
    (tmp_path / "train.sh").write_text(
        f"deepspeed --num_gpus 8 --module openrlhf.cli.{program} --model.model_name_or_path Qwen/Qwen2.5-7B\n"
    )
    values = flatten_keys(convert(read_source(tmp_path / "train.sh", None), "H100", None).data)
    names = ("lr_scheduler_type", "lr_warmup_ratio", "min_lr_ratio", "adam_beta2")
    assert [values[f"algorithm.{name}"] for name in names] == ["cosine", 0.03, 0.1, 0.95]


def test_the_betas_of_a_script_are_read(tmp_path: Path) -> None:
    values = flatten_keys(import_openrlhf(tmp_path, RLOO + "--actor.adam.betas 0.8 0.99").data)
    assert (values["algorithm.adam_beta1"], values["algorithm.adam_beta2"]) == (0.8, 0.99)
    assert flatten_keys(import_openrlhf(tmp_path, RLOO).data)["algorithm.adam_beta2"] == 0.95
