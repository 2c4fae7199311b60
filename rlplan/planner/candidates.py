"""Candidates: every layout that the job leaves open and the runtime can execute.

In: a JobSpec. Out: candidates, and those that cannot be built with the reason.
Left out: time, by which search.py ranks them. Where steps are as fast, or a profile has no rates, this order decides:
hybrid before disaggregated, for it keeps every device busy in training; colocated last, for its engine starts anew in
every step; ZeRO-2 before the other stages.
"""

from dataclasses import dataclass

from rlplan.dataflow.placements import num_training_devices
from rlplan.memory.weight_sync import ENGINE_LORA_RANKS
from rlplan.planner.gpu.cannot import cannot_on_gpus
from rlplan.planner.plan import Rejection
from rlplan.spec.job import JobSpec
from rlplan.vocabulary import Placement, SyncContent, Transport

AUTO_ZERO_STAGES = (2, 1, 3, 0)
"""Those that hold less first, but for stage 3, which sends the most."""
ORDER = (Placement.HYBRID, Placement.DISAGGREGATED, Placement.COLOCATED)

CUDA_TRANSPORTS = (Transport.CUDA_IPC, Transport.NCCL)

MAX_ENGINE_LORA_RANK = max(ENGINE_LORA_RANKS)
"""Source: vLLM 0.32.0, config/lora.py, `MaxLoRARanks`: 1, 8, 16, 32, 64, 128, 256, 320, 512."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One layout to consider."""

    placement: Placement
    zero_stage: int


def list_candidates(job: JobSpec) -> tuple[tuple[Candidate, ...], tuple[Rejection, ...]]:
    """(candidates, rejections): what can be built, and what cannot with the reason."""
    wanted = tuple(Placement) if job.placement.placement == "auto" else (Placement(job.placement.placement),)
    stages = AUTO_ZERO_STAGES if job.training.zero_stage == "auto" else (job.training.zero_stage,)
    ordered = sorted(wanted, key=ORDER.index)
    candidates, rejections = [], []
    for placement in ordered:
        if reason := _cannot(job, placement):  # whatever the stage
            rejections.append(Rejection(placement=placement, zero_stage=stages[0], reason=reason))
            continue
        for stage in stages:
            if reason := _cannot_partition(job, stage):
                rejections.append(Rejection(placement=placement, zero_stage=stage, reason=reason))
            else:
                candidates.append(Candidate(placement, stage))
    return tuple(candidates), tuple(rejections)


def _cannot(job: JobSpec, placement: Placement) -> str:
    if job.rollout.num_processes > job.hardware.num_devices:
        return (
            f"{job.rollout.num_engines} engine(s) of {job.rollout.tp} rank(s) need {job.rollout.num_processes} devices"
        )
    if job.placement.max_staleness and placement is not Placement.DISAGGREGATED:
        return "generation runs beside training (placement.max_staleness) only on devices of its own"
    if not job.algorithm.declaration.has_rollouts and (placement is Placement.COLOCATED or job.placement.max_staleness):
        return f"{job.algorithm.name} generates nothing, so that nothing takes turns or runs ahead"
    num_training = num_training_devices(job, placement)
    if num_training < 1:
        needed = job.hardware.num_devices + 1 - num_training
        return f"disaggregated needs at least {needed} devices: {needed - 1} generate or score, the others train"
    if reason := _cannot_divide(job, num_training):
        return reason
    if job.device_kind == "cuda":
        return cannot_on_gpus(job, placement, num_training)
    return _cannot_sample(job, placement) or _cannot_adapt(job) or _cannot_sync(job, placement) or _cannot_share(job)


