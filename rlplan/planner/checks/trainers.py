"""Checks of trainer settings for combinations that the backend cannot run.

In: a SettledJob and its setting. Out: problems as (what, where, rule, way out). Left out: open values, for which only
runnable ones are offered (gpu/axes.py); sizes and types (gpus.py); placements (placements.py).
"""

from collections.abc import Iterator
from math import prod

from rlplan.errors import SpecError
from rlplan.frameworks.profile import suggest_trainer
from rlplan.planner.checks.placements import Problem
from rlplan.planner.setting import GpuSetting
from rlplan.spec.model import Layout, ModelSpec
from rlplan.spec.parts.training import count_ranks, find_sharing_conflicts
from rlplan.spec.resolved import SettledJob, SettledTraining
from rlplan.vocabulary import Backend

AXES: dict[Backend, tuple[str, ...]] = {
    "deepspeed": ("ulysses", "tp"),
    "fsdp2": ("ulysses", "tp", "cp"),
    "megatron": ("tp", "pp", "cp", "ep"),
}
"""Parallel axes of each backend."""
NAMES: dict[Backend, str] = {
    "deepspeed": "DeepSpeed",
    "fsdp2": "FSDP2",
    "megatron": "Megatron-Core",
}
OPTIMIZERS: dict[Backend, tuple[str, ...]] = {"fsdp2": ("adamw", "adamw_8bit"), "megatron": ("adamw",)}
"""Optimizers that are planned for a backend outside rlplan's own runtime, which supports all."""
STAGES: dict[Backend, tuple[int, ...]] = {"deepspeed": (0, 1, 2, 3), "fsdp2": (3,), "megatron": (0, 1)}
"""Values of training.zero_stage per backend: FSDP2 full shard is 3, Megatron's distributed optimizer is 1."""
OWN_RUNTIME = {
    "training.logits": (
        "is by_rows, which {} does not support",
        "only rlplan's runtime computes a row-chunked loss",
        "auto",
    ),
    "rollout.shares_base": (
        "with {}",
        "only rlplan's runtime shares the trainer's base with an engine",
        "false",
    ),
    "rollout.base_path": ("with {}", "only rlplan's runtime supports engines with a separate checkpoint", "null"),
    "placement.sync_verification": (
        "is every, which {} does not support",
        "only rlplan's runtime compares the engines' parameters with the trainer's",
        "first, which other frameworks ignore",
    ),
}
"""Settings that only rlplan's runtime supports: words of the refusal, the rule, and the value to use instead."""


def check_axes(job: SettledJob, setting: GpuSetting) -> Iterator[Problem]:
    """Check parallel axes that the backend lacks, and sizes that the model or the GPUs do not divide by."""
    training = job.training
    yield from check_missing_axes(job)
    sizes = {axis: count_ranks(getattr(training, axis)) for axis in ("ulysses", "tp", "pp", "cp")}
    ranks = prod(sizes.values())
    if ranks > setting.pools[0].num_gpus:
        words = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
        yield (
            f"one micro-batch needs {ranks} GPUs ({words}), {setting.pools[0].num_gpus} train",
            "training.tp, training.pp, training.cp, training.ulysses",
            "ranks that share a sequence (ulysses, cp) or a layer (tp) need a GPU each",
            "fewer ranks, or more GPUs",
        )
    yield from _check_tensor_parallel(job, setting.policy)
    yield from _check_pipeline_and_experts(job, setting)


def check_missing_axes(job: SettledJob) -> Iterator[Problem]:
    """Find parallel axes that the job's backend lacks, on GPUs and on CPU hosts."""
    training, backend = job.training, job.backend
    for axis in ("ulysses", "tp", "pp", "cp", "ep"):
        num_ranks = count_ranks(getattr(training, axis))
        if num_ranks > 1 and axis not in AXES[backend]:
            others = [suggest_trainer(name) for name in AXES if axis in AXES[name]]
            yield (
                f"training.{axis} is {num_ranks}, which {NAMES[backend]} does not support",
                f"training.{axis}",
                f"{NAMES[backend]} supports {', '.join(AXES[backend])}",
                f"training.{axis}=1" + (f", or {' or '.join(others)}" if job.device_kind == "cuda" else ""),
            )
    if training.etp != "auto" and int(training.etp) > 1 and "ep" not in AXES[backend]:
        yield (
            f"training.etp is {training.etp}, which {NAMES[backend]} does not support",
            "training.etp",
            "only Megatron-Core has expert tensor parallelism",
            "training.etp=1" + (f", or {suggest_trainer('megatron')}" if job.device_kind == "cuda" else ""),
        )


