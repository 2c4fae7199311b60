"""Remedies on GPUs: what to change in a budget that does not fit, each tried before it is named.

In: a BudgetSpec and its setting. Out: changes that can be typed as they stand, the mildest of each kind.
Left out: what changes the job itself (lengths, batch). Adapters change what is trained, and the list says so.
"""

from collections.abc import Iterator
from typing import Any

from rlplan.errors import RlplanError
from rlplan.planner.budget import Budget, Remedy, Verdict, read_setting
from rlplan.planner.budget_checks import check_budget
from rlplan.planner.gpu.search import GpuSearch
from rlplan.spec.budget import BudgetSpec, LoraSpec
from rlplan.spec.profiles import parse_pools

MORE_GPUS = (2, 4, 8, 16)
ADAPTER_RANK = 64


def find_budget(spec: BudgetSpec, *, with_pareto: bool = False) -> Budget:
    """The budget of a spec; where it does not fit, with remedies, the cheapest first. Raises: SpecError."""
    setting = read_setting(spec)
    check_budget(spec, setting)
    search = GpuSearch(spec, setting)
    budget = search.run()
    if with_pareto:
        pareto = search.on(budget.setting.num_gpus).pareto()
        budget = budget.with_alternatives(budget.runners_up, pareto, budget.stats)
    if budget.verdict is Verdict.FITS:
        return budget
    remedies = sorted(list_gpu_remedies(spec, budget.verdict), key=lambda remedy: remedy.order)
    return budget.with_remedies(tuple(remedies))


def list_gpu_remedies(spec: BudgetSpec, verdict: Verdict) -> Iterator[Remedy]:
    """Changes, each of which by itself leads to a better verdict, with the verdict and the peak that it leads to."""
    for kind in kinds_of_changes(spec):
        for change, other in kind:
            found = better(other, verdict)
            if found is not None:
                seconds, count, price = found.timing.seconds, found.setting.num_gpus, spec.price_per_gpu_hour
                dollars = None if price is None else price * count * seconds / 3600
                yield Remedy(change, found.binding.num_bytes, found.verdict, seconds, count, dollars)
                break


def kinds_of_changes(spec: BudgetSpec) -> Iterator[list[tuple[str, BudgetSpec]]]:
    """What to try, cheapest first; within a kind the mildest first."""
    training, rollout, workload = spec.training, spec.rollout, spec.workload
    if workload.micro_batch_size_per_gpu != "auto":
        sizes = _halves(int(workload.micro_batch_size_per_gpu))
        yield [_changed(spec, "workload", micro_batch_size_per_gpu=size) for size in sizes]
    tried: list[tuple[bool, str, dict[str, Any]]] = [
        (training.recompute == "none", "training", {"recompute": "full"}),
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
    if training.lora is None:
        yield [_changed(spec, "training", lora=LoraSpec(rank=ADAPTER_RANK))]
    pools = parse_pools(spec.gpus, where="gpus")
    more = ["+".join(f"{count * times}x{gpu.name}" for count, gpu, _ in pools) for times in MORE_GPUS]
    yield [(f"gpus={gpus}", spec.model_copy(update={"gpus": gpus})) for gpus in more]
    words, other = _freed(spec)
    if words:
        yield [(words, other)]
        yield [(f"{words} gpus={gpus}", other.model_copy(update={"gpus": gpus})) for gpus in more]


def _freed(spec: BudgetSpec) -> tuple[str, BudgetSpec]:
    """Every choice that was made left to the search, and how that is typed; no words where there is none."""
    keys = (
        ("training", ("zero_stage", "recompute", "offloads_optimizer", "offloads_parameters")),
        ("workload", ("micro_batch_size_per_gpu",)),
        ("rollout", ("tp", "kv_cache_memory")),
        ("placement", ("placement", "parks")),
    )
    words = []
    for part, names in keys:
        made = [name for name in names if getattr(getattr(spec, part), name) not in ("auto", False)]
        if made:
            text, spec = _changed(spec, part, **dict.fromkeys(made, "auto"))
            words.append(text)
    return " ".join(words), spec


def _changed(spec: BudgetSpec, part: str, **changes: Any) -> tuple[str, BudgetSpec]:
    """A change as it is typed, and the budget with it."""
    other = spec.model_copy(update={part: getattr(spec, part).model_copy(update=changes)})
    return " ".join(f"{part}.{key}={_typed(value)}" for key, value in changes.items()), other


def _typed(value: Any) -> str:
    return f"'{{rank: {value.rank}}}'" if isinstance(value, LoraSpec) else str(value).lower()


def better(spec: BudgetSpec, verdict: Verdict) -> Budget | None:
    """The budget of a spec with a better verdict than that; None where it has none, or cannot be built."""
    try:
        setting = read_setting(spec)
        check_budget(spec, setting)
        return GpuSearch(spec, setting).better_than(verdict)
    except RlplanError:
        return None


def _halves(value: int) -> Iterator[int]:
    while value > 1:
        value //= 2
        yield value