def _cannot_divide(job: JobSpec, num_training: int) -> str:
    """Ranks that share a pass are a group; a mini-batch is dealt out over the groups."""
    ways, size = job.training.num_ranks_per_pass, job.workload.mini_batch_size
    if num_training % ways:
        return f"{ways} ranks share a pass (training.ulysses, training.tp), {num_training} device(s) train"
    if size % (num_training // ways):
        groups = f"{num_training // ways} groups of {ways} " if ways > 1 else f"{num_training} "
        return f"workload.mini_batch_size {size} does not divide by the {groups}training device(s)"
    return ""


def _cannot_partition(job: JobSpec, stage: int) -> str:
    """A job that leaves its stage open may ask for what some stages do not have."""
    if job.training.offloads_optimizer and stage < 2:
        return "training.offloads_optimizer needs partitions, which ZeRO has from stage 2 on"
    if job.training.quantization != "none" and stage == 3:
        return f"training.quantization {job.training.quantization} lies whole on every rank: ZeRO 0 to 2"
    return "training.tp: AutoTP goes with ZeRO 0 to 2" if job.training.tp > 1 and stage == 3 else ""


def _cannot_sample(job: JobSpec, placement: Placement) -> str:
    only = {"kv_dtype fp8": job.rollout.kv_dtype != "auto", "has_cuda_graphs": job.rollout.has_cuda_graphs,
            "has_expert_parallel": job.rollout.has_expert_parallel}  # fmt: skip
    if any(only.values()):
        return f"rollout.{next(key for key, is_on in only.items() if is_on)}: the engine has it on GPUs only"
    if job.training.offloads_parameters:
        return "training.offloads_parameters: on a CPU host weights lie on the host already"
    if job.rollout.quantization != "none":
        return f"rollout.quantization {job.rollout.quantization}: vLLM quantises on CUDA devices, a CPU host has none"
    if job.rollout.speculative_tokens and placement is Placement.COLOCATED:
        return (
            "rollout.speculative_tokens: on a CPU a colocated engine is made anew in its process, which vLLM cannot do "
            "once it has guessed (Numba is loaded then)"
        )
    return ""


def _cannot_adapt(job: JobSpec) -> str:
    if job.training.quantization != "none" and job.placement.sync_content == "adapter":
        return "placement.sync_content adapter: the engine would hold the base as it was before it was quantised"
    rank = job.training.lora.rank
    if rank is not None and job.placement.sync_content == "adapter" and rank > MAX_ENGINE_LORA_RANK:
        return f"training.lora.rank {rank}: the engine takes adapters of at most rank {MAX_ENGINE_LORA_RANK}"
    return ""


def _cannot_sync(job: JobSpec, placement: Placement) -> str:
    transport, content = job.sync_transport, job.placement.sync_content
    if transport in CUDA_TRANSPORTS:
        return f"placement.transport {transport} moves weights between CUDA devices, which a CPU host has none of"
    if job.placement.sync_senders == "each" and placement is not Placement.COLOCATED:  # there it is a new start
        if placement is not Placement.HYBRID or job.rollout.num_processes != job.hardware.num_devices:
            return "placement.sync_senders each: every training device has a rank of an engine on it (hybrid)"
        if transport is not Transport.SHARED_MEMORY or content is SyncContent.ADAPTER:
            return "placement.sync_senders each: through shared_memory, with full or delta content"
    if content is SyncContent.ADAPTER and job.training.lora.rank is None:
        return "placement.sync_content adapter hands adapters over, and training.lora.rank says that there are none"
    if content is SyncContent.ADAPTER and job.placement.max_staleness:
        return "placement.sync_content adapter: open requests would lose theirs, so max_staleness is 0"
    return ""


def _cannot_share(job: JobSpec) -> str:
    """Shared memory is one host's: the rank that hands weights over and every engine must lie on it."""
    if job.sync_transport is not Transport.SHARED_MEMORY or job.hardware.num_hosts == 1:
        return ""
    return (
        f"transport shared_memory needs trainer and engine on one host; of {job.hardware.num_hosts} hosts the first "
        f"trains and the last generates: placement.transport gloo (or auto) goes between hosts"
    )
