"""Facts: the parts of a job that bytes and seconds depend on beside a choice, as the methods that count them see it.

In: a SettledJob. Out: the same with None where they may not look: whoever reads such a key fails, or gives the same for
every job with these facts. Left out: rates and capacities of devices (setting.py).
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
"""Keys of a job that say what may be chosen: bytes and seconds are asked with the choice itself."""
APART = ("name", "objective", "limits")
"""Parts of a job that no byte and no second depends on."""
NOT_OF_ENGINES = ("training", "roles")
"""Parts of a job that no engine depends on."""


def strip_devices(job: SettledJob) -> SettledJob:
    """The job on any number of its GPUs."""
    hardware = SettledHardware.model_construct(profile=job.hardware.profile, num_devices=1, num_hosts=1)
    return job.model_copy(update={"hardware": hardware, **dict.fromkeys(APART)})


def strip_choices(job: SettledJob) -> SettledJob:
    """The job without what the search may choose, on any number of its GPUs."""
    parts = {name: getattr(job, name).model_copy(update=dict.fromkeys(keys)) for name, keys in OPEN.items()}
    return strip_devices(job).model_copy(update=parts)


def strip_trainers(job: SettledJob) -> SettledJob:
    """The same without who trains, and how."""
    return strip_choices(job).model_copy(update=dict.fromkeys(NOT_OF_ENGINES))
