"""Keys of older versions: each is answered with its new name.

In: a parsed job file. Out: nothing, or a SpecError. Left out: keys that never were (base.py says what is near).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rlplan.errors import SpecError
from rlplan.frameworks.profile import UnknownFrameworkError, split_label

RENAMED = {
    "target": "framework (rlplan, verl@0.9, ...) and training.backend (deepspeed, fsdp2 or megatron)",
    "source": "framework, such as verl@0.9",
    "workload.prompts": "data.prompts",
    "workload.heldout_prompts": "data.heldout",
    "workload.prompt_column": "data.prompt_column",
    "workload.answer_column": "data.answer_column",
    "workload.max_tokens_per_micro_batch": "training.max_tokens_per_micro_batch",
    "training.recompute": "training.gradient_checkpointing (true or false)",
    "training.quantization": "training.lora.base_dtype",
    "training.lora.targets": "training.lora.target_modules",
    "training.lora.base": "training.lora.base_dtype (auto or nf4)",
    "placement.parks": "placement.offload (none, host or disk)",
    "placement.parks_only_frozen": "placement.offload_roles (all or frozen)",
    "placement.generation_share": "placement.num_generation_devices",
    "placement.num_scoring_gpus": "placement.num_scoring_devices",
    "placement.reward_latency_s": "workload.reward_latency_s",
    "model": "policy",
    "value_model": "roles.value.path",
    "reward_model": "roles.reward.path",
    "gpus": "hardware",
    "gpus_per_host": "hardware.num_hosts",
    "memory": "hardware.memory",
    "host_memory": "hardware.host_memory",
    "kl_coef": "algorithm.kl_coef",
    "algorithm_custom": "algorithm.custom",
    "price_per_gpu_hour": "hardware.price_per_gpu_hour",
    "hardware.gpus": "hardware.profile and hardware.num_devices",
}
"""Old key -> new key."""


def refuse_old_keys(data: Any) -> None:
    """Raises: SpecError where a job has a key of an older version, or is an old budget."""
    if not isinstance(data, Mapping):
        return
    for old, new in _old_keys(data):
        raise SpecError(
            f"unknown key '{old}': it is {new} now",
            where=old,
            rule="keys of a job: docs/job.md",
            way_out=_framework_settings(data, old) if old in ("target", "source") else f"write {new}",
        )
    version = data.get("schema_version")
    if version == 1:
        raise SpecError(
            "schema_version is 1",
            where="schema_version",
            rule="this rlplan reads jobs of version 2; CHANGELOG.md says what was renamed",
            way_out="schema_version: 2, or leave it out",
        )


def _framework_settings(data: Mapping[str, Any], old: str) -> str:
    """The overrides that say what the old keys `target` and `source` said, as they are typed."""
    trainer, stack = (str(data.get(key) or "") for key in ("target", "source"))
    backends = {"rlplan": "", "fsdp": "fsdp2", "fsdp2": "fsdp2", "megatron": "megatron", "deepspeed": "deepspeed"}
    names = [_known_name(stack), _known_name(trainer) if trainer not in ("", "deepspeed") else ""]
    name, backend = next(filter(None, names), ""), backends.get(trainer, "")
    settings = [f"framework={name}"] if name else []
    settings += [f"training.backend={backend}"] if backend else []
    return f"write {' '.join(settings)}" if settings else f"leave {old} out, or write framework=verl"


def _known_name(label: str) -> str:
    """The framework that a label names; empty where it names none."""
    try:
        return split_label(label)[0]
    except UnknownFrameworkError:
        return ""


def _old_keys(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for old, new in RENAMED.items():
        *parents, last = old.split(".")
        part: Any = data
        for parent in parents:
            part = part.get(parent) if isinstance(part, Mapping) else None
        if isinstance(part, Mapping) and last in part:
            yield old, new
