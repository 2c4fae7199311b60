"""Predictor of weight syncs: seconds until the engines hold a trainer's weights.

In: a point with the trainer, the transport and the number of GPUs or nodes. Out: the job, and the seconds of its plan's
sync. Left out: conversion of weights to fp8 and other formats.
"""

import math
import re
from typing import Any

from rlplan.accuracy.named_models import find_point_model, make_policy
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.predict import find_actions, plan_point_job
from rlplan.accuracy.predictions import CannotPredict, Prediction
from rlplan.accuracy.rl_steps.job import find_framework
from rlplan.accuracy.settings import WORDS, Settings, find_gpu
from rlplan.errors import SpecError
from rlplan.spec.base import shorten_value
from rlplan.spec.hardware.catalogue import get_gpu
from rlplan.spec.hardware.profile import GpuProfile
from rlplan.units import ceil_div
from rlplan.vocabulary import ActionKind

USUAL_GPUS_PER_NODE = 8
SLIME_BUCKET = "1GiB"
USUAL_TP = 8
"""Ranks of an engine where the point does not say: those of a node."""
FABRICS = r"\bib\b|infiniband|roce|rdma|\befa\b|\bcx-?\d|gbps|gbit|slingshot"
"""Words for a network between hosts that its adapters can fill."""
ETHERNET_BYTES_PER_S = 1.25e9
"""Slowest network between hosts whose fabric is not named: 10 Gbit/s."""
UNIT = re.compile(r"(ms|s|sec|seconds|GB/s)\b")


def predict_sync(point: MeasuredPoint) -> Prediction:
    """Seconds of one weight sync, or GB/s where a rate was measured."""
    unit = UNIT.match(point.measured.unit.strip())
    if unit is None:
        raise CannotPredict(f"unit {shorten_value(point.measured.unit)} is no duration")
    plan = plan_point_job(sync_job(point))
    [action, *_] = find_actions(plan, ActionKind.SYNC_WEIGHTS)
    seconds, spread = plan.costs[action].seconds, 1.0
    num_bytes = find_point_model(point).num_parameters * Settings(point).element_bytes("dtype")
    if plan.choice.sync_mode == "nccl" and plan.job.hardware.num_hosts > 1 and not _Words(point).has(FABRICS):
        # FSDP gathers across hosts in fp32 before one rank sends 16 bits
        copies = 3 if plan.job.backend == "fsdp2" else 1
        spread += copies * num_bytes / ETHERNET_BYTES_PER_S / seconds
    if unit.group(1) == "GB/s":
        return Prediction(num_bytes / seconds / 1e9, spread=spread)
    return Prediction(seconds * (1000 if unit.group(1) == "ms" else 1), spread=spread)


