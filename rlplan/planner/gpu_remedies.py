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
    if training.recompute == "none":
        yield [_changed(spec, "training", recompute="full")]
    if workload.micro_batch_size_per_gpu != "auto" and int(workload.micro_batch_size_per_gpu) > 1:
        sizes = _halves(int(workload.micro_batch_size_per_gpu))
        yield [_changed(spec, "workload", micro_batch_size_per_gpu=size) for size in sizes]
    if training.logits in ("plain", "chunked"):
        yield [_changed(spec, "training", logits="in_place"), _changed(spec, "training", logits="fused")]
    elif training.logits == "in_place":
        yield [_changed(spec, "training", logits="fused")]
    if training.zero_stage not in ("auto", 3):
        yield [_changed(spec, "training", zero_stage=3)]
    if rollout.kv_cache_memory != "auto":
        yield [_changed(spec, "rollout", kv_cache_memory="auto")]
    if rollout.tp != "auto":
        yield [_changed(spec, "rollout", tp="auto")]
    if spec.placement.placement != "auto":
        yield [_changed(spec, "placement", placement="auto")]
    if training.offloads_optimizer is False:
        yield [_changed(spec, "training", offloads_optimizer=True)]
    if training.optimizer == "adamw":
        yield [_changed(spec, "training", optimizer="adamw_8bit")]
    if training.offloads_parameters is False:
        yield [_changed(spec, "training", offloads_parameters=True, zero_stage=3)]
    if training.ulysses == 1:
        yield [_changed(spec, "training", ulysses=ways) for ways in (2, 4, 8)]
    if training.lora is None:
        lora = LoraSpec(rank=ADAPTER_RANK)
        yield [(f"training.lora={{rank: {ADAPTER_RANK}}}", _with(spec, "training", lora=lora))]
    count, gpu = parse_gpus(spec.gpus, where="gpus")
    yield [
        (f"gpus={count * times}x{gpu.name}", spec.model_copy(update={"gpus": f"{count * times}x{gpu.name}"}))
        for times in MORE_GPUS
    ]


def _changed(spec: BudgetSpec, part: str, **changes: Any) -> tuple[str, BudgetSpec]:
    words = " ".join(f"{part}.{key}={str(value).lower()}" for key, value in changes.items())
    return words, _with(spec, part, **changes)


def _with(spec: BudgetSpec, part: str, **changes: Any) -> BudgetSpec:
    return spec.model_copy(update={part: getattr(spec, part).model_copy(update=changes)})


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
