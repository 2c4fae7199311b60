"""From a plan for GPUs to a job with every choice fixed, and to the plan of that job, which a bundle is made of.

In: a Budget whose `job:` says what a run trains on. Out: a JobSpec and its Plan, through the builder of every job's.
Left out: the choice itself (gpu/search.py), and targets other than rlplan's own runtime.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlplan.errors import EmitError, SpecError
from rlplan.planner.budget import Budget
from rlplan.planner.plan import Plan
from rlplan.planner.search import find_plan
from rlplan.spec.base import validate
from rlplan.spec.job import JobSpec
from rlplan.spec.models.catalogue import model_path
from rlplan.vocabulary import Role, SyncContent

MODELS = "models"
"""Folder in which bundled models are looked for, each as ORG/NAME, where a job does not name theirs."""


def executable_plan(budget: Budget) -> Plan:
    """The plan that runs what a budget has chosen. Raises: SpecError, EmitError, NoFeasiblePlanError."""
    job = job_of(budget)
    _check_shapes(job, budget)
    return find_plan(job)


def job_of(budget: Budget) -> JobSpec:
    """The job that a budget has come to. Raises: SpecError where it does not say what is trained on, EmitError where
    the runtime lacks what was chosen.
    """
    given = budget.spec.job
    if given is None:
        raise SpecError(
            "the budget says what it may take, and not what is trained on",
            where="job",
            rule="`job:` holds the parts of a job file that a run needs beside: workload.prompts, rewards ...",
            way_out="docs/budgets.md shows one",
        )
    for holds, key, rule, way_out in _beyond(budget):
        if holds:
            raise EmitError(f"{key} is chosen, which the runtime lacks", where=key, rule=rule, way_out=way_out)
    data = {"name": "budget"} | _merged(given, _chosen(budget), "job")
    folder = Path(budget.spec.folder or ".")
    return validate(JobSpec, data, file="the budget's job").resolved(folder)


def _merged(given: Mapping[str, Any], chosen: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What is given, with what was chosen. Raises: SpecError where both speak."""
    both = dict(given)
    for key, value in chosen.items():
        if isinstance(value, dict) and isinstance(both.get(key, {}), dict):
            both[key] = _merged(both.get(key, {}), value, f"{where}.{key}")
        elif key in both and where != "job.policy" and not where.startswith("job.roles"):
            raise SpecError(
                f"{where}.{key} is what the budget decides",
                where=f"{where}.{key}",
                rule="`job:` has only the keys that the budget does not have, or chooses, itself",
                way_out=f"leave it out, or say it in the budget's own {key}",
            )
        else:
            both.setdefault(key, value)
    return both


def _chosen(budget: Budget) -> dict[str, Any]:
    """Everything that the budget says or has chosen, by the keys of a job."""
    spec, pool = budget.spec, budget.setting.pools[0]
    algorithm: dict[str, Any] = {"name": spec.algorithm}
    if spec.kl_coef is not None:
        algorithm["kl_coef"] = spec.kl_coef
    elif not spec.declaration.has_reference:
        algorithm["kl_coef"] = 0.0
    hardware = {
        "profile": pool.node.name if pool.node and pool.node.gpu == pool.gpu.name else pool.gpu.name,
        "num_devices": pool.num_gpus,
        "num_hosts": pool.num_hosts,
        "memory": spec.memory,
        "host_memory": spec.host_memory,
    }
    return {
        "policy": {"path": _folder(spec.model)},
        "roles": _roles(budget),
        "hardware": {key: value for key, value in hardware.items() if value is not None},
        "algorithm": algorithm,
        "workload": _workload(budget),
        "training": _training(budget),
        "rollout": _rollout(budget),
        "placement": _placement(budget),
    }


def _folder(name: str) -> str:
    path = model_path(name)
    return f"{MODELS}/{name}" if path is None else str(path.resolve())


def _roles(budget: Budget) -> dict[str, Any]:
    named = {"value": budget.spec.value_model, "reward": budget.spec.reward_model}
    has_value = Role.VALUE in budget.spec.declaration.trained_roles
    return {role: {"path": _folder(name)} for role, name in named.items() if name and (has_value or role != "value")}


def _workload(budget: Budget) -> dict[str, Any]:
    work, trainer = budget.spec.workload, budget.candidate.trainer
    return {
        "num_steps": work.num_steps,
        "num_prompts_per_step": work.num_prompts_per_step,
        "num_samples_per_prompt": work.num_samples_per_prompt,
        "mini_batch_size": work.rollouts_per_mini_batch,
        "micro_batch_size_per_gpu": trainer.micro_batch,
        "max_prompt_len": work.max_prompt_len,
        "max_response_len": work.max_response_len,
        "mean_prompt_len": work.prompt_len,
        "mean_response_len": max(1, min(work.max_response_len, math.ceil(work.lengths.mean))),
        "response_lengths": work.response_lengths.model_dump(mode="json"),
    }


