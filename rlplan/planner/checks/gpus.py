"""Checks of a job against its models and GPUs, for combinations that an engine or a trainer would reject.

In: a SettledJob and its setting. Out: nothing, or a SpecError. Left out: checks within one part of the spec (spec/).
"""

from collections.abc import Iterator

from rlplan.dataflow.placements import GENERATION
from rlplan.errors import SpecError
from rlplan.memory.serving.weights import build_engine_layout, engine_weight_bytes
from rlplan.planner.checks import frameworks, placements, trainers
from rlplan.planner.checks.placements import Problem
from rlplan.planner.setting import GpuSetting
from rlplan.spec.hardware.profile import ComputeDtype
from rlplan.spec.models.adapters import list_lora_parameters
from rlplan.spec.parts.lengths import ConstantLengths
from rlplan.spec.parts.training import count_ranks
from rlplan.spec.resolved import SettledJob
from rlplan.units import format_bytes
from rlplan.vocabulary import Dtype


def check_job(job: SettledJob, setting: GpuSetting) -> None:
    """Raise SpecError for the first thing that cannot run."""
    own = (_check_lengths, _check_dtypes, _check_sizes, _check_adapters, _check_rollouts, _check_engine)
    for find in (frameworks.check_framework, *own, *trainers.CHECKS, *placements.CHECKS):
        for what, where, rule, way_out in find(job, setting):
            raise SpecError(what, where=where, rule=rule, way_out=way_out)


def _check_lengths(job: SettledJob, setting: GpuSetting) -> Iterator[Problem]:
    lengths, longest = job.workload.response_lengths, job.workload.max_response_len
    if lengths != ConstantLengths.create_default() and lengths.quantile(0.0) > longest:
        yield (
            f"the shortest response has {lengths.quantile(0.0):,.0f} tokens, the longest allowed {longest:,}",
            "workload.response_lengths",
            "the shortest response must not exceed max_response_len",
            "raise workload.max_response_len, or lower the lengths",
        )


def _check_dtypes(job: SettledJob, setting: GpuSetting) -> Iterator[Problem]:
    generates = setting.get_pool(GENERATION).gpu
    for key, dtype, gpu in (
        ("training.dtype", job.training.dtype, setting.gpu),
        *((("rollout.dtype", job.rollout.dtype, generates),) if job.has_rollouts else ()),
    ):
        if dtype is Dtype.BFLOAT16 and ComputeDtype.BFLOAT16 not in gpu.dense_flops_per_s and gpu.dense_flops_per_s:
            yield (
                f"{key} is bfloat16, which a {gpu.name} does not support",
                key,
                f"rates of the profile: {', '.join(gpu.dense_flops_per_s)}",
                "training.dtype=float16 rollout.dtype=float16",
            )
    uses_fp8 = job.rollout.kv_dtype == "fp8" or job.rollout.quantization.startswith("fp8")
    if uses_fp8 and generates.kind == "cuda" and float(generates.architecture) < 8.0:
        yield (
            f"fp8 on a {generates.name} (compute capability {generates.architecture})",
            "rollout.kv_dtype, rollout.quantization",
            "vLLM's fp8 kernels need compute capability 8.0 or more",
            "leave both out, or take another GPU",
        )


def _check_sizes(job: SettledJob, setting: GpuSetting) -> Iterator[Problem]:
    heads, ulysses = setting.policy.num_heads, count_ranks(job.training.ulysses)
    if heads % ulysses:
        yield (
            f"training.ulysses is {ulysses}, the model has {heads} attention heads",
            "training.ulysses",
            "Ulysses ranks need whole attention heads",
            "a number that divides the heads",
        )
    largest = max((pool.gpu for pool in setting.pools), key=lambda gpu: gpu.memory.value)
    if job.hardware.memory is not None and job.hardware.memory > largest.memory.value:
        total = format_bytes(largest.memory.value)
        yield (
            f"hardware.memory is {format_bytes(job.hardware.memory)}, a {largest.name} has {total}",
            "hardware.memory",
            "hardware.memory must not exceed what the driver reports",
            "leave it out, or name a larger GPU",
        )


def _check_adapters(job: SettledJob, setting: GpuSetting) -> Iterator[Problem]:
    lora = job.training.lora
    if lora is not None and lora.target_modules:
        try:
            list_lora_parameters(setting.policy, lora.rank, lora.target_modules)
        except SpecError as error:
            yield error.what, f"training.lora.{error.where}", error.rule, error.way_out
    if lora is not None and not lora.target_modules:
        yield (
            "training.lora.target_modules is empty",
            "training.lora.target_modules",
            "all-linear, or names of the model's linear layers",
            "leave it out",
        )


def _check_rollouts(job: SettledJob, setting: GpuSetting) -> Iterator[Problem]:
    if job.placement.placement not in ("auto", "hybrid") and not job.algorithm.declaration.has_rollouts:
        yield (
            f"placement {job.placement.placement} for {job.algorithm.name}, which generates nothing",
            "placement.placement",
            "a placement states where training and generation run, and nothing is generated",
            "placement.placement=auto",
        )


def _check_engine(job: SettledJob, setting: GpuSetting) -> Iterator[Problem]:
    rollout, placement = job.rollout, job.placement.placement
    capacity = setting.get_pool(GENERATION).capacity
    if rollout.kv_cache_memory != "auto" and rollout.kv_cache_memory > capacity:
        yield (
            f"rollout.kv_cache_memory is {format_bytes(rollout.kv_cache_memory)}, a GPU has {format_bytes(capacity)}",
            "rollout.kv_cache_memory",
            "the KV cache must fit into one GPU",
            "rollout.kv_cache_memory=auto",
        )
    if rollout.tp != "auto":
        try:
            engine_weight_bytes(setting.policy, build_engine_layout(int(rollout.tp)), 2)
        except SpecError as error:
            yield error.what, "rollout.tp", error.rule, "rollout.tp=auto, or another number"
    if rollout.sleep_level not in ("auto", 0) and placement not in ("auto", "colocated"):
        yield (
            f"rollout.sleep_level {rollout.sleep_level} with placement {placement}",
            "rollout.sleep_level",
            "the engine sleeps only in a colocated placement (in hybrid it stays awake)",
            "placement.placement=colocated, or rollout.sleep_level=auto",
        )
