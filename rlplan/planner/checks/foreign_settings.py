"""Settings of other stacks that rlplan's own runtime does not have: they are planned with, and not run.

In: a SettledJob. Out: reasons. Left out: what each changes in bytes and seconds.
"""

from collections.abc import Iterator

from rlplan.spec.models.adapters import EXPERTS
from rlplan.spec.parts.roles import START_ADAPTER
from rlplan.spec.resolved import SettledJob

OWN_TRAINING = {
    "recomputed": "gradient checkpointing computes whole layers again",
    "reduce_dtype": "gradients are reduced in the type of the passes",
    "moment_dtype": "moments have the type of master weights",
    "virtual_stages": "no model is cut into pipeline stages",
    "predicts_ahead": "the next token alone is predicted",
    "kernels": "transformers' modules run as they are",
}
"""Keys of `training`, and what the runtime does instead."""
OWN_LORA = {
    "unquantized_dtype": "what nf4 leaves unquantized has the type of the passes",
    "dtype": "adapters have the type of the passes",
    "dropout": "adapters read their whole input",
}
OWN_ROLLOUT = {
    "engine_version": "engines are the vLLM that is installed",
    "shares_process": "every engine has a process of its own",
}


def foreign_settings(job: SettledJob) -> Iterator[str]:
    """Keys with a value that the runtime does not have."""
    training, lora, rollout = job.training, job.training.lora, job.rollout
    parts = (("training", training, OWN_TRAINING), ("training.lora", lora, OWN_LORA), ("rollout", rollout, OWN_ROLLOUT))
    for path, part, own in parts:
        if part is None:
            continue
        for key, instead in own.items():
            usual = type(part).model_fields[key].get_default(call_default_factory=True)
            if getattr(part, key) != usual:
                yield f"{path}.{key}: the runtime does without: {instead} ({path}.{key} is left out)"
    if lora is not None and lora.base_dtype in ("bfloat16", "float32"):
        yield "training.lora.base_dtype: a frozen base is nf4 or as the passes (training.lora.base_dtype=auto)"
    if lora is not None and EXPERTS in lora.target_modules:
        yield "training.lora.target_modules experts: PEFT has no adapters beside the stacked tensors of routed experts"
    if job.roles.reference.adapter == START_ADAPTER:
        yield "roles.reference.adapter start: the runtime's reference is the frozen base (roles.reference.adapter=null)"
    if job.placement.sync_bucket == 0:
        yield "placement.sync_bucket 0: the runtime packs tensors into buckets (placement.sync_bucket=auto)"
    if job.device_kind == "cpu" and rollout.gpu_memory_utilization is not None:
        yield "rollout.gpu_memory_utilization: a CPU host has no GPU memory (rollout.kv_cache_memory says the cache)"
    if job.device_kind == "cpu" and job.hardware.power_limit is not None:
        yield "hardware.power_limit: a CPU host has no GPUs (hardware.power_limit=null)"