def _training(budget: Budget) -> dict[str, Any]:
    training, trainer = budget.spec.training, budget.candidate.trainer
    chosen: dict[str, Any] = {
        "dtype": training.dtype.value,
        "zero_stage": trainer.zero_stage,
        "reduce_bucket_size": training.reduce_bucket_size,
        "gradient_checkpointing": trainer.recomputes,
        "offloads_optimizer": trainer.offloads_optimizer,
        "offloads_parameters": trainer.offloads_parameters,
    }
    if trainer.max_tokens:
        chosen["max_tokens_per_micro_batch"] = trainer.max_tokens
    chosen |= {axis: getattr(trainer, axis) for axis in ("ulysses", "tp") if getattr(trainer, axis) > 1}
    if training.optimizer != "adamw":
        chosen["optimizer"] = training.optimizer
    if training.lora is not None:
        chosen["lora"] = {"rank": training.lora.rank, "target_modules": training.lora.targets}
        chosen["quantization"] = "nf4" if training.lora.base == "nf4" else "none"
    return chosen


def _rollout(budget: Budget) -> dict[str, Any]:
    rollout, engine, step = budget.spec.rollout, budget.candidate.engine, budget.candidate.step
    return {
        "dtype": rollout.dtype.value,
        "num_engines": step.num_generation // engine.tp,
        "tp": engine.tp,
        "quantization": engine.quantization or "none",
        "kv_dtype": rollout.kv_dtype,
        "kv_cache_memory": budget.kv.kv_cache_memory_bytes if budget.kv else 0,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "block_size": rollout.block_size,
        "has_cuda_graphs": rollout.has_cuda_graphs,
        "has_expert_parallel": engine.has_expert_parallel,
        **({"sleep_level": engine.sleep_level} if engine.sleep_level else {}),
    }


def _placement(budget: Budget) -> dict[str, Any]:
    place, step, transport = budget.spec.placement, budget.candidate.step, budget.candidate.transport
    shared = step.shares_devices
    if transport in ("adapter", "delta"):
        content, way = transport, "cuda_ipc" if shared else "nccl"
    else:
        content, way = SyncContent.FULL.value, transport
    return {
        "placement": step.placement.value,
        "num_generation_devices": step.num_generation,
        "num_scoring_devices": step.num_scoring,
        "max_staleness": place.max_staleness if step.max_staleness else 0,
        "spreads_scoring": True,
        "parks": "host" if step.parks or step.parks_frozen else "none",
        "parks_only_frozen": step.parks_frozen and not step.parks,
        "transport": way,
        "sync_senders": "each" if way == "cuda_ipc" and step.num_training > 1 else "one",
        "sync_content": content,
        "sync_bucket": place.sync_bucket,
    }


def _beyond(budget: Budget) -> Iterator[tuple[bool, str, str, str]]:
    """(whether it was chosen, the key, why it cannot run, the way out)."""
    spec, candidate, pools = budget.spec, budget.candidate, budget.setting.pools
    training, step, pool = spec.training, candidate.step, pools[0]
    yield spec.target != "rlplan", f"target {spec.target}", "a bundle is for rlplan's own runtime", "target=rlplan"
    yield not step.has_rollouts, f"algorithm {spec.algorithm}", "the runtime trains on rollouts", "another algorithm"
    yield len(pools) > 1, f"gpus {spec.gpus}", "a job has GPUs of one kind", "one group, such as gpus=8xH100"
    uneven = pool.num_hosts > 1 and pool.num_gpus % pool.gpus_per_host > 0
    yield uneven, f"gpus {spec.gpus}", f"hosts are filled with {pool.gpus_per_host} GPUs each", "whole hosts"
    nvme = training.offload_device == "nvme" and candidate.trainer.offloads_optimizer
    yield (
        nvme,
        "training.offload_device nvme",
        "states are offloaded to the host's memory",
        "training.offload_device=cpu",
    )
    yield training.optimizer == "muon", "training.optimizer muon", "AdamW", "training.optimizer=adamw"
    low = training.master_dtype.num_bytes < 4
    yield low, "training.master_dtype bfloat16", "fp32 master weights", "training.master_dtype=float32"
    off = training.offloads_activations
    yield off, "training.offloads_activations", "activations stay on the GPU", "training.offloads_activations=false"
    awake = step.placement.value == "colocated" and not candidate.engine.sleep_level
    yield awake, "rollout.sleep_level 0", "a colocated engine sleeps", "rollout.sleep_level=2, or placement hybrid"
    words = candidate.engine.quantization
    yield (
        words not in (None, "fp8"),
        f"rollout.quantization {words}",
        "fp8, made while loading",
        "rollout.quantization=fp8",
    )


def _check_shapes(job: JobSpec, budget: Budget) -> None:
    """Raises: SpecError where a folder holds another model than the plan was made for."""
    if job.load_model() != budget.setting.policy:
        raise SpecError(
            f"the model in {job.policy.path} has another shape than {budget.spec.model}",
            where="job.policy.path",
            rule="a plan runs the model that it was made for",
            way_out="put that model there, or plan for the other: model=PATH",
        )