def check_sharded_copies(job: SettledJob) -> Iterator[Problem]:
    """Check that groups of ranks with a shared copy of the states are used with FSDP2 only."""
    if job.backend != "fsdp2" and job.training.fsdp_size is not None:
        yield (
            f"training.fsdp_size is {job.training.fsdp_size}, the trainer is {NAMES[job.backend]}",
            "training.fsdp_size",
            "only FSDP2 shards states within groups of ranks",
            "training.fsdp_size=null" + (f", or {suggest_trainer('fsdp2')}" if job.device_kind == "cuda" else ""),
        )


def check_own_runtime(job: SettledJob, setting: GpuSetting) -> Iterator[Problem]:
    """Check settings that only rlplan's runtime supports."""
    if job.is_for_rlplan:
        return
    title, rollout = job.release.title, job.rollout
    stated = {
        "training.logits": job.training.logits == "by_rows",
        "rollout.shares_base": rollout.shares_base,
        "rollout.base_path": rollout.base_path is not None,
        "placement.sync_verification": job.placement.sync_verification == "every",
    }
    for key, (what, rule, way_out) in OWN_RUNTIME.items():
        if stated[key]:
            yield f"{key} {what.format(title)}", key, rule, f"{key}={way_out}, or framework=rlplan"


def _check_tensor_parallel(job: SettledJob, model: ModelSpec) -> Iterator[Problem]:
    tp = count_ranks(job.training.tp)
    if tp == 1:
        return
    try:
        model.list_rank_tensors(Layout(tp=tp), range(0))
    except SpecError as error:
        yield error.what, "training.tp", error.rule, "training.tp=auto, or another number"
    if job.backend == "deepspeed" and model.experts is not None:
        yield (
            f"training.tp is {tp} with a model with {model.experts.num_experts} experts a layer",
            "training.tp",
            "DeepSpeed's AutoTP shards linear layers only; stacked experts would stay whole on every rank",
            f"training.tp=1, or {suggest_trainer('megatron')}",
        )
    if job.backend == "megatron" and model.experts is not None and not job.training.sequence_parallel:
        yield (
            f"training.sequence_parallel is false with training.tp {tp}, but the model has experts",
            "training.sequence_parallel",
            "Megatron-Core combines experts with tensor parallelism only under sequence parallelism (moe_layer.py)",
            "training.sequence_parallel=true, or training.tp=1",
        )


def check_deepspeed(job: SettledJob, setting: GpuSetting) -> Iterator[Problem]:
    """Check fixed settings that DeepSpeed cannot combine."""
    if job.backend != "deepspeed":
        return
    asked = job.training.combination()
    trained = [setting.get_model(role) for role in job.algorithm.declaration.trained_roles]
    sharing = (
        contradiction for model in trained for contradiction in find_sharing_conflicts(model, asked.ulysses, asked.tp)
    )
    for contradiction in (*asked.contradictions(), *sharing):
        yield (
            contradiction.what,
            contradiction.where,
            contradiction.rule,
            contradiction.way_out
            + (f", or {suggest_trainer('megatron')}" if contradiction.where == "training.tp" else ""),
        )


def _check_pipeline_and_experts(job: SettledJob, setting: GpuSetting) -> Iterator[Problem]:
    training, model = job.training, setting.policy
    pp, ep, tp = (count_ranks(num_ranks) for num_ranks in (training.pp, training.ep, training.tp))
    if pp > model.num_layers:
        yield (
            f"training.pp is {pp}, the model has {model.num_layers} layers",
            "training.pp",
            "every pipeline stage has a layer",
            f"training.pp of at most {model.num_layers}",
        )
    yield from _check_expert_tp(job, setting)
    if ep == 1:
        return
    if model.experts is None:
        yield (
            f"training.ep is {ep}, the model has no experts",
            "training.ep",
            "expert parallel ranks share the experts of a layer",
            "training.ep=1, or a mixture of experts",
        )
    elif model.experts.num_experts % ep:
        yield (
            f"training.ep is {ep}, a layer has {model.experts.num_experts} experts",
            "training.ep",
            "every rank must hold equally many whole experts",
            "a number that divides the number of experts",
        )
    gpus = setting.pools[0].num_gpus
    if gpus < pp * max(ep, tp):
        yield (
            f"training.ep is {ep} in each of {pp} pipeline stages, but only {gpus} GPUs train",
            "training.ep",
            "expert-parallel ranks belong to one pipeline stage",
            "fewer ranks, or more GPUs",
        )


