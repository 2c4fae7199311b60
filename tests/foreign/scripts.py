"""Foreign scripts to test with: a small verl job, and the facts of published ones as scripts."""

import json
import shlex
from pathlib import Path
from typing import Any

from rlplan.foreign.export.folders import nest

VERL = {
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": 64,
    "data.max_prompt_length": 512,
    "data.max_response_length": 1024,
    "actor_rollout_ref.model.path": "Qwen/Qwen2.5-7B-Instruct",
    "actor_rollout_ref.actor.ppo_mini_batch_size": 64,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.actor.fsdp_config.param_offload": True,
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": True,
    "actor_rollout_ref.rollout.n": 8,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.6,
    "trainer.n_gpus_per_node": 8,
}
"""Fits eight H100."""


def verl_script(folder: Path, settings: dict[str, Any] | None = None, *, before: str = "", preset: str = "") -> Path:
    """A script that starts verl with these settings laid over VERL."""
    return write_script(folder, "python3 -m verl.trainer.main_ppo", {**VERL, **(settings or {})}, before, preset)


def write_script(folder: Path, start: str, settings: dict[str, Any], before: str = "", preset: str = "") -> Path:
    """A script with one argument a line, as people write them: `key=value`, or `--key value` where it starts flags."""
    words = [f"--config-name={preset}"] * bool(preset)
    for key, value in settings.items():
        if value is True and key.startswith("--"):
            words.append(key)
        elif value is not None:
            words.append(f"{key}{' ' if key.startswith('--') else '='}{shlex.quote(str(value))}")
    path = folder / "train.sh"
    path.write_text(f"#!/bin/bash\nset -x\n{before}\n{start} \\\n    " + " \\\n    ".join(words) + ' "$@"\n')
    return path


def write_yaml(folder: Path, settings: dict[str, Any]) -> Path:
    """A YAML file with these dotted keys."""
    path = folder / "train.yaml"
    path.write_text(json.dumps(nest(settings), indent=1))
    return path
