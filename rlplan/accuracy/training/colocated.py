"""Predictors for a trainer and a rollout engine that share one process: NVML's memory while one of them sleeps.

In: a point of AgileRL's profiling rig. Out: its job (GRPO on one GPU, the engine asleep during training), and its
plan's memory in the measured phase. Left out: trainers in separate processes (points.py), engines with several ranks.

Source: AgileRL 2.8.2 algorithms/core/base.py (`_prepare_vllm_for_training`, `_backward_pass`, which steps after each
micro-batch), utils/llm_utils.py (`build_vllm_llm_init_kwargs`, `resolve_vllm_max_num_batched_tokens`); its rig measures
one rollout and one update by NVML's `used`, which counts what the driver keeps (tools/memory_profiling/nvml.py).
"""

from typing import Any, Literal

from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.predict import (
    TRAINS,
    context_of_process,
    find_actions,
    held_by_engine,
    held_on_device,
    plan_point_job,
    predict_bytes,
)
from rlplan.accuracy.predictions import CannotPredict, Prediction
from rlplan.accuracy.settings import KEYS, find_gpu
from rlplan.accuracy.training.job import training_job
from rlplan.accuracy.training.settings import RunSettings
from rlplan.planner.plan import Plan
from rlplan.spec.hardware.profile import GpuProfile
from rlplan.units import ceil_div
from rlplan.vocabulary import ActionKind, MemoryKind

TOKENS_OF_A_SEQUENCE = 8192
"""Most tokens per sequence in one engine pass (AgileRL's `resolve_vllm_max_num_batched_tokens`)."""


def colocated_job(point: MeasuredPoint, *, has_passes: bool = True) -> dict[str, Any]:
    """The job of a point. has_passes: the update was measured, and not the engine. Raises: CannotPredict."""
    settings = RunSettings(point)
    if not has_passes:
        point = _add_usual_passes(point)
    job = training_job(point)
    length, group = settings.require(KEYS["sequence"], "sequence length"), settings.read_count("group_size")
    prompt = min(settings.read_count("prompt", settings.read_count("prompt_len", length // 4)), length - 1)
    num_prompts = settings.read_count("n_prompts", settings.read_count("num_prompts", 1))
    num_seqs = settings.read_count("max_num_seqs", group)
    tokens = min(num_seqs * length, max(length, num_seqs * TOKENS_OF_A_SEQUENCE))
    micro_batch = min(job["workload"]["micro_batch_size_per_gpu"], group * num_prompts)
    num_updates = ceil_div(group * num_prompts, micro_batch)
    job["training"].setdefault("lora", None)
    is_sampled = "sampled" in settings.word("completion").lower()
    has_reference = "reference" in settings.word("adapters").lower()
    job |= {
        "algorithm": {"name": "grpo", "kl_coef": 0.001 if has_reference else 0.0},
        "roles": {"reference": {"adapter": "start"}} if has_reference else {},
        "workload": {
            "num_prompts_per_step": num_prompts,
            "num_samples_per_prompt": group,
            "mini_batch_size": micro_batch if group * num_prompts % micro_batch == 0 else None,
            "micro_batch_size_per_gpu": micro_batch,
            "max_prompt_len": prompt,
            "max_response_len": length - prompt,
            "num_steps": 1 if num_updates == 1 else 2,
        }
        | ({"response_lengths": {"kind": "uniform", "low": 1, "high": length - prompt}} if is_sampled else {}),
        "rollout": {
            "tp": 1,
            "attention_dp": 1,
            "has_expert_parallel": False,
            "shares_process": True,
            "engine_version": find_version(settings),
            "sleep_level": 1,
            "gpu_memory_utilization": settings.number("gpu_memory_utilization", 0.3, high=1.0),
            "max_num_seqs": num_seqs,
            "max_num_batched_tokens": settings.read_count("max_num_batched_tokens", tokens),
        },
        "placement": {"placement": "colocated", "offload": "none"},
    }
    if job["training"]["lora"] is not None:
        job["placement"]["sync_content"] = "adapter"
    return job


def _add_usual_passes(point: MeasuredPoint) -> MeasuredPoint:
    """A point of an engine alone, with the training settings that a job needs; they do not change the engine."""
    usual = {"micro_batch": 1, "lora_rank": point.settings.get("lora_rank") or 8, "quant": "none", "loss": "fused"}
    return point.model_copy(update={"settings": point.settings | usual})


def find_version(settings: RunSettings) -> str | None:
    """The engine's release, also from the setting `framework`: `under colocated vLLM 0.23.0`."""
    stated = settings.word("vllm", settings.word("vllm_version"))
    return stated or settings.word("framework").lower().rpartition("vllm")[2].strip().split(" ")[0].strip("(),") or None


def known_gpu(point: MeasuredPoint) -> GpuProfile:
    """The GPU. Raises: CannotPredict for an unknown GPU, or one without NVML's number for its driver."""
    gpu = find_gpu(point)
    if gpu is None:
        raise CannotPredict("the GPU is not known, and with it the context that NVML counts")
    if gpu.nvml_memory is None:
        raise CannotPredict(f"what NVML counts for the driver of {gpu.name} is not known")
    return gpu


def predict_nvml(point: MeasuredPoint, plan: Plan, *kinds: ActionKind, is_resident: bool = False) -> Prediction:
    """NVML's memory of the GPU during actions, or after them (is_resident): all processes, and the driver's part."""
    run_phase: Literal["first", "steady"] = "first" if plan.job.workload.num_steps == 1 else "steady"
    moments = [
        held_on_device(plan, action, run_phase, is_resident=is_resident) for action in find_actions(plan, *kinds)
    ]
    if not moments:
        raise CannotPredict(f"a step of this job has no {kinds[0].value}")
    peak = max(moments, key=lambda sizes: sum(sizes.values()))
    driver = {MemoryKind.PROCESS: known_gpu(point).kept_by_driver}
    return predict_bytes(point, peak | driver, plan)


def predict_update(point: MeasuredPoint) -> Prediction:
    """NVML's peak during an update, with the engine asleep."""
    return predict_nvml(point, plan_point_job(colocated_job(point)), *TRAINS)


def predict_engine(point: MeasuredPoint) -> Prediction:
    """NVML's memory of a sleeping engine, or its peak during generation; the trainer is offloaded in both cases."""
    plan, is_asleep = plan_point_job(colocated_job(point, has_passes=False)), point.kind == "sleeping_engine_residual"
    kind = ActionKind.SLEEP_ENGINE if is_asleep else ActionKind.GENERATE
    sizes = held_by_engine(plan, kind, is_resident=is_asleep)
    sizes[MemoryKind.CONTEXT] = sizes.get(MemoryKind.CONTEXT, 0) + context_of_process(plan)
    return predict_bytes(point, sizes | {MemoryKind.PROCESS: known_gpu(point).kept_by_driver}, plan)
