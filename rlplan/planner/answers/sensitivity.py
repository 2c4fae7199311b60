"""Sensitivity: what the step would take, and which layout would be best, if an uncertain constant were another.

In: a GpuPlan, and the layouts that stand against each other. Out: a Sensitivity for each constant that is not measured.
Left out: constants of memory, whose intervals the ledger carries; layouts that nobody named.

Which layouts fit does not depend on these constants, so that it is enough to work out the seconds of each anew.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from rlplan.dataflow.choice import Choice
from rlplan.planner.answers.plan_results import differences
from rlplan.planner.gpu.search import GpuSearch
from rlplan.planner.gpu_plan import GpuPlan
from rlplan.planner.setting import GpuSetting
from rlplan.spec.base import Spec
from rlplan.spec.hardware import GpuProfile, NodeProfile, SourcedShare
from rlplan.vocabulary import Provenance

FACTORS = (0.7, 1.3)
"""Most rates that were fitted to published points lie within these of the points that were left out of the fit."""
UNCERTAIN = (Provenance.DERIVED, Provenance.ASSUMED)
BLOCKS = ("efficiencies", "serving")
SAME_SECONDS = 1e-6
"""Relative difference below which two layouts are equally fast, and the chosen one stays."""


Profile = TypeVar("Profile", GpuProfile, NodeProfile)


@dataclass(frozen=True)
class Constant:
    """One value of a profile."""

    profile: str
    block: str
    key: str
    value: float
    provenance: Provenance

    @property
    def name(self) -> str:
        """Where it stands: `h100-sxm: efficiencies.matmul`."""
        return f"{self.profile}: {self.block}.{self.key}"


@dataclass(frozen=True)
class Sensitivity:
    """One constant. seconds: of a step of the chosen layout with each factor. better: what would then be best instead,
    as it is typed, empty where the chosen layout stays; gain: by how much of the chosen one's step.
    """

    constant: str
    value: float
    provenance: str
    seconds: tuple[float, float]
    better: tuple[str, str]
    gain: tuple[float, float]

    @property
    def span(self) -> float:
        """How far apart the two are."""
        return abs(self.seconds[1] - self.seconds[0])

    def as_json(self) -> dict[str, Any]:
        """Everything."""
        return asdict(self) | {"factors": FACTORS}


Layout = tuple[Choice, int]
"""A candidate and the bytes of its KV cache."""


def list_sensitivities(budget: GpuPlan, others: Sequence[Layout]) -> tuple[Sensitivity, ...]:
    """Of every uncertain constant, the one that moves the step most first. others: layouts that fit too."""
    chosen = budget.choice, budget.kv.kv_cache_memory_bytes if budget.kv else 0
    layouts = [chosen, *(layout for layout in others if layout[0] != chosen[0])]
    rows = []
    for one in constants(budget.setting):
        settings = (with_constant(budget.setting, one, one.value * factor) for factor in FACTORS)
        found = [_seconds(budget, setting, layouts) for setting in settings]
        best = [min(range(len(seconds)), key=seconds.__getitem__) for seconds in found]
        gain = [1 - seconds[index] / seconds[0] for seconds, index in zip(found, best, strict=True)]
        better = [
            differences(layouts[index][0], chosen[0], budget.job) if share > SAME_SECONDS else ""
            for index, share in zip(best, gain, strict=True)
        ]
        low, high = found
        seconds, better_two = (low[0], high[0]), (better[0], better[1])
        rows.append(Sensitivity(one.name, one.value, one.provenance.value, seconds, better_two, (gain[0], gain[1])))
    return tuple(sorted(rows, key=lambda row: -row.span))


def constants(setting: GpuSetting) -> Iterator[Constant]:
    """Every constant of time that nobody measured on such a machine, of each kind of GPU and node."""
    gpus = {pool.gpu.name: pool.gpu for pool in setting.pools}
    nodes = {pool.node.name: pool.node for pool in setting.pools if pool.node is not None}
    for profile in (*gpus.values(), *nodes.values()):
        for block_name in BLOCKS:
            block = getattr(profile, block_name, None)
            for key in type(block).model_fields if block is not None else ():
                one = getattr(block, key)
                if one is not None and one.provenance in UNCERTAIN and one.value:
                    yield Constant(profile.name, block_name, key, float(one.value), one.provenance)


def with_constant(setting: GpuSetting, constant: Constant, value: float) -> GpuSetting:
    """The same hardware with another constant; a share of a peak stays at most 1."""

    def other(profile: Profile) -> Profile:
        if profile.name != constant.profile:
            return profile
        block: Spec = getattr(profile, constant.block)
        one = getattr(block, constant.key)
        new = min(1.0, value) if isinstance(one, SourcedShare) else type(one.value)(value)
        block = block.model_copy(update={constant.key: one.model_copy(update={"value": new})})
        return profile.model_copy(update={constant.block: block})

    pools = (
        replace(pool, gpu=other(pool.gpu), node=None if pool.node is None else other(pool.node))
        for pool in setting.pools
    )
    return replace(setting, pools=tuple(pools))


def _seconds(budget: GpuPlan, setting: GpuSetting, layouts: Sequence[Layout]) -> list[float]:
    times = GpuSearch(budget.job, setting).times
    return [times.timing(candidate, kv_cache).seconds for candidate, kv_cache in layouts]
