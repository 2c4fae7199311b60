"""NeMo-RL's documents as jobs: PPO, engines, the reference and the reward model; facts of the table's commit."""

from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import SpecError
from rlplan.foreign.check import Asked, import_job
from rlplan.foreign.convert import Imported, convert
from rlplan.foreign.documents import flatten_keys
from rlplan.foreign.source import read_source
from tests.foreign.scripts import write_yaml

SMALL = {"policy.model_name": "Qwen/Qwen2.5-1.5B", "cluster.gpus_per_node": 8, "grpo.num_prompts_per_step": 32}
PPO = {
    "policy.model_name": "Qwen/Qwen2.5-1.5B",
    "cluster.gpus_per_node": 8,
    "ppo.num_prompts_per_step": 64,
    "ppo.num_generations_per_prompt": 8,
    "value.model_name": "${policy.model_name}",
}
APART = {
    "cluster.num_nodes": 2,
    "policy.generation.colocated.enabled": False,
    "policy.generation.colocated.resources.num_nodes": 1,
    "policy.generation.colocated.resources.gpus_per_node": 8,
}


def import_settings(folder: Path, settings: dict[str, Any]) -> Imported:
    return convert(read_source(write_yaml(folder, settings), None), "H100", None)


def job(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    return flatten_keys(import_settings(folder, settings).data)


def test_ppo_has_a_critic_and_the_sizes_of_its_own_part(tmp_path: Path) -> None:
    result = import_settings(tmp_path, PPO)
    data = flatten_keys(result.data)
    assert (data["algorithm.name"], data["roles.value.path"]) == ("ppo", "Qwen/Qwen2.5-1.5B")
    assert (data["workload.num_prompts_per_step"], data["workload.num_samples_per_prompt"]) == (64, 8)
    assert (data["workload.num_epochs_per_step"], data["algorithm.gae_lambda"]) == (4, 0.95)
    assert (data["algorithm.kl_coef"], data["algorithm.value_learning_rate"]) == (0.0, 1e-5)
    assert any("the critic is predicted with the policy's layout" in note for note in result.notes)


def test_a_file_that_stands_on_ppo_s_own_has_its_defaults(tmp_path: Path) -> None:
    settings = {"defaults": "ppo_math_1B.yaml", "policy.model_name": "Qwen/Qwen2.5-1.5B", "cluster.gpus_per_node": 8}
    result = job(tmp_path, settings)
    assert (result["algorithm.name"], result["workload.num_epochs_per_step"]) == ("ppo", 4)
    assert result["workload.max_prompt_len"] + result["workload.max_response_len"] == 16384


def test_a_script_of_ppo_s_program_is_read(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(
        "uv run examples/run_ppo.py --config examples/configs/ppo_math_1B.yaml policy.model_name=Qwen/Qwen2.5-7B\n"
    )
    imported = convert(read_source(tmp_path / "train.sh", None), "8xH100", None)
    assert imported.data["algorithm"]["name"] == "ppo"
    assert imported.data["roles"]["value"]["path"] == "Qwen/Qwen2.5-7B"


def test_a_reference_of_gpus_that_only_train_waits_on_the_host(tmp_path: Path) -> None:
    result = import_settings(tmp_path, SMALL | APART)
    data = flatten_keys(result.data)
    assert (data["placement.offload"], data["placement.offload_roles"]) == ("host", "frozen")
    assert any("keeps the reference in pinned memory" in note for note in result.notes)
    alone = job(tmp_path, SMALL | APART | {"loss_fn.reference_policy_kl_penalty": 0.0})
    assert (alone["placement.offload"], alone.get("placement.offload_roles")) == ("none", None)


@pytest.mark.parametrize(("nodes", "counted"), [(1, 6), (2, 8)])
def test_a_reward_model_has_gpus_of_its_own_which_no_policy_has(nodes: int, counted: int, tmp_path: Path) -> None:
    """NeMo-RL's cluster takes them from the GPUs of a single node, or a whole one of several nodes."""
    reward = {
        "data.default.env_name": "reward_model",
        "env.reward_model.model_name": "Qwen/Qwen3-0.6B",
        "env.reward_model.resources.gpus_per_node": 2,
        "env.reward_model.resources.num_nodes": 1,
    }
    settings = SMALL | reward | {"cluster.num_nodes": nodes}
    result = import_settings(tmp_path, settings)
    assert result.data["hardware"]["num_devices"] == counted
    of_all = convert(read_source(write_yaml(tmp_path, settings), None), f"{8 * nodes}xH100", None)
    assert of_all.data["hardware"]["num_devices"] == counted
    assert any(
        "of the reward model" in note and "whether it fits there is not predicted" in note for note in result.notes
    )


def test_sglang_has_a_share_and_ranks_of_its_own(tmp_path: Path) -> None:
    sglang = {"mem_fraction_static": 0.7, "tp_size": 2, "max_running_requests": 128, "disable_cuda_graph": True}
    settings = {f"policy.generation.sglang_cfg.{key}": value for key, value in sglang.items()}
    result = import_settings(tmp_path, SMALL | settings | {"policy.generation.backend": "sglang"})
    data = flatten_keys(result.data)
    assert result.share is not None
    assert (result.share.value, result.share.is_static, data["rollout.engine"]) == (0.7, True, "sglang")
    assert (data["rollout.tp"], data["rollout.max_num_seqs"], data["rollout.has_cuda_graphs"]) == (2, 128, False)


@pytest.mark.parametrize("backend", ["trtllm", "megatron", "dynamo"])
def test_an_engine_whose_memory_is_not_counted_is_refused_with_what_is(backend: str, tmp_path: Path) -> None:
    path = write_yaml(tmp_path, SMALL | {"policy.generation.backend": backend})
    with pytest.raises(SpecError, match=f"policy.generation.backend is '{backend}'") as caught:
        convert(read_source(path, None), "H100", None)
    override = caught.value.way_out.partition("--set ")[2].split()[0]
    assert convert(read_source(path, None, [override]), "H100", None).data["rollout"]["engine"] == "vllm"


def test_distillation_from_several_teachers_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="distillation from several teachers"):
        import_settings(tmp_path, SMALL | {"on_policy_distillation.enabled": True})


@pytest.mark.parametrize(
    "override",
    [
        {"max_position_embeddings": 16384},
        {"rope_scaling.rope_type": "yarn", "rope_scaling.factor": "${div:${policy.max_total_sequence_length},4096}"},
    ],
)
def test_a_model_whose_context_is_overridden_has_that_context(override: dict[str, Any], tmp_path: Path) -> None:
    settings = SMALL | {"policy.model_name": "Qwen/Qwen2.5-Math-7B", "policy.max_total_sequence_length": 16384}
    with pytest.raises(SpecError, match="the model's limit is 4,096"):
        import_job(read_source(write_yaml(tmp_path, settings), None), Asked("H100"))[1].load_model()
    settings |= {f"policy.hf_config_overrides.{key}": value for key, value in override.items()}
    _, result = import_job(read_source(write_yaml(tmp_path, settings), None), Asked("H100"))
    assert result.load_model().max_position_embeddings == 16384


MEGATRON = {"policy.megatron_cfg.enabled": True, "policy.megatron_cfg.activation_checkpointing": True}


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ({"policy.megatron_cfg.recompute_granularity": "selective"}, "selective recomputation"),
        (
            {"policy.megatron_cfg.distributed_data_parallel_config.use_custom_fsdp": True},
            "Megatron's FSDP is predicted as",
        ),
    ],
)
def test_what_megatron_does_otherwise_is_said(settings: dict[str, Any], note: str, tmp_path: Path) -> None:
    usual, result = import_settings(tmp_path, SMALL | MEGATRON), import_settings(tmp_path, SMALL | MEGATRON | settings)
    assert any(note in text for text in result.notes)
    assert not any(note in text for text in usual.notes)


