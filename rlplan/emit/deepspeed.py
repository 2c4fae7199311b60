"""The complete DeepSpeed configuration of a trained role: no `auto`, no value left to a launcher.

In: a ResolvedJob and a Schedule. Out: a plain dict for `deepspeed.initialize(config=...)`. Source: DeepSpeed 0.19.8.
"""

from typing import Any

from rlplan.dataflow.schedule import Schedule
from rlplan.memory.trainers.zero import ZeroSettings
from rlplan.spec.resolved import ResolvedJob, ResolvedTraining
from rlplan.units import ceil_div
from rlplan.vocabulary import Dtype, Role

INITIAL_SCALE_POWER = 16
"""Initial loss scale in fp16, as a power of 2; DeepSpeed halves the scale at every overflow. Source: its default."""


EIGHT_BIT = "AdamW8bit"
"""bitsandbytes' name for AdamW with 8-bit moments."""


def deepspeed_config(job: ResolvedJob, schedule: Schedule, role: Role = Role.POLICY) -> dict[str, Any]:
    """Build DeepSpeed's JSON for a trained role.

    `managed_gradient_accumulation: false` makes each `step()` the boundary, so micro-batches of different sizes can be
    accumulated.
    """
    algorithm, layout = job.algorithm, schedule.find_layout(f"{role}_trainer", role)
    on_gpus = job.device_kind == "cuda"
    is_value = role is Role.VALUE and algorithm.value_learning_rate is not None
    learning_rate = algorithm.value_learning_rate if is_value else algorithm.learning_rate
    per_rank = ceil_div(job.workload.mini_batch_size, layout.dp)
    micro = min(job.workload.micro_batch_size_per_gpu, per_rank)
    accumulation = ceil_div(per_rank, micro)
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro * accumulation * len(layout.devices),  # counts every rank, also those of one pass
        "managed_gradient_accumulation": False,
        "gradient_clipping": algorithm.gradient_clipping,
        "steps_per_print": 1_000_000_000,  # never: the driver reports the progress
        "zero_allow_untested_optimizer": True,  # ZeRO's list of tested optimizers lacks bitsandbytes'
        # by default DeepSpeed accepts only its own compiled CPU Adam with an offloaded optimizer
        **({"zero_force_ds_cpu_optimizer": False} if job.training.offloads_optimizer and not on_gpus else {}),
        **_precision(job.training.dtype),
        **({"tensor_parallel": tensor_parallel_section(layout.tp)} if layout.tp > 1 else {}),
        "zero_optimization": zero_section(job.training, layout.zero_stage, on_gpus=on_gpus),
        "optimizer": _optimizer(job, learning_rate, on_gpus=on_gpus),
    }


def _optimizer(job: ResolvedJob, learning_rate: float | None, *, on_gpus: bool) -> dict[str, Any]:
    """Build `optimizer`. DeepSpeed does not know bitsandbytes' optimizer; the runtime makes it from this section."""
    algorithm = job.algorithm
    params = {
        "lr": learning_rate,
        "betas": [algorithm.adam_beta1, algorithm.adam_beta2],
        "eps": 1e-8,
        "weight_decay": algorithm.weight_decay,
    }
    if job.training.optimizer == "adamw_8bit":
        return {"type": EIGHT_BIT, "params": params}
    # an optimizer on the host of a GPU is DeepSpeed's own, which is compiled when it starts
    own = {} if on_gpus and job.training.offloads_optimizer else {"torch_adam": True, "fused": True}
    return {"type": "AdamW", "params": {**params, **own}}


def frozen_config(job: ResolvedJob) -> dict[str, Any]:
    """Build DeepSpeed's JSON for a frozen role whose ranks shard its weights: ZeRO-3 without an optimizer."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 1_000_000_000,
        **_precision(job.training.dtype),
        "zero_optimization": zero_section(
            job.training.model_copy(update={"offloads_optimizer": False, "offloads_parameters": False}),
            3,
            on_gpus=job.device_kind == "cuda",
        ),
    }


def tensor_parallel_section(tp: int) -> dict[str, Any]:
    """Build `tensor_parallel` with explicit rules for AutoTP; embeddings, head and norms are replicated.

    The runtime's head reads its weight a few rows at a time, which needs all columns on each rank. Norms of queries and
    keys see only the heads of a rank, so their gradients are summed. Source: DeepSpeed 0.19.8, autotp_config.py.
    """
    return {
        "autotp_size": tp,
        "vocab_parallel_lm_head": False,
        "partition_config": {
            "use_default_specs": False,
            "layer_specs": [
                {"patterns": [r".*\.(q|k|v|gate|up)_proj\.weight$"], "partition_type": "column"},
                {"patterns": [r".*\.(o|down)_proj\.weight$"], "partition_type": "row"},
                {"patterns": [r".*\.(q|k)_norm\.weight$"], "partition_type": "skip", "grad_allreduce": True},
            ],
        },
    }


def zero_section(training: ResolvedTraining, stage: int, *, on_gpus: bool = False) -> dict[str, Any]:
    """Build `zero_optimization` with only the keys that the stage reads.

    On a CPU `overlap_comm` is off, and ZeRO-3 neither prefetches nor keeps parameters: gloo computes and sends on the
    same cores, so both would only use more memory. On GPUs the settings are those that
    `memory.roles.states.build_zero_settings` counts: DeepSpeed's own defaults except for the buckets.
    """
    if stage == 0:
        return {"stage": 0}
    counted, bucket = ZeroSettings(stage, 1), training.reduce_bucket_size
    section: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": True,
        "overlap_comm": on_gpus and counted.overlaps,
        "reduce_scatter": True,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket if on_gpus else 2 * bucket,
    }
    if stage == 3:
        section |= {
            **({"sub_group_size": counted.sub_group_size} if on_gpus else {}),
            "stage3_param_persistence_threshold": training.persistence_threshold,
            "stage3_prefetch_bucket_size": counted.prefetch_bucket_size if on_gpus else 0,
            **({"stage3_max_live_parameters": counted.max_live_parameters} if on_gpus else {}),
            "stage3_max_reuse_distance": counted.max_reuse_distance if on_gpus else 0,
        }
    if training.offloads_optimizer:
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": on_gpus}
    if on_gpus and training.offloads_parameters:
        section["offload_param"] = {"device": "cpu", "pin_memory": True}
    return section


def _precision(dtype: Dtype) -> dict[str, Any]:
    """Build the precision section: 16-bit weights with fp32 master weights; fp16 with a dynamic loss scale."""
    if dtype is Dtype.BFLOAT16:
        return {"bf16": {"enabled": True}}
    if dtype is Dtype.FLOAT16:
        return {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": INITIAL_SCALE_POWER}}
    return {}
