"""Layers of Megatron's pipeline stages: as a plan counts them, and in a stack's keys.

Megatron splits layers evenly and refuses a remainder, unless the first or the last stage has a number of its own. A
plan gives the last stage fewer layers (`split_training_stages`). An export therefore writes that number; a
file without it is an error upstream.

In: Settings, a model, stages. Out: keys to write; the stages of a file, SpecError where Megatron refuses them.
Left out: stages of virtual pipelines and `pipeline_model_parallel_layout`, which are taken as given.
"""

from typing import Any

from rlplan.errors import SpecError
from rlplan.foreign.settings import Settings
from rlplan.foreign.table import Table
from rlplan.planner.plan import Plan
from rlplan.spec.job import JobSpec
from rlplan.spec.model import ModelSpec
from rlplan.spec.models.shards import split_training_stages
from rlplan.spec.parts.training import count_ranks


def write_stages(table: Table, plan: Plan, model: ModelSpec) -> dict[str, Any]:
    """Keys that give Megatron the plan's stages: all but the last have the same number of layers."""
    pp = plan.choice.trainer.pp
    if plan.job.backend != "megatron" or not table.stages or pp == 1 or model.num_layers % pp == 0:
        return {}
    return {table.stages["last"]: len(split_training_stages(model, pp)[-1])}


def read_stages(settings: Settings, job: JobSpec, model: ModelSpec) -> str:
    """A note where a file's stages differ from the counted ones. Raises: SpecError where Megatron refuses them."""
    table, pp = settings.table, count_ranks(job.training.pp)
    if job.backend != "megatron" or not table.stages or pp == 1:
        return ""
    if any(settings.value(key) for key in table.stages.get("layout", "").split()):
        return ""
    sizes = {name: settings.value(table.stages[name]) for name in ("first", "last")}
    ends = {name: size for name, size in sizes.items() if isinstance(size, int) and not isinstance(size, bool)}
    rest, num_others = model.num_layers - sum(ends.values()), pp - len(ends)
    each = rest // num_others if num_others else 0
    if (num_others == 0 and rest) or rest < num_others or (num_others and rest % num_others):
        raise _refuse_split(settings, model, pp, ends)
    stages = [*([ends["first"]] if "first" in ends else []), *[each] * num_others]
    stages += [ends["last"]] if "last" in ends else []
    counted = [len(layers) for layers in split_training_stages(model, pp)]
    if stages == counted:
        return ""
    return (
        f"stages of {_format_stages(stages)} layers are counted as {_format_stages(counted)}: the largest has "
        f"{max(stages)} layers in the file and {max(counted)} in the plan"
    )


def _refuse_split(settings: Settings, model: ModelSpec, pp: int, ends: dict[str, int]) -> SpecError:
    table = settings.table
    last = len(split_training_stages(model, pp)[-1])
    given_ends = ", ".join(f"{table.stages[name]} = {size}" for name, size in ends.items())
    even = max(size for size in range(1, pp + 1) if model.num_layers % size == 0)
    pipeline = next(row.key for row in table.rows["training.pp"] if row.key)
    fitting = [f"--set {table.stages['last']}={last}"] if (model.num_layers - last) % (pp - 1) == 0 else []
    return SpecError(
        f"{model.num_layers} layers do not divide over {pp} pipeline stages"
        + (f" with {given_ends}" if given_ends else ""),
        where=settings.place(pipeline) or settings.file,
        rule="Megatron-Core gives all stages the same number of layers; only the first and the last may have their own",
        way_out=" or ".join([*fitting, f"--set {pipeline}={even}"]),
    )


def _format_stages(stages: list[int]) -> str:
    """Sizes of stages in words, equal neighbours as a product.

    >>> _format_stages([6, 6, 6, 4])
    '3 x 6, 4'
    """
    groups: list[list[int]] = []
    for size in stages:
        if groups and groups[-1][0] == size:
            groups[-1].append(size)
        else:
            groups.append([size])
    return ", ".join(f"{len(group)} x {group[0]}" if len(group) > 1 else f"{group[0]}" for group in groups)
