"""Remedies on GPUs: what to change in a job that does not fit, each tried before it is named.

In: a JobSpec. Out: changes that can be typed as they stand, the mildest of each kind.
Left out: what changes the job itself (lengths, batch). Adapters change what is trained, and the list says so.
"""

import shlex
from collections.abc import Iterator
from typing import Any

from rlplan.errors import RlplanError
from rlplan.planner.gpu.search import GpuSearch
from rlplan.planner.gpu_checks import check_job
from rlplan.planner.gpu_plan import GpuPlan, Remedy, Verdict
from rlplan.planner.setting import read_setting
from rlplan.spec.job import JobSpec
from rlplan.spec.resolved import settle
from rlplan.spec.training import LoraSpec

MORE_GPUS = (2, 4, 8, 16)
ADAPTER_RANK, SMALL_ADAPTER_RANK = 64, 16


def find_gpu_plan(asked: JobSpec, *, with_pareto: bool = False) -> GpuPlan:
    """The plan of a job on GPUs; where it does not fit, with remedies, the cheapest first. Raises: SpecError."""
    search = search_of(asked)
    plan = search.run()
    if with_pareto:
        pareto = search.on(plan.setting.num_gpus).pareto()
        plan = plan.with_alternatives(plan.runners_up, pareto, plan.stats)
    if plan.verdict is Verdict.FITS:
        return plan
    remedies = sorted(list_gpu_remedies(asked, plan.verdict), key=lambda remedy: remedy.order)
    return plan.with_remedies(tuple(remedies))


def search_of(asked: JobSpec) -> GpuSearch:
    """The search of a job's choices, which has been checked. Raises: SpecError."""
    job = settle(asked)
    setting = read_setting(job)
    check_job(job, setting)
    return GpuSearch(job, setting, asked)


def list_gpu_remedies(spec: JobSpec, verdict: Verdict) -> Iterator[Remedy]:
    """Changes, each of which by itself leads to a better verdict, with the verdict and the peak that it leads to."""
    for kind in kinds_of_changes(spec):
        for change, other in kind:
            found = better(other, verdict)
            if found is not None:
                seconds, count = found.seconds, found.setting.num_gpus
                price = spec.hardware.price_per_gpu_hour
                dollars = None if price is None else price * count * seconds / 3600
                yield Remedy(change, found.binding.num_bytes, found.verdict, seconds, count, dollars)
                break


def kinds_of_changes(spec: JobSpec) -> Iterator[list[tuple[str, JobSpec]]]:
    """What to try, cheapest first; within a kind the mildest first."""
    training, rollout, workload = spec.training, spec.rollout, spec.workload
    if workload.micro_batch_size_per_gpu != "auto":
        sizes = _halves(int(workload.micro_batch_size_per_gpu))
        yield [_changed(spec, "workload", micro_batch_size_per_gpu=size) for size in sizes]
    tried: list[tuple[bool, str, dict[str, Any]]] = [
        (training.gradient_checkpointing is False, "training", {"gradient_checkpointing": True}),
        (training.logits in ("plain", "chunked"), "training", {"logits": "auto"}),
        (training.logits != "fused" and spec.target != "rlplan", "training", {"logits": "fused"}),
        (training.zero_stage not in ("auto", 3), "training", {"zero_stage": 3}),
        (rollout.kv_cache_memory != "auto", "rollout", {"kv_cache_memory": "auto"}),
        (rollout.tp != "auto", "rollout", {"tp": "auto"}),
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
        yield [_changed(spec, "training", ulysses=ways) for ways in (2, 4, 8)]
    yield from ([_changed(spec, "training", **changes) for changes in kind] for kind in _adapters(spec))
    more = [_with_gpus(spec, times) for times in MORE_GPUS]
    yield more
    words, freed = _freed(spec)
    if words:
        yield [(words, freed)]
        yield [
            (f"{words} {change}", _with_gpus(freed, times)[1])
            for times, (change, _) in zip(MORE_GPUS, more, strict=True)
        ]


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
        ("rollout", ("tp", "kv_cache_memory")),
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


def better(spec: JobSpec, verdict: Verdict) -> GpuPlan | None:
    """The plan of a job with a better verdict than that; None where it has none, or cannot be built."""
    try:
        return search_of(spec).better_than(verdict)
    except RlplanError:
        return None


def _halves(value: int) -> Iterator[int]:
    while value > 1:
        value //= 2
        yield value
