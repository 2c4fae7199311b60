"""Checks of a budget against its models and GPUs: what an engine or a trainer would refuse is refused here.

In: a BudgetSpec and its setting. Out: nothing, or a SpecError. Left out: what one part of the spec knows by itself.
"""

from collections.abc import Iterator

from rlplan.dataflow.gpu_step import GENERATION
from rlplan.errors import SpecError
from rlplan.memory.serving_weights import engine_layout, engine_weight_bytes
from rlplan.planner import target_checks
from rlplan.planner.setting import GpuSetting
from rlplan.planner.target_checks import Problem
from rlplan.spec.budget import BudgetSpec, fixed_ways
from rlplan.spec.hardware import ComputeDtype
from rlplan.spec.lengths import ConstantLengths
from rlplan.spec.models.adapters import lora_parameters
from rlplan.units import format_bytes
from rlplan.vocabulary import Dtype


def check_budget(budget: BudgetSpec, setting: GpuSetting) -> None:
    """Raises: SpecError for the first thing that could not run."""
    for find in (_lengths, _types, _sizes, _offload, _adapters, _placement, _engine, *target_checks.CHECKS):
        for what, where, rule, way_out in find(budget, setting):
            raise SpecError(what, where=where, rule=rule, way_out=way_out)


def _lengths(budget: BudgetSpec, setting: GpuSetting) -> Iterator[Problem]:
    length, limit = budget.workload.max_seq_len, setting.policy.max_position_embeddings
    if length > limit:
        yield (
            f"prompt and response may reach {length:,} tokens, the model's limit is {limit:,}",
            "workload.max_prompt_len + workload.max_response_len",
            "at most max_position_embeddings of the model's config.json: vLLM refuses more",
            f"workload.max_prompt_len={limit // 4} workload.max_response_len={limit - limit // 4}, or another model",
        )
    lengths, longest = budget.workload.response_lengths, budget.workload.max_response_len
    if lengths != ConstantLengths() and lengths.quantile(0.0) > longest:
        yield (
            f"the shortest response has {lengths.quantile(0.0):,.0f} tokens, the longest allowed {longest:,}",
            "workload.response_lengths",
            "some responses are shorter than max_response_len",
            "raise workload.max_response_len, or lower the lengths",
        )


def _types(budget: BudgetSpec, setting: GpuSetting) -> Iterator[Problem]:
    generates = setting.pool(GENERATION).gpu
    for key, dtype, gpu in (
        ("training.dtype", budget.training.dtype, setting.gpu),
        ("rollout.dtype", budget.rollout.dtype, generates),
    ):
        if dtype is Dtype.BFLOAT16 and ComputeDtype.BFLOAT16 not in gpu.dense_flops_per_s and gpu.dense_flops_per_s:
            yield (
                f"{key} is bfloat16, which a {gpu.name} does not compute",
                key,
                f"rates of the profile: {', '.join(gpu.dense_flops_per_s)}",
                "training.dtype=float16 rollout.dtype=float16",
            )
    uses_fp8 = budget.rollout.kv_dtype == "fp8" or (budget.rollout.quantization or "").startswith("fp8")
    if uses_fp8 and generates.kind == "cuda" and float(generates.architecture) < 8.0:
        yield (
            f"fp8 on a {generates.name} (compute capability {generates.architecture})",
            "rollout.kv_dtype, rollout.quantization",
            "vLLM's fp8 kernels need compute capability 8.0 or more",
            "leave both out, or take another GPU",
        )


def _sizes(budget: BudgetSpec, setting: GpuSetting) -> Iterator[Problem]:
    heads, ways = setting.policy.num_heads, fixed_ways(budget.training.ulysses)
    if ways > setting.pools[0].num_gpus:
        yield (
            f"training.ulysses is {ways}, there are {setting.pools[0].num_gpus} GPUs",
            "training.ulysses",
            "ranks that share a sequence are GPUs",
            "fewer ranks, or more GPUs",
        )
    if heads % ways:
        yield (
            f"training.ulysses is {ways}, the model has {heads} attention heads",
            "training.ulysses",
            "ranks that share a sequence take whole heads in turn",
            "a number that divides the heads",
        )
    largest = max((pool.gpu for pool in setting.pools), key=lambda gpu: gpu.memory.value)
    if budget.memory is not None and budget.memory > largest.memory.value:
        total = format_bytes(largest.memory.value)
        yield (
            f"memory is {format_bytes(budget.memory)}, a {largest.name} has {total}",
            "memory",
            "at most what the driver reports",
            "leave it out, or name a larger GPU",
        )


