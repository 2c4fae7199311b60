"""Remedies: what to change in a job that does not fit, each tried before it is named.

In: a JobSpec. Out: changes that can be typed as they stand, the mildest of each kind. On GPUs also what makes the job
itself smaller (batch, samples, lengths), last, for it costs in learning; the list says what. What a user has chosen is
left to the search only where no smaller change surely fits.
"""

import shlex
from collections.abc import Iterator
from itertools import chain
from typing import Any

from rlplan.errors import RlplanError
from rlplan.planner.machine import search_of
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Remedy, Verdict
from rlplan.spec.job import JobSpec
from rlplan.spec.parts.training import LoraSpec
from rlplan.spec.resolved import on_a_cpu_host
from rlplan.units import MIB, ceil_div

MORE_GPUS = (2, 4, 8, 16)
ADAPTER_RANK, SMALL_ADAPTER_RANK = 64, 16
MOST_HALVINGS = 3
Kind = list[tuple[str, JobSpec]]
"""Changes of one kind, the mildest first: as each is typed, and the job with it."""


def list_remedies(plan: Plan) -> tuple[Remedy, ...]:
    """Changes, each of which by itself leads to a better verdict than the plan's; the mildest first."""
    asked, devices = plan.asked, plan.job.hardware.num_devices
    found: list[Remedy] = []
    smaller = smaller_jobs(asked) if asked.is_on_gpus else iter(())
    for kind in chain(kinds_of_changes(asked, plan.binding.num_bytes), smaller):
        found += _mildest(kind, found, plan.verdict)
    if not any(one.verdict is Verdict.FITS and not one.learns_less and one.num_devices <= devices for one in found):
        for kind in resets(asked) if asked.is_on_gpus else ():
            found += _mildest(kind, found, plan.verdict)
    return tuple(sorted(found, key=lambda remedy: remedy.order(devices)))


def _mildest(kind: Kind, found: list[Remedy], verdict: Verdict) -> Iterator[Remedy]:
    """The first change of a kind that helps, or the next one where that surely fits; of those that give up learning,
    none that holds one that was found.
    """
    enough = tuple(f"{one.change} " for one in found if one.learns_less)
    tried = (_tried(change, other, verdict) for change, other in kind if not change.startswith(enough))
    first = next((remedy for remedy in tried if remedy is not None), None)
    if first is not None:
        second = next(tried, None) if first.verdict is not Verdict.FITS else None
        yield first if second is None or second.verdict is not Verdict.FITS else second


def _tried(change: str, other: JobSpec, verdict: Verdict) -> Remedy | None:
    found = better(other, verdict)
    if found is None:
        return None
    price, count = other.hardware.price_per_gpu_hour, found.num_devices
    dollars = None if price is None else price * count * found.seconds / 3600
    return Remedy(change, found.binding.num_bytes, found.verdict, found.seconds, count, dollars)


def kinds_of_changes(spec: JobSpec, needed_bytes: int = 0) -> Iterator[Kind]:
    """What to try, the mildest first, of a kind too. needed_bytes: that a CPU host would need."""
    return _on_gpus(spec) if spec.is_on_gpus else _on_a_host(spec, needed_bytes)


