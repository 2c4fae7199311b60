"""Remedies are changes that make a job fit. Each one is planned before it is listed.

In: a JobSpec. Out: changes after each of which the job fits (`Plan.fits`), the mildest of each kind. On GPUs the last
ones shrink the job (batch, samples, lengths) and state their effect on learning. A user's own choices are reset to
`auto` only if no smaller change fits.
"""

import shlex
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any

from rlplan.errors import RlplanError
from rlplan.planner.machine import open_search
from rlplan.planner.memo import Memo
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Remedy, Verdict
from rlplan.spec.files.job_file import override_job
from rlplan.spec.job import JobSpec
from rlplan.spec.parts.training import LoraSpec
from rlplan.spec.resolved import resolve_on_cpu
from rlplan.units import MIB, ceil_div

MORE_GPUS = (2, 4, 8, 16)
ADAPTER_RANK, SMALL_ADAPTER_RANK = 64, 16
MOST_HALVINGS = 3
Kind = list[str]
"""Overrides of one kind, the mildest first."""


def list_remedies(plan: Plan, memo: Memo | None = None) -> tuple[Remedy, ...]:
    """List changes that each make the plan's job fit, the mildest first. memo: of the plan's search."""
    memo = memo or Memo()
    asked, devices = plan.asked, plan.job.hardware.num_devices
    remedies: list[Remedy] = []
    # a CPU host runs tiny jobs, whose sizes are deliberate
    smaller = list_smaller_jobs(asked) if asked.is_on_gpus else iter(())
    for kind in chain(list_changes(asked, plan.binding.num_bytes), smaller):
        remedies += _find_mildest(asked, kind, remedies, memo)
    if not any(not remedy.learns_less and remedy.num_devices <= devices for remedy in remedies):
        for kind in list_resets(asked) if asked.is_on_gpus else ():
            remedies += _find_mildest(asked, kind, remedies, memo)
    return tuple(sorted(remedies, key=lambda remedy: remedy.order(devices)))


def _find_mildest(asked: JobSpec, kind: Kind, remedies: list[Remedy], memo: Memo) -> Iterator[Remedy]:
    """Find the first change of a kind that helps.

    A change that costs learning is skipped if it contains one that was already found.
    """
    # "A B" needs no try once "A" alone was enough
    enough = tuple(f"{remedy.change} " for remedy in remedies if remedy.learns_less)
    tried = (_try_remedy(asked, change, memo) for change in kind if not change.startswith(enough))
    yield from islice((remedy for remedy in tried if remedy is not None), 1)


def _try_remedy(asked: JobSpec, change: str, memo: Memo) -> Remedy | None:
    plan = find_fitting_plan(asked, change, memo)
    if plan is None:
        return None
    price, count = plan.asked.hardware.price_per_gpu_hour, plan.num_devices
    dollars = None if price is None else price * count * plan.seconds / 3600
    return Remedy(change, plan.binding.num_bytes, plan.verdict, plan.seconds, count, dollars)


def list_changes(spec: JobSpec, needed_bytes: int = 0) -> Iterator[Kind]:
    """List changes to try by kind, from mild to strong. needed_bytes: memory that a CPU host would need."""
    return _list_gpu_changes(spec) if spec.is_on_gpus else _list_host_changes(spec, needed_bytes)


