"""The DeepSpeed configuration of a trained role, complete: no `auto`, nothing left to a launcher.

In: a JobSpec and a Schedule. Out: a plain dict for `deepspeed.initialize(config=...)`. Source: DeepSpeed 0.19.8.
"""

from typing import Any

from rlplan.dataflow.schedule import Schedule
from rlplan.spec.job import JobSpec
from rlplan.spec.training import TrainingSpec
from rlplan.units import ceil_div
from rlplan.vocabulary import Dtype, Role

INITIAL_SCALE_POWER = 16
"""fp16 begins with a loss scale of 2 to this power; DeepSpeed halves it at every overflow. Source: its own default."""


def deepspeed_config(job: JobSpec, schedule: Schedule, role: Role = Role.POLICY) -> dict[str, Any]:
    """DeepSpeed's JSON for a trained role.

    `managed_gradient_accumulation: false` makes each `step()` the boundary, so that micro-batches of different sizes
    may be accumulated.
    """
    algorithm, layout = job.algorithm, schedule.layout(f"{role}_trainer", role)
    is_value = role is Role.VALUE and algorithm.value_learning_rate is not None
    learning_rate = algorithm.value_learning_rate if is_value else algorithm.learning_rate
    per_rank = job.workload.mini_batch_size // layout.dp
    micro = min(job.workload.micro_batch_size_per_gpu, per_rank)
    accumulation = ceil_div(per_rank, micro)
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro * accumulation * layout.num_shards,
        "managed_gradient_accumulation": False,
        "gradient_clipping": algorithm.gradient_clipping,
        "steps_per_print": 1_000_000_000,
        "zero_allow_untested_optimizer": True,
        **({"zero_force_ds_cpu_optimizer": False} if job.training.offloads_optimizer else {}),
        **_precision(job.training.dtype),
        "zero_optimization": zero_section(job.training, layout.zero_stage),
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": learning_rate,
                "betas": [algorithm.adam_beta1, algorithm.adam_beta2],
                "eps": 1e-8,
                "weight_decay": algorithm.weight_decay,
                "torch_adam": True,
                "fused": True,
            },
        },
    }


def zero_section(training: TrainingSpec, stage: int) -> dict[str, Any]:
    """`zero_optimization`: only what the stage reads.

    `overlap_comm` stays off, and ZeRO-3 gathers nothing ahead and keeps nothing for later: gloo on a CPU computes and
    sends on the same cores, so it gains nothing and only holds more.
    """
    if stage == 0:
        return {"stage": 0}
    section: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": True,
        "overlap_comm": False,
        "reduce_scatter": True,
        "reduce_bucket_size": training.reduce_bucket_size,
        "allgather_bucket_size": training.reduce_bucket_size * 2,
    }
    if stage == 3:
        section |= {
            "stage3_param_persistence_threshold": training.persistence_threshold,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_reuse_distance": 0,
        }
    if training.offloads_optimizer:
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    return section


def _precision(dtype: Dtype) -> dict[str, Any]:
    """16-bit weights beside fp32 master weights; fp16 with a loss scale that follows its overflows."""
    if dtype is Dtype.BFLOAT16:
        return {"bf16": {"enabled": True}}
    if dtype is Dtype.FLOAT16:
        return {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": INITIAL_SCALE_POWER}}
    return {}