@pytest.mark.parametrize(
    ("shares", "trainer"), [(None, "megatron"), (True, "megatron"), (None, "dtensor"), (True, "dtensor")]
)
def test_rows_are_shared_where_nemo_rl_is_told_to(shares: bool | None, trainer: str, tmp_path: Path) -> None:
    size = "tensor_model_parallel_size" if trainer == "megatron" else "tensor_parallel_size"
    settings = SMALL | (MEGATRON if trainer == "megatron" else {}) | {f"policy.{trainer}_cfg.{size}": 2}
    if shares is not None:
        settings |= {f"policy.{trainer}_cfg.sequence_parallel": shares}
    assert import_settings(tmp_path, settings).data["training"]["sequence_parallel"] is bool(shares)


def test_a_weight_decay_of_megatron_s_optimizer_is_its_own(tmp_path: Path) -> None:
    result = job(tmp_path, SMALL | MEGATRON | {"policy.megatron_cfg.optimizer.weight_decay": 0.1})
    assert result["algorithm.weight_decay"] == 0.1


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ({"cluster.num_nodes": 2}, 8),
        ({"cluster.num_nodes": 2, "policy.dtensor_cfg.tensor_parallel_size": 2}, 4),
        (APART, 4),
        ({"policy.generation.colocated.enabled": False, "policy.generation.colocated.resources.gpus_per_node": 4}, 2),
    ],
)
def test_copies_of_the_states_are_shared_by_the_ranks_between_them(
    settings: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    result = job(tmp_path, {**SMALL, **settings, "policy.dtensor_cfg.dp_replicate_size": 2})
    assert result["training.fsdp_size"] == ranks


@pytest.mark.parametrize(("fraction", "lies_on_the_cpu"), [(None, False), (0.5, False), (1.0, True)])
def test_nemo_rl_leaves_on_the_gpu_what_no_fraction_says_to_be_on_the_cpu(
    fraction: float | None, lies_on_the_cpu: bool, tmp_path: Path
) -> None:
    optimizer = "policy.megatron_cfg.optimizer."
    settings = {f"{optimizer}optimizer_cpu_offload": True, "policy.megatron_cfg.enabled": True}
    if fraction is not None:
        settings[f"{optimizer}optimizer_offload_fraction"] = fraction
    result = import_settings(tmp_path, SMALL | settings)
    assert result.data["training"]["offloads_optimizer"] is lies_on_the_cpu
    assert any("optimizer_offload_fraction" in note for note in result.notes) is not lies_on_the_cpu


@pytest.mark.parametrize(("new", "lengths"), [(1024, (3072, 1024)), (4096, (1024, 3072)), (None, (1024, 3072))])
def test_responses_are_as_long_as_nemo_rl_generates(new: int | None, lengths: tuple[int, int], tmp_path: Path) -> None:
    settings = {"policy.max_total_sequence_length": 4096, "policy.generation.max_new_tokens": new}
    result = job(tmp_path, SMALL | settings)
    assert (result["workload.max_prompt_len"], result["workload.max_response_len"]) == lengths


def test_bytes_of_vllm_s_cache_are_taken_as_given(tmp_path: Path) -> None:
    result = job(tmp_path, {**SMALL, "policy.generation.vllm_kwargs.kv_cache_memory_bytes": 4 << 30})
    assert result["rollout.kv_cache_memory"] == 4 << 30


@pytest.mark.parametrize(
    ("settings", "lengths"),
    [
        ({}, (1024, 3072)),
        ({"data.max_input_seq_length": 512}, (512, 3584)),
        ({"data.max_input_seq_length": 512, "policy.generation.max_new_tokens": 1024}, (512, 1024)),
        ({"data.max_input_seq_length": 3500, "policy.generation.max_new_tokens": 1024}, (3500, 596)),
        ({"data.max_input_seq_length": "${policy.max_total_sequence_length}"}, (1024, 3072)),
        ({"data.max_input_seq_length": None}, (1024, 3072)),
    ],
)
def test_prompts_are_as_long_as_the_data_s_bound_and_responses_as_what_it_leaves(
    settings: dict[str, Any], lengths: tuple[int, int], tmp_path: Path
) -> None:
    """NeMo-RL's data processors drop prompts beyond it; its vLLM worker takes the lesser of max_new_tokens and of what
    the prompt leaves of the context (`_context_capped_max_new_tokens`).
    """
    result = job(tmp_path, SMALL | {"policy.max_total_sequence_length": 4096} | settings)
    assert (result["workload.max_prompt_len"], result["workload.max_response_len"]) == lengths


def test_a_run_that_ends_before_its_warm_up_is_a_job_with_a_note(tmp_path: Path) -> None:
    """NeMo-RL runs grpo-moonlight-16ba3b-4n8g-megatron.yaml, which warms up over 50 steps, for 30."""
    warmup = {"policy.megatron_cfg.enabled": True, "policy.megatron_cfg.scheduler.lr_warmup_iters": 50}
    path = write_yaml(tmp_path, SMALL | warmup | {"grpo.max_num_steps": 30, "policy.dtensor_cfg.enabled": False})
    imported, job = import_job(read_source(path, None), Asked("8xH100"))
    assert job.algorithm.lr_warmup_steps == 29
    assert any("lasts longer than the run of 30 steps" in note for note in imported.notes)


def test_the_warm_up_and_the_betas_of_a_pytorch_optimizer_are_read(tmp_path: Path) -> None:
    """grpo_math_1B.yaml has such a list of schedulers."""
    linear = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 50}}
    constant = {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 10000000000}}
    settings = {
        "policy.scheduler": [linear, constant, {"milestones": [50]}],
        "policy.optimizer.kwargs.betas": [0.9, 0.98],
    }
    result = job(tmp_path, SMALL | settings)
    assert (result["algorithm.lr_warmup_steps"], result["algorithm.adam_beta2"]) == (50, 0.98)
    without = job(tmp_path, SMALL | {"policy.scheduler": [constant, {"milestones": []}]})
    assert without["algorithm.lr_warmup_steps"] == 0