def _offload(budget: BudgetSpec, setting: GpuSetting) -> Iterator[Problem]:
    training = budget.training
    if training.offloads_parameters is True and training.zero_stage not in ("auto", 3):
        yield (
            f"training.offloads_parameters with zero_stage {training.zero_stage}",
            "training.offloads_parameters",
            "only ZeRO-3 offloads parameters",
            "training.zero_stage=3",
        )
    if training.offloads_optimizer is True and training.zero_stage == 0:
        yield (
            "training.offloads_optimizer with zero_stage 0",
            "training.offloads_optimizer",
            "ZeRO-1, 2 and 3 offload the optimizer",
            "training.zero_stage=2",
        )
    if training.offloads_optimizer is True and training.optimizer != "adamw":
        yield (
            f"training.offloads_optimizer with optimizer {training.optimizer}",
            "training.offloads_optimizer",
            "on the host DeepSpeed steps with its own CPU Adam",
            "training.optimizer=adamw, or training.offloads_optimizer=false",
        )


def _adapters(budget: BudgetSpec, setting: GpuSetting) -> Iterator[Problem]:
    lora = budget.training.lora
    if lora is not None and lora.base == "nf4" and budget.training.zero_stage == 3:
        yield (
            "training.lora.base nf4 with zero_stage 3",
            "training.lora.base",
            "bitsandbytes' packed weights are not partitioned by DeepSpeed",
            "training.zero_stage=2",
        )
    if lora is not None and lora.targets:
        try:
            lora_parameters(setting.policy, lora.rank, lora.targets)
        except SpecError as error:
            yield error.what, f"training.lora.{error.where}", error.rule, error.way_out
    if lora is not None and not lora.targets:
        yield (
            "training.lora.targets is empty",
            "training.lora.targets",
            "all-linear, or names of the model's linear layers",
            "leave it out",
        )


def _placement(budget: BudgetSpec, setting: GpuSetting) -> Iterator[Problem]:
    if budget.placement.placement != "auto" and not budget.declaration.has_rollouts:
        yield (
            f"placement {budget.placement.placement} for {budget.algorithm}, which generates nothing",
            "placement.placement",
            "a placement says where training and generation lie; preferences are given",
            "placement.placement=auto",
        )


def _engine(budget: BudgetSpec, setting: GpuSetting) -> Iterator[Problem]:
    rollout, placement = budget.rollout, budget.placement.placement
    capacity = setting.pool(GENERATION).capacity
    if rollout.kv_cache_memory != "auto" and rollout.kv_cache_memory > capacity:
        yield (
            f"rollout.kv_cache_memory is {format_bytes(rollout.kv_cache_memory)}, a GPU has {format_bytes(capacity)}",
            "rollout.kv_cache_memory",
            "bytes of one GPU, at most what it has",
            "rollout.kv_cache_memory=auto",
        )
    if rollout.tp != "auto":
        try:
            engine_weight_bytes(setting.policy, engine_layout(int(rollout.tp)), 2)
        except SpecError as error:
            yield error.what, "rollout.tp", error.rule, "rollout.tp=auto, or another number"
    if rollout.sleep_level not in ("auto", 0) and placement not in ("auto", "colocated"):
        yield (
            f"rollout.sleep_level {rollout.sleep_level} with placement {placement}",
            "rollout.sleep_level",
            "the engine sleeps where it shares devices by turns: colocated (in hybrid it stays awake)",
            "placement.placement=colocated, or rollout.sleep_level=auto",
        )
