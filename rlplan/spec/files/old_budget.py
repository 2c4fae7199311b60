"""Budgets of older versions as jobs: what a person is answered who still has one.

In: a parsed budget file. Out: YAML of the job that says the same. Left out: whether it is right (job.py says that).
"""

import io
from collections.abc import Mapping
from typing import Any

from rlplan.spec.algorithms import DEFAULT

_TOP = {"memory": "memory", "host_memory": "host_memory", "price_per_gpu_hour": "price_per_gpu_hour"}
_SAME = ("target", "objective", "workload", "training", "rollout", "placement")


def job_of_budget(data: Mapping[str, Any]) -> str:
    """YAML of the job.

    >>> print(job_of_budget({"model": "Qwen/Qwen2.5-7B", "gpus": "8xH100", "training": {"recompute": "full"}}), end="")
    policy: Qwen/Qwen2.5-7B
    hardware: 8xH100
    training:
      gradient_checkpointing: true
    """
    from ruamel.yaml import YAML

    yaml, out = YAML(typ="safe", pure=True), io.StringIO()
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.dump(_job(data), out)
    return out.getvalue()


def _job(data: Mapping[str, Any]) -> dict[str, Any]:
    kept = data.get("job") if isinstance(data.get("job"), Mapping) else {}
    assert isinstance(kept, Mapping)
    job: dict[str, Any] = {"policy": data.get("model"), "algorithm": data.get("algorithm"), "hardware": data["gpus"]}
    if data.get("kl_coef") is not None:
        job["algorithm"] = {"name": data.get("algorithm", DEFAULT), "kl_coef": data["kl_coef"]}
    limits = {new: data[old] for old, new in _TOP.items() if data.get(old) is not None}
    if limits:
        job["hardware"] = _long_hardware(str(data["gpus"])) | limits
    roles = {name: {"path": data[f"{name}_model"]} for name in ("value", "reward") if data.get(f"{name}_model")}
    if roles:
        job["roles"] = roles
    job |= {key: _part(key, data[key]) for key in _SAME if data.get(key)}
    job |= {key: value for key, value in kept.items() if key not in (*_SAME, "policy", "roles")}
    _move(job, kept)
    return {key: value for key, value in job.items() if value is not None}


def _long_hardware(gpus: str) -> dict[str, Any]:
    count, _, profile = gpus.replace("*", "x").partition("x")
    return {"profile": profile.strip(), "num_devices": int(count) if count.strip().isdigit() else count}


def _part(name: str, part: Any) -> Any:
    if not isinstance(part, Mapping):
        return part
    kept = dict(part)
    if name == "training":
        if "recompute" in kept:
            kept["gradient_checkpointing"] = {"full": True, "none": False}.get(kept.pop("recompute"), "auto")
        lora = kept.get("lora")
        if isinstance(lora, Mapping):
            words = {"targets": "target_modules", "base": "base_dtype"}
            kept["lora"] = {words.get(key, key): value for key, value in lora.items() if value != "bfloat16"}
    if name == "placement":
        parks = kept.pop("parks", None)
        if parks is not None and parks != "auto":
            kept["offload"] = "host" if parks else "none"
            kept |= {"offload_roles": "frozen"} if parks == "frozen" else {}
        if "num_scoring_gpus" in kept:
            kept["num_scoring_devices"] = kept.pop("num_scoring_gpus")
    return kept


def _move(job: dict[str, Any], kept: Mapping[str, Any]) -> None:
    """What changed its part: tokens of a pass, the latency of rewards, data."""
    workload = dict(job.get("workload", {}))
    if "max_tokens_per_micro_batch" in workload:
        job["training"] = {
            **job.get("training", {}), "max_tokens_per_micro_batch": workload.pop("max_tokens_per_micro_batch")
        }  # fmt: skip
    if "reward_latency_s" in job.get("placement", {}):
        workload["reward_latency_s"] = job["placement"].pop("reward_latency_s")
    beside = dict(kept.get("workload", {})) if isinstance(kept.get("workload"), Mapping) else {}
    data = {
        new: beside.pop(old)
        for old, new in {"prompts": "prompts", "heldout_prompts": "heldout"}.items()
        if old in beside
    }
    if data:
        job["data"] = data
    if workload | beside:
        job["workload"] = workload | beside
