"""DeepSpeed settings of a training point, by the keys of its config and of tables that quote it.

In: settings. Out: the corresponding keys of a job's `training`. Raises CannotPredict for settings without such a key.
"""

import re
from typing import Any

from rlplan.accuracy.predictions import CannotPredict
from rlplan.accuracy.training.settings import RunSettings
from rlplan.spec.base import shorten_value

STAGE = ("zero_stage", "zero", "stage", "deepspeed_stage")
COUNTS = {
    "reduce_bucket_size": ("reduce_bucket_size",),
    "persistence_threshold": ("stage3_param_persistence_threshold", "param_persistence_threshold"),
}
"""Job keys, with DeepSpeed's keys for them; sizes are in elements."""
UNSAID = (
    *("sub_group_size", "stage3_max_live_parameters", "max_live_parameters", "stage3_max_reuse_distance"),
    *("max_reuse_distance", "stage3_prefetch_bucket_size", "prefetch_bucket_size"),
)
"""DeepSpeed keys without a job key: rlplan's runtime sets them."""


def read_stage(settings: RunSettings) -> int | None:
    """The stated ZeRO stage; None without one. Raises: CannotPredict for a stage that does not exist."""
    key = settings.first(STAGE)
    if key is None:
        return None
    value = settings.raw(key)
    match = re.search(r"\d+", value) if isinstance(value, str) else None
    stage = int(match.group()[:9]) if match else settings.read_count(key, at_least=0)
    if stage > 3:
        raise CannotPredict(f"setting '{key}' is {shorten_value(value)}; stages are 0 to 3")
    return stage


def zero_keys(settings: RunSettings) -> dict[str, Any]:
    """The keys of `training` for a DeepSpeed config. Raises: CannotPredict."""
    if (unsaid := settings.first(UNSAID)) is not None:
        raise CannotPredict(f"setting '{unsaid}': a job cannot express it")
    keys: dict[str, Any] = {"zero_stage": read_stage(settings)}
    for key, names in COUNTS.items():
        if name := settings.first(names):
            keys[key] = settings.read_count(name, at_least=0)
    settings.says("overlap_comm")  # a job of rlplan's own runtime has no key for it, and its buckets are alike
    if settings.says("bf16_master_weights_and_grads"):
        keys["master_dtype"] = "bfloat16"
    if settings.says("bf16_optimizer_states"):
        keys["moment_dtype"] = "bfloat16"
    keys["offloads_optimizer"] = is_offloaded(settings, "offload_optimizer")
    keys["offloads_parameters"] = is_offloaded(settings, "offload_param")
    return keys


def is_offloaded(settings: RunSettings, key: str) -> bool:
    """Whether a DeepSpeed key offloads states to the host: true, a device's name, or `{"device": ...}`."""
    value = settings.raw(key)
    if isinstance(value, dict):
        value = value.get("device")
    return value is True or (isinstance(value, str) and value.lower() not in ("", "none", "no", "false"))
