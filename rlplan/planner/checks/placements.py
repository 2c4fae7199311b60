"""Checks of who may lie where, of transports and engines: combinations that contradict each other are refused.

In: a SettledJob and its setting. Out: nothing, or what is wrong as (what, where, rule, way out).
Left out: what a trainer can run (trainers.py); sizes and types (gpus.py).
"""

from collections.abc import Iterator

from rlplan.dataflow.placements import GENERATION
from rlplan.errors import SpecError
from rlplan.memory.serving.weights import engine_layout, engine_weight_bytes
from rlplan.planner.setting import GpuSetting
from rlplan.spec.model import ModelSpec
from rlplan.spec.parts.training import given_ranks
from rlplan.spec.resolved import SettledJob
from rlplan.vocabulary import SyncContent, Transport

Problem = tuple[str, str, str, str]
"""What, where, rule, way out."""


def check_placement(job: SettledJob, setting: GpuSetting) -> Iterator[Problem]:
    """Who shares devices with whom, and what follows from it."""
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
            f"{job.algorithm.name} generates nothing, and hardware names two groups ({setting.words})",
            "hardware, algorithm",
            "the second group generates",
            "one group of GPUs",
        )
    num_generation, second = spec.num_generation_devices, job.hardware.generation
    if num_generation != "auto" and second is not None and num_generation != second.num_devices:
        yield (
            f"placement.num_generation_devices is {num_generation}, and {second.num_devices} GPUs generate",
            "placement.num_generation_devices, hardware.generation",
            "of two groups of GPUs the second generates",
            "placement.num_generation_devices=auto",
        )
    alone = 0 if spec.num_scoring_devices == "auto" else spec.num_scoring_devices
    if alone and (shares or not job.frozen_roles):
        why = f"placement {wanted}" if shares else "no frozen role"
        yield (
            f"placement.num_scoring_devices is {alone} with {why}",
            "placement.num_scoring_devices",
            "frozen roles have GPUs of their own where generation has them too: disaggregated",
            "placement.num_scoring_devices=auto",
        )
    if spec.max_staleness and (shares or not job.algorithm.declaration.has_rollouts):
        why = f"placement {wanted}" if shares else f"{job.algorithm.name}, which generates nothing"
        yield (
            f"placement.max_staleness is {spec.max_staleness} with {why}",
            "placement.max_staleness",
            "generation runs beside training where it has GPUs of its own",
            f"placement.max_staleness=0{f', or {apart}' if shares else ''}",
        )
    if wanted == "colocated" and not setting.gpu.supports_sleep and job.rollout.sleep_level in (1, 2):
        yield (
            f"rollout.sleep_level is {job.rollout.sleep_level} on a {setting.gpu.name}",
            "rollout.sleep_level",
            "vLLM cannot put an engine to sleep there (supports_sleep of the profile)",
            "placement.placement=hybrid, or disaggregated",
        )


def check_transport(job: SettledJob, setting: GpuSetting) -> Iterator[Problem]:
    """Transports that the placement does not have."""
    place, wanted = job.placement, job.placement.placement
    shares = wanted in ("colocated", "hybrid")
    apart = wanted == "disaggregated" or setting.has_pools
    rules = (
        (Transport.CUDA_IPC, apart, "a handle is opened on the same GPU", "nccl or disk"),
        (Transport.NCCL, shares, "NCCL refuses two ranks of one communicator on a GPU", "cuda_ipc"),
        (Transport.NCCL, setting.link is not None, "over hardware.link weights travel as files", "disk"),
        (Transport.SHARED_MEMORY, True, "shared memory and gloo are a CPU host's", "auto"),
        (Transport.GLOO, True, "shared memory and gloo are a CPU host's", "auto"),
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
            "on the same GPU whole weights are handed over without a copy",
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
    """Expert parallel engines of models that have no experts, or that do not divide."""
    rollout, model = job.rollout, setting.policy
    if rollout.attention_dp not in ("auto", 1):
        yield from _check_attention_dp(job, model)
        return
    if rollout.has_expert_parallel is not True:
        return
    if model.experts is None:
        yield (
            "rollout.has_expert_parallel, and the model has no experts",
            "rollout.has_expert_parallel",
            "whole experts lie on an engine's ranks",
            "rollout.has_expert_parallel=false",
        )
    elif rollout.tp != "auto":
        try:
            engine_weight_bytes(model, engine_layout(int(rollout.tp), ep=int(rollout.tp)), 2)
        except SpecError as error:
            yield error.what, "rollout.tp, rollout.has_expert_parallel", error.rule, "rollout.tp=auto"


def _check_attention_dp(job: SettledJob, model: ModelSpec) -> Iterator[Problem]:
    """Data-parallel attention without whole experts that its ranks share, or with limits that do not divide."""
    rollout, where = job.rollout, "rollout.attention_dp"
    what, dp = f"{where} is {rollout.attention_dp}", given_ranks(rollout.attention_dp)
    if model.experts is None:
        yield (
            f"{what}, and the model has no experts",
            where,
            "ranks of data-parallel attention share experts; of a dense model they would be engines of their own",
            f"{where}=1: rollout.num_engines=auto has as many engines as there is room for",
        )
        return
    if rollout.has_expert_parallel is False:
        yield (
            f"{what} with rollout.has_expert_parallel=false",
            f"{where}, rollout.has_expert_parallel",
            "whole experts are spread over the ranks of data-parallel attention",
            f"rollout.has_expert_parallel=auto, or {where}=1",
        )
    for key in ("max_num_seqs", "max_num_batched_tokens"):
        limit = getattr(rollout, key)
        if limit != "auto" and limit % dp:
            yield (
                f"rollout.{key} is {limit} with {where} {dp}",
                f"rollout.{key}, {where}",
                "each rank of data-parallel attention has an equal part",
                f"rollout.{key}={-(-limit // dp) * dp}",
            )
    tp = given_ranks(rollout.tp)
    try:
        engine_weight_bytes(model, engine_layout(tp, ep=tp * dp, attention_dp=dp), 2)
    except SpecError as error:
        yield error.what, f"rollout.tp, {where}", error.rule, f"rollout.tp=auto {where}=auto"


def check_links(job: SettledJob, setting: GpuSetting) -> Iterator[Problem]:
    """Several hosts, or pools, whose network is not known."""
    for group, pool in (("training", setting.pools[0]), (GENERATION, setting.pools[-1])):
        is_alone = pool.num_hosts == 1 and setting.pools[0].gpu == setting.pools[-1].gpu
        if not is_alone and pool.node is None:
            hosts = (
                f"{pool.num_hosts} host{'s' * (pool.num_hosts > 1)} of {pool.gpus_per_host}x {pool.gpu.name} ({group})"
            )
            yield (
                f"{hosts}, and no node profile has the network of hosts with this GPU",
                "hardware.profile, hardware.num_hosts",
                "predicting a step across hosts needs the network bandwidth of a node profile with this GPU",
                "name a node, as in 2xdgx-h100, add one (hardware_profiles/README.md), or leave hardware.num_hosts out",
            )
            return


CHECKS = (check_placement, check_transport, check_experts, check_links)
"""All of them, in order."""
