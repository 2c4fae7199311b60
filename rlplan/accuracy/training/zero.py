"""DeepSpeed's settings of a training point, by the keys of its own config and of tables that quote it.

In: settings, ranks, types. Out: ZeroSettings; the steady state of a model of which only the size is known.
Left out: what the passes hold (states.py).
"""

import re
from dataclasses import replace
from typing import Any

from rlplan.accuracy.registry import CannotPredict
from rlplan.accuracy.training.settings import RunSettings, num_ranks, read_optimizer, read_precision
from rlplan.memory.trainers.optimizers import Optimizer
from rlplan.memory.trainers.zero import ZeroSettings, ZeroStates
from rlplan.spec.base import shorten
from rlplan.spec.model import Parameter

STAGE = ("zero_stage", "zero", "stage", "deepspeed_stage")
COUNTS = {
    "reduce_bucket_size": ("reduce_bucket_size",),
    "sub_group_size": ("sub_group_size",),
    "max_live_parameters": ("stage3_max_live_parameters", "max_live_parameters"),
    "max_reuse_distance": ("stage3_max_reuse_distance", "max_reuse_distance"),
    "prefetch_bucket_size": ("stage3_prefetch_bucket_size", "prefetch_bucket_size"),
    "persistence_threshold": ("stage3_param_persistence_threshold", "param_persistence_threshold"),
}
"""Fields of ZeroSettings and the keys that set them; sizes are elements."""


def read_stage(settings: RunSettings) -> int | None:
    """The ZeRO stage; None where the point speaks of none. Raises: CannotPredict for one that does not exist."""
    key = settings.first(STAGE)
    if key is None:
        return None
    value = settings.raw(key)
    match = re.search(r"\d+", value) if isinstance(value, str) else None
    stage = int(match.group()[:9]) if match else settings.count(key, at_least=0)
    if stage > 3:
        raise CannotPredict(f"setting '{key}' is {shorten(value)}; stages are 0 to 3")
    return stage


def read_zero(settings: RunSettings, ranks: int, optimizer: Optimizer, element_bytes: int) -> ZeroSettings:
    """ZeroSettings of a point, with DeepSpeed's defaults for what is not stated. Raises: CannotPredict."""
    stage = read_stage(settings)
    if stage is None:
        raise CannotPredict("the ZeRO stage is not stated")
    counts: dict[str, Any] = {}
    for field, keys in COUNTS.items():
        if key := settings.first(keys):
            counts[field] = settings.count(key, at_least=0)
    accumulated = str(settings.raw("grad_accum_dtype") or "")
    plain = ZeroSettings(
        stage,
        ranks,
        weight_bytes=element_bytes,
        gradient_bytes=4 if "32" in accumulated else element_bytes,
        master_bytes=2 if settings.says("bf16_master_weights_and_grads") else 4,
        moment_bytes=2 if settings.says("bf16_optimizer_states") else 4,
        optimizer=optimizer,
        overlaps_communication=settings.says("overlap_comm"),
        offloads_optimizer=is_offloaded(settings, "offload_optimizer"),
        offloads_parameters=is_offloaded(settings, "offload_param"),
    )
    return replace(plain, **counts)


def is_offloaded(settings: RunSettings, key: str) -> bool:
    """Whether a key of DeepSpeed's sends states to the host: true, a device's name, or `{"device": ...}`."""
    value = settings.raw(key)
    if isinstance(value, dict):
        value = value.get("device")
    return value is True or (isinstance(value, str) and value.lower() not in ("", "none", "no", "false"))


def has_own_adam(settings: RunSettings) -> bool:
    """Whether DeepSpeed steps with its own kernel: unless the optimizer is said to be torch's, and not fused.

    Source: DeepSpeed 0.19.8 runtime/engine.py (`_configure_basic_optimizer`, `torch_adam`).
    """
    word = str(settings.raw("optimizer") or "").lower()
    return not (settings.says("torch_adam") or ("torch" in word and "fused" not in word))


def steady_bytes_by_count(settings: RunSettings) -> int:
    """Bytes that a rank holds between two steps of a model of which only the number of parameters is known.

    Counts: `ZeroStates` of one tensor, which no threshold keeps whole. Raises: CannotPredict.
    """
    num_parameters = settings.count("params")
    optimizer, precision = read_optimizer(settings), read_precision(settings, has_master=False)
    zero = read_zero(settings, num_ranks(settings), optimizer, precision.compute)
    return ZeroStates(zero, (Parameter("parameters", (num_parameters,)),)).after_step().device_bytes
