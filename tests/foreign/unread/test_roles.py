"""Settings of a role of its own that differ from the policy's are said, never passed over."""

from pathlib import Path
from typing import Any

import pytest

from rlplan.foreign.convert import convert
from rlplan.foreign.source import read_source
from tests.foreign.scripts import verl_script, write_yaml

PPO = {"algorithm.adv_estimator": "gae", "critic.model.path": "Qwen/Qwen2.5-7B-Instruct"}
SAME = {"critic.fsdp.param_offload": True, "critic.fsdp.optimizer_offload": True}
"""The policy's settings in VERL."""


def unread(folder: Path, settings: dict[str, Any]) -> str:
    imported = convert(read_source(verl_script(folder, settings), None), "H100", None)
    return "; ".join(note for note in imported.notes if note.startswith("not read"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("critic.model.enable_gradient_checkpointing", False),
        ("critic.strategy", "megatron"),
        ("critic.fsdp.model_dtype", "bf16"),
        ("critic.fsdp.param_offload", False),
        ("critic.model.fsdp_config.optimizer_offload", False),
    ],
)
def test_what_a_role_is_given_beside_the_policy_is_said(key: str, value: object, tmp_path: Path) -> None:
    without = {value: two for value, two in SAME.items() if not key.endswith(value.rpartition(".")[2])}
    assert f"{key}={str(value).lower() if isinstance(value, bool) else value}" in unread(
        tmp_path, PPO | without | {key: value}
    )


def test_the_critic_s_default_is_said_where_only_the_policy_is_offloaded(tmp_path: Path) -> None:
    """verl 0.9.1, its critic: `fsdp` is the engine's own, not the actor's."""
    assert "critic.fsdp.param_offload=false" in unread(tmp_path, PPO)


@pytest.mark.parametrize("settings", [PPO | SAME, {"critic.model.enable_gradient_checkpointing": False}])
def test_nothing_is_said_of_a_role_that_is_as_the_policy_or_not_there(settings: dict[str, Any], tmp_path: Path) -> None:
    assert unread(tmp_path, settings) == ""


def test_nemo_rl_s_critic_is_compared_with_the_policy(tmp_path: Path) -> None:
    settings = {"policy.model_name": "Qwen/Qwen2.5-1.5B", "cluster.gpus_per_node": 8, "ppo.num_prompts_per_step": 64}
    settings |= {"value.dtensor_cfg.tensor_parallel_size": 2}
    imported = convert(read_source(write_yaml(tmp_path, settings), None), "H100", None)
    assert any("value.dtensor_cfg.tensor_parallel_size=2 (1 for the policy)" in note for note in imported.notes)


def test_a_default_of_megatron_s_own_configuration_is_no_difference(tmp_path: Path) -> None:
    imported = convert(read_source(verl_script(tmp_path, PPO, preset="ppo_megatron_trainer.yaml"), None), "H100", None)
    assert not any("critic.strategy" in note for note in imported.notes)


AREAL = {"gconfig.n_samples": 4, "actor.path": "Qwen/Qwen2.5-1.5B", "critic.path": "Qwen/Qwen2.5-1.5B"}
AREAL |= {
    "train_dataset.batch_size": 256,
    "rollout.backend": "sglang:d4",
    "actor.backend": "megatron:d4",
    "actor.gradient_checkpointing": True,
}
ROLL = {"pretrain": "Qwen/Qwen2.5-7B", "adv_estimator": "gae", "actor_train.device_mapping": "list(range(0,8))"}
ROLL |= {"actor_infer.device_mapping": "list(range(0,8))", "actor_train.strategy_args.strategy_name": "megatron_train"}
ROLL |= {"actor_train.training_args.per_device_train_batch_size": 1}
SIZE = "critic.training_args.per_device_train_batch_size"


@pytest.mark.parametrize(
    ("settings", "same", "words"),
    [
        (AREAL, {"critic.gradient_checkpointing": True}, "critic.gradient_checkpointing=false (true for the policy)"),
        (ROLL, {SIZE: 1}, f"{SIZE}=8 (1 for the policy)"),
    ],
)
def test_a_critic_that_inherits_nothing_of_the_policy_s_is_not_counted(
    settings: dict[str, Any], same: dict[str, Any], words: str, tmp_path: Path
) -> None:
    asked = [convert(read_source(write_yaml(tmp_path, settings | more), None), "H100", None) for more in ({}, same)]
    assert [words in imported.not_counted for imported in asked] == [True, False]
