"""Jobs, models, profiles and plans to test with: small, whole, and with paths into `examples/`.

In: what should differ. Out: real specs, through the library's own validation.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlplan.planner.plan import Plan
from rlplan.planner.search import find_plan
from rlplan.spec.base import validate
from rlplan.spec.files.job_file import job_from
from rlplan.spec.hardware.profile import HardwareProfile
from rlplan.spec.job import JobSpec
from rlplan.spec.model import ModelSpec, load_model
from rlplan.spec.models.adapters import ALL_LINEAR, adapted_modules, list_lora_parameters
from rlplan.spec.parts.adapter_files import CONFIG_FILE, PEFT_PREFIX, WEIGHTS_FILE
from rlplan.spec.resolved import ResolvedJob, SettledJob, resolve_on_cpu, settle
from rlplan.units import MIB

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
QUICKSTART = EXAMPLES / "quickstart.yaml"
ALL_EXAMPLES = sorted(
    path
    for pattern in ("*.yaml", "training/*.yaml", "rewards/*.yaml")
    for path in EXAMPLES.glob(pattern)
    if "\nstages:" not in path.read_text("utf-8")
)
"""Files with one job."""
JOB_EXAMPLES = [path for path in ALL_EXAMPLES if "profile: cpu-host" in path.read_text("utf-8")]
"""Jobs that run on a CPU host; the other examples are planned for GPUs."""
GPU_EXAMPLES = [path for path in ALL_EXAMPLES if path not in JOB_EXAMPLES]


def job_data(**overrides: Any) -> dict[str, Any]:
    """A job as parsed YAML: 16 rollouts a step on two devices, every part but the optional ones, and ZeRO-2.

    overrides: nested (`workload={"num_steps": 3}` is laid over the part) or dotted (`**{"workload.num_steps": 3}`).
    """
    data: dict[str, Any] = {
        "schema_version": 2,
        "name": "small",
        "policy": {"path": str(EXAMPLES / "models" / "sorter")},
        "hardware": {"profile": "cpu-host", "num_devices": 2, "memory": "8GiB"},
        "algorithm": {"name": "grpo", "learning_rate": 1e-5},
        "data": {
            "prompts": str(EXAMPLES / "data" / "sort_digits" / "train.jsonl"),
            "heldout": str(EXAMPLES / "data" / "sort_digits" / "heldout.jsonl"),
        },
        "workload": {
            "num_steps": 3,
            "num_prompts_per_step": 4,
            "num_samples_per_prompt": 4,
            "mini_batch_size": 16,
            "micro_batch_size_per_gpu": 4,
            "max_prompt_len": 8,
            "max_response_len": 12,
            "evaluate_every": 2,
        },
        "rewards": [{"kind": "answer_matcher"}],
        "training": {"zero_stage": 2},
    }
    for key, value in overrides.items():
        *parents, last = key.split(".")
        part = data
        for parent in parents:
            part = part.setdefault(parent, {})
        if isinstance(value, dict) and isinstance(part.get(last), dict):
            part[last] = {**part[last], **value}
        else:
            part[last] = value
    return data


def make_adapter(
    folder: Path,
    *,
    rank: int,
    alpha: float = 16.0,
    targets: str | Sequence[str] = ALL_LINEAR,
    scale: float = 0.1,
    seed: int = 0,
) -> Path:
    """An adapter of the sorter in PEFT's layout, A and B drawn at random. scale: their deviation."""
    import numpy as np
    from safetensors.numpy import save_file

    parameters = list_lora_parameters(load_model(EXAMPLES / "models" / "sorter"), rank, targets)
    generator = np.random.default_rng(seed)
    drawn = {PEFT_PREFIX + p.name: generator.normal(0, scale, p.shape).astype("float32") for p in parameters}
    folder.mkdir(parents=True)
    save_file(drawn, folder / WEIGHTS_FILE)
    names = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": adapted_modules(parameters)}
    (folder / CONFIG_FILE).write_text(json.dumps(names), encoding="utf-8")
    return folder


def make_job(**overrides: Any) -> ResolvedJob:
    """The job of `job_data`, validated, with what its open choices come to on its machine.

    On GPUs everything is resolved as on a CPU host, so that tests say what they want to differ.
    """
    return resolve_on_cpu(ask_job(**overrides))


def ask_job(**overrides: Any) -> JobSpec:
    """The job of `job_data` as a user asks it: what it leaves open is `auto`."""
    return validate(JobSpec, job_data(**overrides), file="job.yaml")


def gpu_job(answers: dict[str, Any], overrides: Sequence[str] = ()) -> SettledJob:
    """A job on GPUs as a command line says it, with its machine's defaults."""
    return settle(job_from(answers, overrides))


def write_job(folder: Path, **overrides: Any) -> Path:
    """A job file in `folder` (JSON is YAML 1.2)."""
    path = folder / "job.yaml"
    path.write_text(json.dumps(job_data(**overrides), indent=1))
    return path


def make_model(**overrides: Any) -> ModelSpec:
    """A Qwen3 of two layers whose sizes are all different: h=8, a=4, k=2, d=3, I=20, V=70 (q=12, v=6)."""
    fields: dict[str, Any] = {
        "architecture": "Qwen3ForCausalLM",
        "hidden_size": 8,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 3,
        "intermediate_size": 20,
        "vocab_size": 70,
        "max_position_embeddings": 1024,
        "has_tied_embeddings": True,
        "has_qkv_bias": False,
        "has_qk_norm": True,
    }
    return ModelSpec(**(fields | overrides))


def make_profile(**overrides: Any) -> HardwareProfile:
    """A CPU host with round numbers: imports of 100, 200, 300, 10 and 20 MiB, slack of 1, 2 and 3 MiB."""

    def make_sourced(num_bytes: int) -> dict[str, Any]:
        return {"value": num_bytes, "provenance": "measured", "source": "made up for a test"}

    imports = {"policy_trainer": 100, "scorer": 200, "rollout_engine": 300, "driver": 10, "ray_system": 20}
    slack = {"policy_trainer": 1, "scorer": 2, "rollout_engine": 3}
    fields: dict[str, Any] = {
        "schema_version": 1,
        "name": "test-host",
        "kind": "cpu",
        "description": "made up",
        "memory": make_sourced(16_384 * MIB),
        "max_devices": 64,
        "weight_packing": {
            "row_block": 64,
            "column_block": 16,
            "bytes_per_weight": make_sourced(1000),
            "bytes_per_shape": make_sourced(100_000),
            "bytes_per_batch_size": make_sourced(10_000),
        },
        "process_overheads": {name: make_sourced(size * MIB) for name, size in imports.items()},
        "process_slack": {name: make_sourced(size * MIB) for name, size in slack.items()},
    }
    return validate(HardwareProfile, fields | overrides, file="profile.yaml")


def make_plan(**overrides: Any) -> Plan:
    """The plan for the job of `make_job`."""
    return find_plan(make_job(**overrides))


def config_data(**overrides: Any) -> dict[str, Any]:
    """A Hugging Face `config.json` of the size of `make_model`; None as a value stays, `...` removes the key."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 3,
        "intermediate_size": 20,
        "vocab_size": 70,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }
    return {key: value for key, value in (config | overrides).items() if value is not ...}


def write_config(folder: Path, **overrides: Any) -> Path:
    """A model folder with that config."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_data(**overrides)))
    return folder
