"""Remedies are changes that make a job fit, alone or together. Each one is planned before it is listed.

In: a JobSpec. Out: changes after each of which the job fits (`Plan.fits`), in order of their effect on training. On
GPUs the last ones shrink the job (batch, samples, lengths).
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from operator import attrgetter
from typing import Any

from rlplan.errors import RlplanError
from rlplan.frameworks.rules import matches
from rlplan.planner.combinations import Combinations, Effect, Kind, Trial, Values
from rlplan.planner.machine import open_search
from rlplan.planner.memo import Memo
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Remedy, Verdict, list_effects, load_remedies
from rlplan.spec.files.job_file import override_job
from rlplan.spec.job import JobSpec
from rlplan.spec.parts.training import LoraSpec
from rlplan.spec.resolved import resolve_on_cpu
from rlplan.units import GIB, MIB, ceil_div

MORE_GPUS = (2, 4, 8, 16)
ADAPTER_RANK, SMALL_ADAPTER_RANK = 64, 16
MOST_HALVINGS = 3
ENOUGH = 3
"""Remedies after which stronger effects on training are not tried."""
MOST_TRIALS = 80
"""Limit on searches for the remedies of one plan."""
ACCEPTS_RISK = {"limits.accepts_oom_risk": "true"}
"""Override with which a plan that fits in expectation only may run."""


def list_remedies(plan: Plan, memo: Memo | None = None) -> tuple[Remedy, ...]:
    """List changes that make the plan's job fit, the mildest first. memo: of the plan's search.

    If none fits in the worst case, changes follow with which it fits in expectation; they accept that risk.
    """
    memo = memo or Memo()
    asked, devices = plan.asked, plan.job.hardware.num_devices
    kinds = list_kinds(plan)
    remedies = [_build_remedy(*entry) for entry in find_remedies(asked, kinds, memo)]
    if remedies and not any(remedy.effect is Effect.MORE_HARDWARE for remedy in remedies):
        hardware = [kind for kind in kinds if kind.effect is Effect.MORE_HARDWARE]
        remedies += [_build_remedy(*entry) for entry in find_remedies(asked, hardware, memo)]
    if not remedies and asked.is_on_gpus and not asked.limits.accepts_oom_risk:
        accepting = find_remedies(asked, kinds, memo, beside=ACCEPTS_RISK)
        remedies = [_build_remedy(*entry) for entry in accepting]
    return tuple(sorted(remedies, key=lambda remedy: remedy.order(devices)))


def find_remedies(
    asked: JobSpec,
    kinds: Iterable[Kind],
    memo: Memo,
    *,
    most_trials: int = MOST_TRIALS,
    beside: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, Plan]]:
    """Find changes with which a job fits, and their plans. beside: overrides that each change needs."""
    together = dict(beside or {})

    def plan_values(values: Values) -> Trial[Plan | None] | None:
        try:
            job = override_job(asked, shlex.split(format_change(values | together)))
            worse = Verdict.DOES_NOT_FIT if job.limits.accepts_oom_risk else Verdict.IN_EXPECTATION
            plan = open_search(job, memo).find_better_plan(worse)
        except RlplanError:
            return None
        return Trial(plan, plan is not None and plan.fits)

    for values, plan in Combinations(tuple(kinds), plan_values, ENOUGH, most_trials):
        assert plan is not None, "what fits has a plan"
        yield format_change(values | together), plan


def _build_remedy(change: str, plan: Plan) -> Remedy:
    price, count = plan.asked.hardware.price_per_gpu_hour, plan.num_devices
    dollars = None if price is None else price * count * plan.seconds / 3600
    return Remedy(change, plan.binding.num_bytes, plan.verdict, plan.seconds, count, dollars)


def list_kinds(plan: Plan) -> list[Kind]:
    """List changes to try by kind for a plan that does not fit."""
    spec, hosts = plan.asked, plan.ledger.hosts
    if not spec.is_on_gpus:
        # a CPU host runs tiny jobs, whose sizes are deliberate
        return _build_kinds(_list_host_changes(spec, plan.binding.num_bytes))
    room = [(plan.ledger.host_peak(host).num_bytes, plan.ledger.get_host_capacity(host)) for host in hosts]
    short = max((size for size, capacity in room if capacity and size > capacity), default=0)
    larger_host = [[{"hardware.host_memory": f"{ceil_div(short, GIB)}GiB"}]] if short else []
    changes = _list_gpu_changes(spec, is_host_short=short > 0)
    return _build_kinds(chain(changes, larger_host, _list_smaller_jobs(spec), _list_more_gpus(spec)))


def _build_kinds(ladders: Iterable[Iterable[Values]]) -> list[Kind]:
    strongest = ((steps, list_effects(format_change(steps[-1]))) for ladder in ladders if (steps := tuple(ladder)))
    return [Kind(steps, max((effect for effect, _ in effects), default=Effect.NONE)) for steps, effects in strongest]


def _list_host_changes(spec: JobSpec, needed_bytes: int) -> Iterator[Iterable[Values]]:
    job = resolve_on_cpu(spec)
    if job.checkpoints.every and job.checkpoints.writes != "waiting":
        yield [{"checkpoints.writes": "waiting"}]
    yield ({"rollout.kv_cache_memory": f"{size}MiB"} for size in _list_halves(job.rollout.kv_cache_memory // MIB))
    yield (_change_passes(spec, size) for size in _list_halves(job.workload.micro_batch_size_per_gpu))
    yield ({"hardware.num_devices": count} for count in _list_halves(job.hardware.num_devices))
    if needed_bytes:
        yield [{"hardware.memory": f"{ceil_div(needed_bytes, MIB)}MiB"}]


def _change_passes(spec: JobSpec, size: int) -> Values:
    """Micro-batches of `size` longest sequences."""
    values: Values = {"workload.micro_batch_size_per_gpu": size}
    if spec.training.max_tokens_per_micro_batch == "auto":
        return values
    return values | {"training.max_tokens_per_micro_batch": size * spec.workload.max_seq_len}


def _list_gpu_changes(spec: JobSpec, *, is_host_short: bool) -> Iterator[Iterable[Values]]:
    if spec.workload.micro_batch_size_per_gpu != "auto":
        sizes = _list_halves(int(spec.workload.micro_batch_size_per_gpu))
        yield ({"workload.micro_batch_size_per_gpu": size} for size in sizes)
    facts = {"backend": spec.backend, "has_rollouts": spec.has_rollouts, "host": is_host_short}
    for change in load_remedies()["changes"]:
        conditions = change["when"].items()
        if all(matches(facts[key] if key in facts else attrgetter(key)(spec), wanted) for key, wanted in conditions):
            yield change["set"] if isinstance(change["set"], list) else [change["set"]]
    if spec.training.backend == "auto" and spec.framework != "auto":
        yield [{"training.backend": backend} for backend in spec.release.backends if backend != spec.backend]
    yield from _list_adapters(spec)


def _list_smaller_jobs(spec: JobSpec) -> Iterator[Iterable[Values]]:
    """List smaller jobs: fewer prompts, fewer samples, shorter responses, each halved up to MOST_HALVINGS times."""
    work, declared = spec.workload, spec.algorithm.declaration
    # a group of one has no advantage to learn from
    samples = max(2, declared.min_samples_per_prompt)
    length = max(spec.algorithm.overlong_buffer, work.mean_response_len or 1)
    for key, least in (("num_prompts_per_step", 1), ("num_samples_per_prompt", samples), ("max_response_len", length)):
        sizes = [size for size in _list_halves(getattr(work, key)) if size >= least][:MOST_HALVINGS]
        yield [{f"workload.{key}": size} for size in sizes]


def _list_more_gpus(spec: JobSpec) -> Iterator[Iterable[Values]]:
    """List multiples of the GPUs of each group."""
    hardware, second = spec.hardware, spec.hardware.generation
    counts = {"num_devices": hardware.num_devices}
    if hardware.num_hosts != "auto":
        counts["num_hosts"] = hardware.num_hosts
    if second is not None:
        counts["generation.num_devices"] = second.num_devices
    yield [{f"hardware.{key}": times * count for key, count in counts.items()} for times in MORE_GPUS]


def _list_adapters(spec: JobSpec) -> Iterator[Iterable[Values]]:
    """List LoRA settings instead of full training, and 4-bit base weights (QLoRA), which some frameworks refuse."""
    training = spec.training
    sizes = [training.lora] if training.lora else [LoraSpec(rank=rank) for rank in (ADAPTER_RANK, SMALL_ADAPTER_RANK)]
    if training.lora is None:
        yield [{"training.lora": lora} for lora in sizes]
    if sizes[0].base_dtype != "nf4":
        # packed weights are not partitioned
        beside = {"training.zero_stage": "auto"} if training.zero_stage == 3 else {}
        yield [{"training.lora": lora.model_copy(update={"base_dtype": "nf4"}), **beside} for lora in sizes]


def format_change(values: Mapping[str, Any]) -> str:
    """Format a change as command-line overrides."""
    return " ".join(f"{key}={_format_value(value)}" for key, value in values.items())


def _format_value(value: Any) -> str:
    if not isinstance(value, LoraSpec):
        return str(value).lower() if isinstance(value, bool) else str(value)
    stated = value.model_dump(mode="json", exclude_defaults=True)
    return shlex.quote("{" + ", ".join(f"{key}: {_format_yaml(part)}" for key, part in stated.items()) + "}")


def _format_yaml(value: Any) -> str:
    return f"[{', '.join(value)}]" if isinstance(value, list) else str(value)


def _list_halves(value: int) -> Iterator[int]:
    while value > 1:
        value //= 2
        yield value