def _list_host_changes(spec: JobSpec, needed_bytes: int) -> Iterator[Kind]:
    job = resolve_on_cpu(spec)
    if job.checkpoints.every and job.checkpoints.writes != "waiting":
        yield ["checkpoints.writes=waiting"]
    yield [f"rollout.kv_cache_memory={size}MiB" for size in _list_halves(job.rollout.kv_cache_memory // MIB)]
    yield [_format_passes(spec, size) for size in _list_halves(job.workload.micro_batch_size_per_gpu)]
    yield [f"hardware.num_devices={count}" for count in _list_halves(job.hardware.num_devices)]
    if needed_bytes:
        yield [f"hardware.memory={ceil_div(needed_bytes, MIB)}MiB"]


def _format_passes(spec: JobSpec, size: int) -> str:
    """Format micro-batches of `size` longest sequences."""
    words = f"workload.micro_batch_size_per_gpu={size}"
    if spec.training.max_tokens_per_micro_batch == "auto":
        return words
    return f"{words} training.max_tokens_per_micro_batch={size * spec.workload.max_seq_len}"


def _list_gpu_changes(spec: JobSpec) -> Iterator[Kind]:
    training, rollout, workload = spec.training, spec.rollout, spec.workload
    if workload.micro_batch_size_per_gpu != "auto":
        sizes = _list_halves(int(workload.micro_batch_size_per_gpu))
        yield [f"workload.micro_batch_size_per_gpu={size}" for size in sizes]
    tried: list[tuple[bool, str, dict[str, Any]]] = [
        (training.gradient_checkpointing is False, "training", {"gradient_checkpointing": True}),
        # sequence parallelism shards activations only across tensor-parallel ranks
        (not training.sequence_parallel and training.tp != 1, "training", {"sequence_parallel": True}),
        (training.logits in ("plain", "chunked"), "training", {"logits": "auto"}),
        (training.logits != "fused" and spec.backend != "deepspeed", "training", {"logits": "fused"}),
        (training.zero_stage not in ("auto", 3), "training", {"zero_stage": 3}),
        (rollout.kv_cache_memory != "auto", "rollout", {"kv_cache_memory": "auto"}),
        (rollout.tp != "auto", "rollout", {"tp": "auto"}),
        (rollout.attention_dp != "auto", "rollout", {"attention_dp": "auto"}),
        (spec.placement.sync_content == "delta", "placement", {"sync_content": "full"}),
        (spec.placement.placement != "auto", "placement", {"placement": "auto"}),
        (training.offloads_optimizer is False, "training", {"offloads_optimizer": True}),
        (training.optimizer == "adamw", "training", {"optimizer": "adamw_8bit"}),
        (
            training.offloads_parameters is False and spec.backend == "deepspeed",
            "training",
            {"offloads_parameters": True, "zero_stage": 3},
        ),
    ]
    yield from ([_format_change(part, changes)] for holds, part, changes in tried if holds)
    if training.backend == "auto" and spec.framework != "auto":
        yield [f"training.backend={backend}" for backend in spec.release.backends if backend != spec.backend]
    if training.ulysses == 1:
        yield [f"training.ulysses={ulysses}" for ulysses in (2, 4, 8)]
    yield from ([_format_change("training", changes) for changes in kind] for kind in _list_adapters(spec))
    yield [_format_gpus(spec, times) for times in MORE_GPUS]


def list_resets(spec: JobSpec) -> Iterator[Kind]:
    """Reset all fixed choices to `auto`, alone and with more GPUs."""
    words = _format_resets(spec)
    if words:
        yield [words]
        yield [f"{words} {_format_gpus(spec, times)}" for times in MORE_GPUS]


def list_smaller_jobs(spec: JobSpec) -> Iterator[Kind]:
    """List smaller jobs: fewer prompts, fewer samples, shorter responses, and these with small adapters.

    Each is halved up to MOST_HALVINGS times.
    """
    work, declared = spec.workload, spec.algorithm.declaration
    # a group of one has no advantage to learn from
    least = max(2, declared.min_samples_per_prompt)
    for key, smallest in (("num_prompts_per_step", 1), ("num_samples_per_prompt", least)):
        sizes = [size for size in _list_halves(getattr(work, key)) if size >= smallest][:MOST_HALVINGS]
        yield [f"workload.{key}={size}" for size in sizes]
    least = max(spec.algorithm.overlong_buffer, work.mean_response_len or 1)
    sizes = [size for size in _list_halves(work.max_response_len) if size >= least][:MOST_HALVINGS]
    shorter = [f"workload.max_response_len={size}" for size in sizes]
    yield shorter
    for change in [changes[-1] for changes in _list_adapters(spec)][-1:]:  # both together, for the smallest cards
        yield [f"{_format_change('training', change)} {cut}" for cut in shorter]


def _format_gpus(spec: JobSpec, times: int) -> str:
    """Format overrides that multiply the GPUs of each group."""
    hardware, second = spec.hardware, spec.hardware.generation
    text = f"hardware.num_devices={times * hardware.num_devices}"
    if hardware.num_hosts != "auto":
        text += f" hardware.num_hosts={times * hardware.num_hosts}"
    if second is not None:
        text += f" hardware.generation.num_devices={times * second.num_devices}"
    return text


def _list_adapters(spec: JobSpec) -> Iterator[list[dict[str, Any]]]:
    """List LoRA settings instead of full training, and 4-bit base weights (QLoRA), which only rlplan's runtime
    supports.
    """
    training = spec.training
    sizes = [training.lora] if training.lora else [LoraSpec(rank=rank) for rank in (ADAPTER_RANK, SMALL_ADAPTER_RANK)]
    if training.lora is None:
        yield [{"lora": lora} for lora in sizes]
    if sizes[0].base_dtype != "nf4" and spec.backend == "deepspeed":
        beside = {"zero_stage": "auto"} if training.zero_stage == 3 else {}  # packed weights are not partitioned
        yield [{"lora": lora.model_copy(update={"base_dtype": "nf4"}), **beside} for lora in sizes]


def _format_resets(spec: JobSpec) -> str:
    """Format the reset of all fixed choices to `auto`; empty if there are none."""
    keys = (
        ("training", ("zero_stage", "gradient_checkpointing", "offloads_optimizer", "offloads_parameters")),
        ("workload", ("micro_batch_size_per_gpu",)),
        ("rollout", ("tp", "attention_dp", "kv_cache_memory")),
        ("placement", ("placement", "offload")),
    )
    words = []
    for part, names in keys:
        fixed = [name for name in names if getattr(getattr(spec, part), name) not in ("auto", False, "none")]
        if fixed:
            words.append(_format_change(part, dict.fromkeys(fixed, "auto")))
    return " ".join(words)


def _format_change(part: str, changes: Mapping[str, Any]) -> str:
    """Format a change as command-line overrides."""
    return " ".join(f"{part}.{key}={_format_value(value)}" for key, value in changes.items())


def _format_value(value: Any) -> str:
    if not isinstance(value, LoraSpec):
        return str(value).lower()
    stated = value.model_dump(mode="json", exclude_defaults=True)
    return shlex.quote("{" + ", ".join(f"{key}: {_format_yaml(part)}" for key, part in stated.items()) + "}")


def _format_yaml(value: Any) -> str:
    return f"[{', '.join(value)}]" if isinstance(value, list) else str(value)


def find_fitting_plan(asked: JobSpec, change: str, memo: Memo) -> Plan | None:
    """Find the plan of a job after a change; None if it does not fit, cannot be built, or is refused.

    memo: shared with searches for similar jobs.
    """
    worse = Verdict.DOES_NOT_FIT if asked.limits.accepts_oom_risk else Verdict.IN_EXPECTATION
    try:
        plan = open_search(override_job(asked, shlex.split(change)), memo).find_better_plan(worse)
    except RlplanError:
        return None
    return plan if plan is not None and plan.fits else None


def _list_halves(value: int) -> Iterator[int]:
    while value > 1:
        value //= 2
        yield value
