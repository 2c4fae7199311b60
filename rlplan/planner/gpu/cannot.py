"""What a job on GPUs asks for that the runtime cannot do, whatever fits.

In: a JobSpec whose profile is a GPU's, a placement. Out: a reason, or nothing. Left out: bytes (of_job.py).
"""

from rlplan.memory.weight_sync import ENGINE_LORA_RANKS
from rlplan.spec.job import JobSpec
from rlplan.spec.profiles import find_profile
from rlplan.units import ceil_div
from rlplan.vocabulary import Placement, SyncContent, Transport

ON_SHARED = (Transport.CUDA_IPC, Transport.DISK)
ON_OWN = (Transport.NCCL, Transport.DISK)
"""Ways for weights between processes on the same GPU, and on GPUs of their own (NCCL takes one rank a GPU)."""


def cannot_on_gpus(job: JobSpec, placement: Placement, num_training: int) -> str:
    """Why not; empty where nothing speaks against it. num_training: GPUs that train."""
    return (
        _kind(job)
        or _engines(job, placement)
        or _training(job, placement)
        or _sync(job, placement, num_training)
        or _adapters(job)
    )


def _kind(job: JobSpec) -> str:
    gpu = job.load_gpu()
    if gpu.kind != "cuda":
        return f"hardware.profile {gpu.name}: the runtime's engines and transports are CUDA's, this is {gpu.kind}"
    named = find_profile(job.hardware.profile, where="hardware.profile")
    per_host, most = ceil_div(job.hardware.num_devices, job.hardware.num_hosts), getattr(named, "num_gpus", None)
    if most is not None and per_host > most:
        return f"hardware.num_hosts {job.hardware.num_hosts}: a {named.name} has {most} GPUs, not {per_host}"
    return ""


def _engines(job: JobSpec, placement: Placement) -> str:
    hardware, rollout = job.hardware, job.rollout
    generating = hardware.num_devices
    if placement is Placement.DISAGGREGATED:
        generating = max(job.placement.num_generation_devices, rollout.num_processes)
    if rollout.num_processes != generating:
        return (
            f"{rollout.num_engines} engine(s) of {rollout.tp} rank(s) leave GPUs of {generating} without one: "
            f"rollout.num_engines x rollout.tp is their number"
        )
    first = hardware.num_devices - rollout.num_processes
    for engine in range(rollout.num_engines):
        ranks = range(first + engine * rollout.tp, first + (engine + 1) * rollout.tp)
        if rollout.tp <= hardware.num_devices // hardware.num_hosts and len({*map(hardware.host_of, ranks)}) > 1:
            return f"engine {engine} (GPUs {ranks[0]} to {ranks[-1]}) would lie on two hosts: rollout.tp divides one's"
    if placement is Placement.COLOCATED and not job.load_gpu().supports_sleep:
        return f"colocated: an engine does not sleep on {job.load_gpu().name}"
    if rollout.speculative_tokens:
        return "rollout.speculative_tokens: what guessing takes on a GPU is not in the memory model yet"
    return ""


def _training(job: JobSpec, placement: Placement) -> str:
    if job.training.offloads_parameters and (job.placement.parks != "none" and not job.placement.parks_only_frozen):
        return "training.offloads_parameters with placement.parks: what is offloaded for good is not moved"
    if job.training.offloads_parameters and job.training.zero_stage != 3:
        return "training.offloads_parameters needs training.zero_stage 3"
    return ""


def _sync(job: JobSpec, placement: Placement, num_training: int) -> str:
    transport, content = job.sync_transport, job.placement.sync_content
    if content is SyncContent.ADAPTER:
        if job.training.lora.rank is None:
            return "placement.sync_content adapter hands adapters over, and training.lora.rank says that there are none"
        several = job.hardware.num_hosts > 1
        return "placement.sync_content adapter goes through the memory of one host, not of several" if several else ""
    on_own = placement is Placement.DISAGGREGATED
    if transport not in (ON_OWN if on_own else ON_SHARED):
        where = "GPUs of their own" if on_own else "shared GPUs"
        return (
            f"placement.transport {transport}: on {where} weights go by {' or '.join(ON_OWN if on_own else ON_SHARED)}"
        )
    needs_each = transport is Transport.CUDA_IPC and num_training > 1
    if needs_each != (job.placement.sync_senders == "each"):
        wanted = "each" if needs_each else "one"
        return f"placement.sync_senders {job.placement.sync_senders} with transport {transport}: {wanted} is right here"
    return ""


def _adapters(job: JobSpec) -> str:
    rank = job.training.lora.rank
    if rank is not None and job.placement.sync_content is SyncContent.ADAPTER and rank > max(ENGINE_LORA_RANKS):
        return f"training.lora.rank {rank}: the engine takes adapters of at most rank {max(ENGINE_LORA_RANKS)}"
    return ""
