"""Translation between a choice and a resolved job, whose keys state every choice.

In: a SettledJob and a Choice, or a ResolvedJob. Out: the other. The schedule of (job, choice) equals
`build_schedule(resolve(job, choice), read_choice(...))`. Left out: which choice is best (the searches) and whether it
can run (rules.py).
"""

from typing import Any, cast

from rlplan.dataflow.choice import Arrangement, Choice, EngineChoice, Offloaded, TrainerChoice, WeightSyncMode
from rlplan.memory.weight_sync.adapters import find_engine_adapters
from rlplan.spec.base import validate
from rlplan.spec.job import JobSpec
from rlplan.spec.resolved import ResolvedJob, SettledHardware, SettledJob, fill_choices
from rlplan.units import ceil_div
from rlplan.vocabulary import Placement, SyncContent, Transport

CONTENTS = {"adapter": SyncContent.ADAPTER, "delta": SyncContent.DELTA}


def read_choice(job: ResolvedJob, placement: Placement, zero_stage: int) -> Choice:
    """Read the choice that a resolved job states, with a given placement and ZeRO stage."""
    place, training, rollout = job.placement, job.training, job.rollout
    count = all_devices = job.hardware.num_devices
    generating, scoring = all_devices, 0
    if placement is Placement.DISAGGREGATED:
        # an engine needs all its ranks, also if fewer devices were stated
        generating, scoring = max(place.num_generation_devices, rollout.num_processes), place.num_scoring_devices
        count = all_devices - generating - scoring
    on_gpus, colocated = job.device_kind == "cuda", placement is Placement.COLOCATED
    level = rollout.sleep_level if on_gpus and colocated else 0
    arrangement = Arrangement(
        placement,
        count,
        generating,
        scoring,
        _read_offloaded(job, placement),
        is_async=place.max_staleness > 0 and placement is Placement.DISAGGREGATED,
        sleeps=level > 0,
    )
    trainer = TrainerChoice(
        zero_stage,
        training.gradient_checkpointing,
        training.offloads_optimizer,
        training.offloads_parameters,
        max(1, job.max_tokens_per_micro_batch // job.workload.max_seq_len),
        ulysses=training.ulysses,
        tp=training.tp,
        max_tokens=job.max_tokens_per_micro_batch,
    )
    quantization = None if rollout.quantization == "none" else rollout.quantization
    cut = rollout.has_expert_parallel, rollout.attention_dp
    adapters = find_engine_adapters(job)
    versions = adapters.num_versions if adapters else 0
    engine = EngineChoice(rollout.tp, level, rollout.max_num_seqs, quantization, *cut, versions)
    return Choice(
        arrangement, trainer, engine, _read_sync_mode(job, placement), rollout.num_engines, place.sync_senders
    )


def _read_offloaded(job: ResolvedJob, placement: Placement) -> Offloaded:
    """Decide which roles are offloaded.

    On a CPU host, moving states within host memory frees nothing: only a disk helps trained roles.
    """
    place = job.placement
    if place.offload == "none":
        return "none"
    if place.offload_roles == "frozen":
        return "frozen"
    if placement is not Placement.COLOCATED:
        return "none"
    # host memory to host memory frees nothing for trained states
    return "all" if place.offload == "disk" or job.device_kind == "cuda" else "frozen"


def _read_sync_mode(job: ResolvedJob, placement: Placement) -> WeightSyncMode:
    content = job.placement.sync_content
    if not job.has_engine:
        return ""
    if content is not SyncContent.FULL:
        return cast(WeightSyncMode, content.value)
    if job.placement.transport != "auto" or job.device_kind == "cpu":
        return job.sync_transport.value
    return "nccl" if placement is Placement.DISAGGREGATED else "cuda_ipc"


def resolve(job: SettledJob, choice: Choice, kv_cache: int) -> ResolvedJob:
    """Write a choice into the job. kv_cache: bytes per engine rank."""
    arrangement, trainer, engine = choice.arrangement, choice.trainer, choice.engine
    work, place = job.workload, job.placement
    training: dict[str, Any] = {
        "zero_stage": trainer.zero_stage,
        "gradient_checkpointing": trainer.gradient_checkpointing,
        "offloads_optimizer": trainer.offloads_optimizer,
        "offloads_parameters": trainer.offloads_parameters,
        "max_tokens_per_micro_batch": trainer.max_tokens or trainer.micro_batch * work.max_seq_len,
        **{axis: getattr(trainer, axis) for axis in ("ulysses", "tp", "pp", "cp", "ep")},
        "etp": trainer.expert_tp if job.backend == "megatron" else 1,
    }
    rollout: dict[str, Any] = {
        "num_engines": choice.engines,
        "tp": engine.tp,
        "attention_dp": engine.attention_dp,
        "quantization": engine.quantization or "none",
        "has_expert_parallel": engine.has_expert_parallel,
        "kv_cache_memory": kv_cache,
        "gpu_memory_utilization": None,
        "max_num_seqs": engine.max_num_seqs,
    }
    if job.device_kind == "cuda":
        rollout["sleep_level"] = engine.sleep_level
    own = not arrangement.shares_devices
    micro = work.micro_batch_size_per_gpu
    sizes = {
        "mini_batch_size": work.rollouts_per_mini_batch,
        "micro_batch_size_per_gpu": trainer.micro_batch if micro == "auto" else micro,
    }
    placement: dict[str, Any] = {
        "placement": arrangement.placement.value,
        "num_generation_devices": arrangement.num_generation
        if own or place.num_generation_devices == "auto"
        else place.num_generation_devices,
        "num_scoring_devices": arrangement.num_scoring
        if own or place.num_scoring_devices == "auto"
        else place.num_scoring_devices,
        "max_staleness": place.max_staleness if arrangement.is_async else 0,
        "sync_senders": "each" if choice.all_ranks_send else "one",
        "sync_content": CONTENTS.get(choice.sync_mode, SyncContent.FULL),
    }
    placement |= _resolve_offload(job, choice) | _resolve_transport(job, choice)
    values = {"workload": sizes, "training": training, "rollout": rollout, "placement": placement}
    if not job.is_for_rlplan:
        values["scoring"] = _resolve_scoring(job, trainer)
    return fill_choices(_restrict_devices(job, arrangement), values)


def _resolve_scoring(job: SettledJob, trainer: TrainerChoice) -> dict[str, Any]:
    """Set open sizes of scoring passes to those of the training passes, in the same unit."""
    size = {"micro_batch_size_per_gpu": trainer.micro_batch}
    if trainer.max_tokens:
        size = {"max_tokens_per_micro_batch": trainer.max_tokens}
    asked = {role: job.scoring.get_pass(role) for role in job.scored_roles}
    return {role.value: sizes.model_copy(update=size) for role, sizes in asked.items() if not sizes.is_stated}


def restore_job_spec(job: JobSpec) -> JobSpec:
    """Turn a settled job back into a plain JobSpec, whose choices may be `auto`."""
    if type(job) is JobSpec:
        return job
    return validate(JobSpec, job.model_dump(mode="json"), file=job.name)


def _resolve_offload(job: SettledJob, choice: Choice) -> dict[str, str]:
    """Keep the job's offload settings; fill open ones from the choice."""
    place, offloaded = job.placement, choice.arrangement.offloaded
    if job.device_kind == "cpu":
        return {}
    if offloaded == "none":
        return {"offload": "none", "offload_roles": "all"}
    where = place.offload if place.offload in ("host", "disk") else "host"
    return {"offload": where, "offload_roles": offloaded}


def _resolve_transport(job: SettledJob, choice: Choice) -> dict[str, Any]:
    """Choose the transport. Adapters and deltas travel like full weights if the job leaves the transport open."""
    if not choice.sync_mode or (choice.sync_mode in CONTENTS and job.placement.transport != "auto"):
        return {}
    if job.device_kind == "cpu" and choice.sync_mode in CONTENTS:
        return {"transport": cast(ResolvedJob, job).sync_transport}
    if choice.sync_mode in CONTENTS:
        return {"transport": Transport.CUDA_IPC if choice.arrangement.shares_devices else Transport.NCCL}
    return {"transport": Transport(choice.sync_mode)}


def _restrict_devices(job: SettledJob, arrangement: Arrangement) -> SettledJob:
    """Restrict the job to the chosen devices if these are fewer than it has."""
    hardware = job.hardware
    if arrangement.num_devices in (hardware.num_devices, hardware.all_devices):
        return job
    hosts = ceil_div(arrangement.num_devices, hardware.devices_per_host)
    fewer: SettledHardware = hardware.model_copy(update={"num_devices": arrangement.num_devices, "num_hosts": hosts})
    return job.model_copy(update={"hardware": fewer})