def _check_expert_tp(job: SettledJob, setting: GpuSetting) -> Iterator[Problem]:
    """Check a fixed training.etp against the experts and the GPUs."""
    training, model = job.training, setting.policy
    if training.etp == "auto" or model.experts is None:
        return
    etp, ep, pp = int(training.etp), count_ranks(training.ep), count_ranks(training.pp)
    if job.backend != "megatron":
        return
    if model.experts.intermediate_size % etp:
        yield (
            f"training.etp is {etp}, experts have intermediate size {model.experts.intermediate_size}",
            "training.etp",
            "every rank must hold an equal part of each expert's matrices",
            "training.etp=1, or a number that divides that size",
        )
    gpus, ranks = setting.pools[0].num_gpus, etp * ep * pp
    if gpus < ranks or (job.placement.placement in ("colocated", "hybrid") and gpus % ranks):
        yield (
            f"experts need etp {etp} x ep {ep} x pp {pp} = {ranks} GPUs, {gpus} train",
            "training.etp, training.ep, training.pp",
            "Megatron-Core divides the GPUs that train by etp x ep x pp (parallel_state.py)",
            "training.etp=1, or a smaller training.ep or training.pp",
        )


def check_trainer(job: SettledJob, setting: GpuSetting) -> Iterator[Problem]:
    """Check ZeRO stages, offload, optimizer and adapters against the backend."""
    training, backend = job.training, job.backend
    name, other = NAMES[backend], "framework=rlplan"
    if training.zero_stage != "auto" and training.zero_stage not in STAGES[backend]:
        allowed = " or ".join(map(str, STAGES[backend]))
        rule = "shards everything: 3" if backend == "fsdp2" else "shards the optimizer's states (1) or nothing (0)"
        yield (
            f"training.zero_stage is {training.zero_stage}, the trainer is {name}",
            "training.zero_stage",
            f"{name} {rule}",
            f"training.zero_stage=auto or {allowed}, or {other}",
        )
    yield from check_sharded_copies(job)
    yield from _check_fsdp2(training, backend)
    if backend == "deepspeed":
        return
    refused = (
        ("training.optimizer", training.optimizer not in OPTIMIZERS[backend], training.optimizer, "adamw"),
        ("training.offload_device", training.offload_device != "cpu", training.offload_device, "cpu"),
        (
            "training.lora.base_dtype",
            backend == "megatron" and _read_base_dtype(training) != "auto",
            _read_base_dtype(training),
            "auto",
        ),
        *((f"roles.{role}.adapter", True, folder, "null") for role, folder in job.roles.adapters.items()),
        *(("training.lora.path", True, lora.path, "null") for lora in (training.lora,) if lora and lora.path),
    )
    for where, holds, value, instead in refused:
        if holds:
            yield (
                f"{where} is {value}, the trainer is {name}",
                where,
                f"planned for {name}: {instead}",
                f"{where}={instead}, or {other}",
            )
    if backend == "megatron" and training.zero_stage == 0 and training.offloads_optimizer is True:
        yield (
            "training.offloads_optimizer with zero_stage 0, the trainer is Megatron-Core",
            "training.offloads_optimizer",
            "Megatron's offloaded optimizer is planned with the distributed optimizer: zero_stage 1",
            "training.zero_stage=1",
        )
    if backend == "megatron" and training.offloads_parameters is True:
        yield (
            "training.offloads_parameters, the trainer is Megatron-Core",
            "training.offloads_parameters",
            "Megatron-Core offloads the optimizer's states; weights stay on the GPU",
            f"training.offloads_parameters=false, or {other}",
        )


def _read_base_dtype(training: SettledTraining) -> str:
    """Read the data type of a frozen base model as the job states it."""
    return "auto" if training.lora is None else training.lora.base_dtype


def _check_fsdp2(training: SettledTraining, backend: Backend) -> Iterator[Problem]:
    """Check FSDP2's offload, which moves weights and states together."""
    both = {training.offloads_optimizer, training.offloads_parameters}
    if backend == "fsdp2" and both == {True, False}:
        yield (
            "training.offloads_optimizer and training.offloads_parameters differ, the trainer is FSDP2",
            "training.offloads_optimizer, training.offloads_parameters",
            "FSDP2's CPUOffloadPolicy moves weights, gradients and states together",
            "both true, both false, or one of them auto",
        )


CHECKS = (check_axes, check_deepspeed, check_own_runtime, check_trainer)
"""All checks, in order."""
