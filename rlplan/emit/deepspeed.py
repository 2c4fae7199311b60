"""The DeepSpeed configuration of a trained role, complete: no `auto`, nothing left to a launcher.

In: a JobSpec and a Schedule. Out: a plain dict for `deepspeed.initialize(config=...)`. Source: DeepSpeed 0.19.8.
"""

from typing import Any

from rlplan.dataflow.schedule import Schedule
from rlplan.spec.job import JobSpec
from rlplan.units import ceil_div
from rlplan.vocabulary import Role


def deepspeed_config(job: JobSpec, schedule: Schedule, role: Role = Role.POLICY) -> dict[str, Any]:
    """DeepSpeed's JSON for a trained role.

    `managed_gradient_accumulation: false` makes each `step()` the boundary, so that micro-batches of different sizes
    may be accumulated. `overlap_comm` stays off: gloo on CPU gains nothing and it doubles the reduction buffer.
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
        "train_batch_size": micro * accumulation * layout.dp,
        "managed_gradient_accumulation": False,
        "gradient_clipping": algorithm.gradient_clipping,
        "steps_per_print": 1_000_000_000,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": layout.zero_stage,
            "contiguous_gradients": True,
            "overlap_comm": False,
            "reduce_scatter": True,
            "reduce_bucket_size": job.training.reduce_bucket_size,
            "allgather_bucket_size": job.training.reduce_bucket_size * 2,
        },
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