def _on_a_host(spec: JobSpec, needed_bytes: int) -> Iterator[Kind]:
    job = on_a_cpu_host(spec)
    if job.checkpoints.every and job.checkpoints.writes != "waiting":
        yield [_changed(spec, "checkpoints", writes="waiting")]
    caches = _halves(job.rollout.kv_cache_memory // MIB)
    yield [
        (f"rollout.kv_cache_memory={size}MiB", _changed(spec, "rollout", kv_cache_memory=size * MIB)[1])
        for size in caches
    ]
    yield [_with_passes(spec, size) for size in _halves(job.workload.micro_batch_size_per_gpu)]
    yield [_changed(spec, "hardware", num_devices=count) for count in _halves(job.hardware.num_devices)]
    if needed_bytes:
        memory = ceil_div(needed_bytes, MIB)
        yield [(f"hardware.memory={memory}MiB", _changed(spec, "hardware", memory=memory * MIB)[1])]


def _with_passes(spec: JobSpec, size: int) -> tuple[str, JobSpec]:
    """With passes of so many of the longest sequences."""
    words, smaller = _changed(spec, "workload", micro_batch_size_per_gpu=size)
    if spec.training.max_tokens_per_micro_batch == "auto":
        return words, smaller
    tokens, both = _changed(smaller, "training", max_tokens_per_micro_batch=size * spec.workload.max_seq_len)
    return f"{words} {tokens}", both


def _on_gpus(spec: JobSpec) -> Iterator[Kind]:
    training, rollout, workload = spec.training, spec.rollout, spec.workload
    if workload.micro_batch_size_per_gpu != "auto":
        sizes = _halves(int(workload.micro_batch_size_per_gpu))
        yield [_changed(spec, "workload", micro_batch_size_per_gpu=size) for size in sizes]
    tried: list[tuple[bool, str, dict[str, Any]]] = [
        (training.gradient_checkpointing is False, "training", {"gradient_checkpointing": True}),
        (not training.sequence_parallel and training.tp != 1, "training", {"sequence_parallel": True}),
        (training.logits in ("plain", "chunked"), "training", {"logits": "auto"}),
        (training.logits != "fused" and spec.target != "rlplan", "training", {"logits": "fused"}),
        (training.zero_stage not in ("auto", 3), "training", {"zero_stage": 3}),
        (rollout.kv_cache_memory != "auto", "rollout", {"kv_cache_memory": "auto"}),
        (rollout.tp != "auto", "rollout", {"tp": "auto"}),
        (rollout.attention_dp != "auto", "rollout", {"attention_dp": "auto"}),
        (spec.placement.sync_content == "delta", "placement", {"sync_content": "full"}),
        (spec.placement.placement != "auto", "placement", {"placement": "auto"}),
        (training.offloads_optimizer is False, "training", {"offloads_optimizer": True}),
        (training.optimizer == "adamw", "training", {"optimizer": "adamw_8bit"}),
        (
            training.offloads_parameters is False and spec.target == "rlplan",
            "training",
            {"offloads_parameters": True, "zero_stage": 3},
        ),
    ]
    yield from ([_changed(spec, part, **changes)] for holds, part, changes in tried if holds)
    if training.ulysses == 1:
        yield [_changed(spec, "training", ulysses=ulysses) for ulysses in (2, 4, 8)]
    yield from ([_changed(spec, "training", **changes) for changes in kind] for kind in _adapters(spec))
    yield [_with_gpus(spec, times) for times in MORE_GPUS]


def resets(spec: JobSpec) -> Iterator[Kind]:
    """Every choice that was made left to the search, and that with more GPUs."""
    words, freed = _freed(spec)
    if words:
        yield [(words, freed)]
        more = [_with_gpus(freed, times) for times in MORE_GPUS]
        yield [(f"{words} {change}", job) for change, job in more]


def smaller_jobs(spec: JobSpec) -> Iterator[Kind]:
    """Fewer prompts, fewer samples, shorter responses, and these with small adapters: up to three halvings of each."""
    work, declared = spec.workload, spec.algorithm.declaration
    least = max(2, declared.min_samples_per_prompt)
    for key, smallest in (("num_prompts_per_step", 1), ("num_samples_per_prompt", least)):
        sizes = [size for size in _halves(getattr(work, key)) if size >= smallest][:MOST_HALVINGS]
        fewer = [_changed(spec, "workload", **{key: size}) for size in sizes]
        yield [(words, job) for words, job in fewer if _divides(job)]
    least = max(spec.algorithm.overlong_buffer, work.mean_response_len or 1)
    sizes = [size for size in _halves(work.max_response_len) if size >= least][:MOST_HALVINGS]
    shorter = [_changed(spec, "workload", max_response_len=size) for size in sizes]
    yield shorter
    for change in [changes[-1] for changes in _adapters(spec)][-1:]:  # both together: the smallest card's way
        words, adapted = _changed(spec, "training", **change)
        yield [(f"{words} {cut}", adapted.model_copy(update={"workload": job.workload})) for cut, job in shorter]


def _divides(job: JobSpec) -> bool:
    """Whether a step is still whole mini-batches."""
    work = job.workload
    return work.num_rollouts_per_step % work.rollouts_per_mini_batch == 0 and work.num_mini_batches > 0


def _with_gpus(spec: JobSpec, times: int) -> tuple[str, JobSpec]:
    """So many times the GPUs, of each group, and how that is typed."""
    hardware, second = spec.hardware, spec.hardware.generation
    changes: dict[str, Any] = {"num_devices": times * hardware.num_devices}
    text = f"hardware.num_devices={changes['num_devices']}"
    if hardware.num_hosts != "auto":
        changes["num_hosts"] = times * hardware.num_hosts
        text += f" hardware.num_hosts={changes['num_hosts']}"
    if second is not None:
        changes["generation"] = second.model_copy(update={"num_devices": times * second.num_devices})
        text += f" hardware.generation.num_devices={changes['generation'].num_devices}"
    return text, spec.model_copy(update={"hardware": hardware.model_copy(update=changes)})


def _adapters(spec: JobSpec) -> Iterator[list[dict[str, Any]]]:
    """Adapters in place of the whole policy, and their base in 4 bits (QLoRA), which only rlplan's own runtime has."""
    training = spec.training
    sizes = [training.lora] if training.lora else [LoraSpec(rank=rank) for rank in (ADAPTER_RANK, SMALL_ADAPTER_RANK)]
    if training.lora is None:
        yield [{"lora": lora} for lora in sizes]
    if sizes[0].base_dtype != "nf4" and spec.target == "rlplan":
        beside = {"zero_stage": "auto"} if training.zero_stage == 3 else {}  # packed weights are not partitioned
        yield [{"lora": lora.model_copy(update={"base_dtype": "nf4"}), **beside} for lora in sizes]


def _freed(spec: JobSpec) -> tuple[str, JobSpec]:
    """Every choice that was made left to the search, and how that is typed; no words where there is none."""
    keys = (
        ("training", ("zero_stage", "gradient_checkpointing", "offloads_optimizer", "offloads_parameters")),
        ("workload", ("micro_batch_size_per_gpu",)),
        ("rollout", ("tp", "attention_dp", "kv_cache_memory")),
        ("placement", ("placement", "offload")),
    )
    words = []
    for part, names in keys:
        made = [name for name in names if getattr(getattr(spec, part), name) not in ("auto", False, "none")]
        if made:
            text, spec = _changed(spec, part, **dict.fromkeys(made, "auto"))
            words.append(text)
    return " ".join(words), spec


def _changed(spec: JobSpec, part: str, **changes: Any) -> tuple[str, JobSpec]:
    """A change as it is typed, and the job with it."""
    other = spec.model_copy(update={part: getattr(spec, part).model_copy(update=changes)})
    return " ".join(f"{part}.{key}={_typed(value)}" for key, value in changes.items()), other


def _typed(value: Any) -> str:
    if not isinstance(value, LoraSpec):
        return str(value).lower()
    given = value.model_dump(mode="json", exclude_defaults=True)
    return shlex.quote("{" + ", ".join(f"{key}: {_in_yaml(part)}" for key, part in given.items()) + "}")


def _in_yaml(value: Any) -> str:
    return f"[{', '.join(value)}]" if isinstance(value, list) else str(value)


def better(spec: JobSpec, verdict: Verdict) -> Plan | None:
    """The plan of a job with a better verdict than that; None where it has none, cannot be built, or is refused."""
    try:
        found = search_of(spec).better_than(verdict)
    except RlplanError:
        return None
    return None if found is None or found.refusals else found


def _halves(value: int) -> Iterator[int]:
    while value > 1:
        value //= 2
        yield value
