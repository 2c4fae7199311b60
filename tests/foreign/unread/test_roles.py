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