def sync_job(point: MeasuredPoint) -> dict[str, Any]:
    """The job of a point. Raises: CannotPredict."""
    settings, words = Settings(point), _Words(point)
    if settings.flag("no_ipc_load"):
        raise CannotPredict("the measurement excludes loading in the engines, which every job's sync includes")
    if settings.element_bytes("dtype") != 2:
        raise CannotPredict("weights that are not sent in 16 bits: a job cannot express that")
    training, generation = _read_ranks(point)
    is_megatron = words.has(r"trainer=megatron|slime|backend=megatron|megatron")
    transport, framework = _find_transport(words), find_framework(words.text)
    ranks = words.number(r"(?:gen(?:eration)?|rollout)[ _-]*tp[ _=]*(\d+)") or words.number(r"\btp[ _=]*(\d+)")
    placement: dict[str, Any] = {"placement": "colocated"}
    if generation is not None:
        placement = {"placement": "disaggregated", "num_generation_devices": generation}
        placement |= {"sync_content": "delta"} if transport == "delta" else {"transport": transport}
    if framework == "slime":
        placement["sync_bucket"] = SLIME_BUCKET
    elif "checkpoint_engine" in settings and not settings.flag("checkpoint_engine"):
        placement["sync_bucket"] = 0
    total = training + (generation or 0)
    return {
        "policy": make_policy(point),
        "algorithm": {"name": "grpo", "kl_coef": 0.0},
        "framework": framework,
        "hardware": {
            "profile": _find_gpu(point).name,
            "num_devices": total,
            "num_hosts": ceil_div(total, USUAL_GPUS_PER_NODE),
        },
        "workload": {"num_prompts_per_step": total, "num_samples_per_prompt": 8},
        "training": {
            "backend": "megatron" if is_megatron else "deepspeed" if framework == "openrlhf" else "fsdp2",
            **dict.fromkeys(("tp", "pp", "cp", "ep", "ulysses"), 1),
            "gradient_checkpointing": True,
            **dict.fromkeys(
                ("offloads_optimizer", "offloads_parameters"), "param" in str(settings.raw("offload")).lower()
            ),
            "max_tokens_per_micro_batch": 4096,
        },
        "rollout": {
            "engine": "sglang" if words.has("sglang") else "auto",
            "tp": ranks or math.gcd(min(USUAL_TP, generation or training), find_point_model(point).num_heads),
            "attention_dp": 1,
        },
        "placement": placement,
    }


class _Words:
    """The words of a point as one text, for searches."""

    def __init__(self, point: MeasuredPoint) -> None:
        self.text = f"{Settings(point).join_words(WORDS['sync_words'])} {point.gpu or ''} {point.source}".lower()

    def has(self, pattern: str) -> bool:
        return re.search(pattern, self.text) is not None

    def number(self, pattern: str) -> int | None:
        match = re.search(pattern, self.text)
        return int(match.group(1)) if match else None


def _find_transport(words: _Words) -> str:
    if words.has(r"(backend|transport|mode|method|engine)=[^=]*(delta|sparse)"):
        return "delta"
    if words.has(r"(backend|transport|mode|method|engine)=[^=]*disk"):
        return "disk"
    if words.has(r"(lora|adapter)\w*=(?!false|none|0)"):
        raise CannotPredict("the bytes of adapters are not stated")
    if words.has(r"=[^=]*\b(ipc|naive|coloca)") or (
        words.has("slime") and not words.has(r"=[^=]*\b(nccl|distributed)")
    ):
        return "cuda_ipc"
    return "nccl"


def _read_ranks(point: MeasuredPoint) -> tuple[int, int | None]:
    """GPUs that train and that generate; None for the second where both share GPUs or the point does not say."""
    words, settings = _Words(point), Settings(point)
    if {"trainer_fsdp", "num_rollout"} <= point.settings.keys():
        return settings.read_count("trainer_fsdp"), settings.read_count("num_rollout")
    if match := re.search(r"(\d+)[a-z ]*\+\s*(\d+)\s*(nodes?)?", words.text):
        scale = USUAL_GPUS_PER_NODE if match.group(3) else 1
        return int(match.group(1)) * scale, int(match.group(2)) * scale
    if match := re.search(r"(\d+)\s*x\s*(\d+)\s*[a-z]", (point.gpu or "").lower()):
        total = int(match.group(1)) * int(match.group(2))
    else:
        total = words.number(r"(\d+)\s*x\s*[a-z]") or settings.read_count("num_gpus")
    if total > 1 and _find_transport(words) in ("nccl", "delta", "disk"):
        return total - total // 2, total // 2
    return total, None


def _find_gpu(point: MeasuredPoint) -> GpuProfile:
    """The GPU, also from a text such as `H100 nodes (8x), IB`. Raises: CannotPredict."""
    if gpu := find_gpu(point):
        return gpu
    for word in re.findall(r"[a-z]+\d+[a-z]*", (point.gpu or "").lower()):
        try:
            return get_gpu(word, where=point.id)
        except SpecError:
            continue
    raise CannotPredict(f"no profile is known for '{shorten_value(point.gpu)}'")
