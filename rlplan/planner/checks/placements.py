"""Checks of placements, transports and engines for contradictory combinations.

In: a SettledJob and its setting. Out: problems as (what, where, rule, way out). Left out: what a trainer can run
(trainers.py); sizes and types (gpus.py).
"""

from collections.abc import Iterator

from rlplan.errors import SpecError
from rlplan.memory.serving.weights import build_engine_layout, engine_weight_bytes
from rlplan.planner.setting import GpuSetting
from rlplan.spec.model import ModelSpec
from rlplan.spec.parts.training import count_ranks
from rlplan.spec.resolved import SettledJob
from rlplan.vocabulary import SyncContent, Transport

Problem = tuple[str, str, str, str]
"""The parts of an error message: what, where, rule, way out."""


def check_placement(job: SettledJob, setting: GpuSetting) -> Iterator[Problem]:
    """Check the placement against pools, roles and staleness."""
    wanted, spec = job.placement.placement, job.placement
    shares = wanted in ("colocated", "hybrid")
    apart = "placement.placement=disaggregated"
    if setting.has_pools and shares:
        yield (
            f"placement.placement is {wanted} on two groups of GPUs ({setting.words})",
            "placement.placement, hardware",
            "GPUs of two groups share no devices: the first trains, the second generates",
            f"{apart}, or one group of GPUs",
        )
    if setting.has_pools and not job.algorithm.declaration.has_rollouts:
        yield (
            f"{job.algorithm.name} generates nothing, but hardware names two groups of GPUs ({setting.words})",
            "hardware, algorithm",
            "the second group generates",
            "one group of GPUs",
        )
    num_generation, second = spec.num_generation_devices, job.hardware.generation
    if num_generation != "auto" and second is not None and num_generation != second.num_devices:
        yield (
            f"placement.num_generation_devices is {num_generation}, but {second.num_devices} GPUs generate",
            "placement.num_generation_devices, hardware.generation",
            "with two groups of GPUs, all GPUs of the second generate",
            "placement.num_generation_devices=auto",
        )
    alone = 0 if spec.num_scoring_devices == "auto" else spec.num_scoring_devices
    if alone and (shares or not job.frozen_roles):
        why = f"placement {wanted}" if shares else "no frozen role"
        yield (
            f"placement.num_scoring_devices is {alone} with {why}",
            "placement.num_scoring_devices",
            "frozen roles can have their own GPUs only in a disaggregated placement",
            "placement.num_scoring_devices=auto",
        )
    if spec.max_staleness and (shares or not job.algorithm.declaration.has_rollouts):
        why = f"placement {wanted}" if shares else f"{job.algorithm.name}, which generates nothing"
        yield (
            f"placement.max_staleness is {spec.max_staleness} with {why}",
            "placement.max_staleness",
            "async rollouts need separate GPUs for generation",
            f"placement.max_staleness=0{f', or {apart}' if shares else ''}",
        )
    if wanted == "colocated" and not setting.gpu.supports_sleep and job.rollout.sleep_level in (1, 2):
        yield (
            f"rollout.sleep_level is {job.rollout.sleep_level} on a {setting.gpu.name}",
            "rollout.sleep_level",
            "vLLM's sleep mode does not support this GPU (supports_sleep of the profile)",
            "placement.placement=hybrid, or disaggregated",
        )


def check_transport(job: SettledJob, setting: GpuSetting) -> Iterator[Problem]:
    """Check the weight-sync transport against the placement."""
    place, wanted = job.placement, job.placement.placement
    shares = wanted in ("colocated", "hybrid")
    apart = wanted == "disaggregated" or setting.has_pools
    rules = (
        (Transport.CUDA_IPC, apart, "CUDA IPC handles work only on the same GPU", "nccl or disk"),
        (Transport.NCCL, shares, "NCCL does not allow two ranks of a communicator on one GPU", "cuda_ipc"),
        (Transport.SHARED_MEMORY, True, "shared memory and gloo are for CPU hosts", "auto"),
        (Transport.GLOO, True, "shared memory and gloo are for CPU hosts", "auto"),
    )
    for transport_name, holds, rule, instead in rules:
        if holds and place.transport == transport_name:
            yield (
                f"placement.transport is {transport_name} with placement {wanted} on GPUs",
                "placement.transport",
                rule,
                f"placement.transport={instead}",
            )
    if place.sync_content is SyncContent.DELTA and shares:
        yield (
            f"placement.sync_content is delta with placement {wanted}",
            "placement.sync_content",
            "on the same GPU, full weights are passed without a copy",
            "placement.sync_content=full",
        )
    if place.sync_content is SyncContent.ADAPTER and not job.training.trains_adapters:
        yield (
            "placement.sync_content is adapter without training.lora",
            "placement.sync_content",
            "only adapters are sent: training.lora",
            "placement.sync_content=auto",
        )


def check_experts(job: SettledJob, setting: GpuSetting) -> Iterator[Problem]:
    """Check expert-parallel engines: the model has experts and its sizes divide."""
    rollout, model = job.rollout, setting.policy
    if rollout.attention_dp not in ("auto", 1):
        yield from _check_attention_dp(job, model)
        return
    if rollout.has_expert_parallel is not True:
        return
    if model.experts is None:
        yield (
            "rollout.has_expert_parallel is true, but the model has no experts",
            "rollout.has_expert_parallel",
            "expert parallelism distributes experts over an engine's ranks",
            "rollout.has_expert_parallel=false",
        )
    elif rollout.tp != "auto":
        try:
            engine_weight_bytes(model, build_engine_layout(int(rollout.tp), ep=int(rollout.tp)), 2)
        except SpecError as error:
            yield error.what, "rollout.tp, rollout.has_expert_parallel", error.rule, "rollout.tp=auto"


def _check_attention_dp(job: SettledJob, model: ModelSpec) -> Iterator[Problem]:
    """Check data-parallel attention: shared experts and limits that divide."""
    rollout, where = job.rollout, "rollout.attention_dp"
    what, dp = f"{where} is {rollout.attention_dp}", count_ranks(rollout.attention_dp)
    if model.experts is None:
        yield (
            f"{what}, but the model has no experts",
            where,
            "data-parallel attention ranks share experts; with a dense model they would be separate engines",
            f"{where}=1; rollout.num_engines=auto starts as many engines as fit",
        )
        return
    if rollout.has_expert_parallel is False:
        yield (
            f"{what} with rollout.has_expert_parallel=false",
            f"{where}, rollout.has_expert_parallel",
            "data-parallel attention distributes whole experts over its ranks",
            f"rollout.has_expert_parallel=auto, or {where}=1",
        )
    for key in ("max_num_seqs", "max_num_batched_tokens"):
        limit = getattr(rollout, key)
        if limit != "auto" and limit % dp:
            yield (
                f"rollout.{key} is {limit} with {where} {dp}",
                f"rollout.{key}, {where}",
                "each data-parallel attention rank needs an equal share",
                f"rollout.{key}={-(-limit // dp) * dp}",
            )
    tp = count_ranks(rollout.tp)
    try:
        engine_weight_bytes(model, build_engine_layout(tp, ep=tp * dp, attention_dp=dp), 2)
    except SpecError as error:
        yield error.what, f"rollout.tp, {where}", error.rule, f"rollout.tp=auto {where}=auto"


CHECKS = (check_placement, check_transport, check_experts)
"""All checks, in order."""
