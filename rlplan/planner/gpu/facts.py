"""Facts are the parts of a job that bytes and seconds depend on, in addition to a choice.

In: a SettledJob. Out: the job with all other keys set to None. A method that reads such a key fails, so cached results
hold for every job with equal facts. Left out: rates and capacities of devices (setting.py).
"""

from rlplan.spec.resolved import SettledHardware, SettledJob

OPEN = {
    "workload": ("micro_batch_size_per_gpu",),
    "training": (
        *("zero_stage", "gradient_checkpointing", "offloads_optimizer", "offloads_parameters"),
        *("ulysses", "tp", "pp", "cp", "ep", "max_tokens_per_micro_batch"),
    ),
    "rollout": (
        *("num_engines", "tp", "attention_dp", "has_expert_parallel", "sleep_level", "kv_cache_memory"),
        "gpu_memory_utilization",
        *("max_num_seqs", "quantization"),
    ),
    "placement": (
        *("placement", "num_generation_devices", "num_scoring_devices", "offload", "offload_roles"),
        *("transport", "sync_content", "max_staleness", "partial_rollouts"),
    ),
}
"""Keys that state a choice. Methods for bytes and seconds take the choice as an argument instead."""
APART = ("name", "objective", "limits")
"""Parts that affect neither bytes nor seconds."""
NOT_OF_ENGINES = ("training", "roles")
"""Parts that affect no engine."""


def strip_devices(job: SettledJob) -> SettledJob:
    """Drop the number of GPUs."""
    hardware = SettledHardware.model_construct(profile=job.hardware.profile, num_devices=1, num_hosts=1)
    return job.model_copy(update={"hardware": hardware, **dict.fromkeys(APART)})


def strip_choices(job: SettledJob) -> SettledJob:
    """Drop everything that the search may choose, and the number of GPUs."""
    parts = {name: getattr(job, name).model_copy(update=dict.fromkeys(keys)) for name, keys in OPEN.items()}
    return strip_devices(job).model_copy(update=parts)


def strip_trainers(job: SettledJob) -> SettledJob:
    """Drop everything that the search may choose, the number of GPUs, and the trainers."""
    return strip_choices(job).model_copy(update=dict.fromkeys(NOT_OF_ENGINES))
