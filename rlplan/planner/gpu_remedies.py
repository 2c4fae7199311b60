"""Remedies on GPUs: what to change in a budget that does not fit, each tried before it is named.

In: a BudgetSpec and its setting. Out: changes that can be typed as they stand, the mildest of each kind.
Left out: what changes the job itself (lengths, batch), except the micro-batch, which changes nothing that is learned.
"""

from collections.abc import Iterator
from typing import Any

from rlplan.errors import SpecError
from rlplan.planner.budget import Budget, Remedy, Verdict, read_setting
from rlplan.planner.gpu_search import GpuSearch
from rlplan.spec.budget import BudgetSpec, LoraSpec
from rlplan.spec.profiles import parse_gpus

MORE_GPUS = (2, 4, 8, 16)
ADAPTER_RANK = 64


def find_budget(spec: BudgetSpec) -> Budget:
    """The budget of a spec; where it does not fit, with remedies. Raises: SpecError."""
    budget = GpuSearch(spec, read_setting(spec)).run()
    if budget.verdict is not Verdict.DOES_NOT_FIT:
        return budget
    return budget.with_remedies(tuple(list_gpu_remedies(spec)))


def list_gpu_remedies(spec: BudgetSpec) -> Iterator[Remedy]:
    """Changes, each of which makes the budget fit by itself, with the peak that it leads to."""
    for kind in _kinds(spec):
        for change, other in kind:
            found = _fits(other)
            if found is not None:
                yield Remedy(change, found)
                break


def _kinds(spec: BudgetSpec) -> Iterator[list[tuple[str, BudgetSpec]]]:
    """What to try, cheapest first; within a kind the mildest first."""
    training, rollout, workload = spec.training, spec.rollout, spec.workload
    if workload.micro_batch_size_per_gpu != "auto":
        sizes = _halves(int(workload.micro_batch_size_per_gpu))
        yield [_changed(spec, "workload", micro_batch_size_per_gpu=size) for size in sizes]
    tried: list[tuple[bool, str, dict[str, Any]]] = [
        (training.recompute == "none", "training", {"recompute": "full"}),
        (training.logits in ("plain", "chunked"), "training", {"logits": "in_place"}),
        (training.logits != "fused", "training", {"logits": "fused"}),
        (training.zero_stage not in ("auto", 3), "training", {"zero_stage": 3}),
        (rollout.kv_cache_memory != "auto", "rollout", {"kv_cache_memory": "auto"}),
        (rollout.tp != "auto", "rollout", {"tp": "auto"}),
        (spec.placement.placement != "auto", "placement", {"placement": "auto"}),
        (training.offloads_optimizer is False, "training", {"offloads_optimizer": True}),
        (training.optimizer == "adamw", "training", {"optimizer": "adamw_8bit"}),
        (training.offloads_parameters is False, "training", {"offloads_parameters": True, "zero_stage": 3}),
        (training.lora is None, "training", {"lora": LoraSpec(rank=ADAPTER_RANK)}),
    ]
    yield from ([_changed(spec, part, **changes)] for holds, part, changes in tried if holds)
    if training.ulysses == 1:
        yield [_changed(spec, "training", ulysses=ways) for ways in (2, 4, 8)]
    count, gpu = parse_gpus(spec.gpus, where="gpus")
    more = [f"{count * times}x{gpu.name}" for times in MORE_GPUS]
    yield [(f"gpus={gpus}", spec.model_copy(update={"gpus": gpus})) for gpus in more]
    freed = {"zero_stage": "auto", "recompute": "auto", "offloads_optimizer": "auto"}
    changed = {key: value for key, value in freed.items() if getattr(training, key) != value}
    if changed:
        words, other = _changed(spec, "training", **changed)
        yield [(f"{words} gpus={gpus}", other.model_copy(update={"gpus": gpus})) for gpus in more]


def _changed(spec: BudgetSpec, part: str, **changes: Any) -> tuple[str, BudgetSpec]:
    """A change as it is typed, and the budget with it."""
    other = spec.model_copy(update={part: getattr(spec, part).model_copy(update=changes)})
    return " ".join(f"{part}.{key}={_typed(value)}" for key, value in changes.items()), other


def _typed(value: Any) -> str:
    return f"'{{rank: {value.rank}}}'" if isinstance(value, LoraSpec) else str(value).lower()


def _fits(spec: BudgetSpec) -> int | None:
    """The peak of a spec that fits; None where it does not, or sizes do not divide."""
    try:
        budget = GpuSearch(spec, read_setting(spec)).run()
    except SpecError:
        return None
    return None if budget.verdict is Verdict.DOES_NOT_FIT else budget.binding.num_bytes


def _halves(value: int) -> Iterator[int]:
    while value > 1:
        value //= 2
        yield value
