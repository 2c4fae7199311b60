"""Sensitivity: what the step would take, and which layout would be best, if an uncertain constant were another.

In: a Budget, and the layouts that stand against each other. Out: a Sensitivity for each constant that is not measured.
Left out: constants of memory, whose intervals the ledger carries; layouts that nobody named.

Which layouts fit does not depend on these constants, so that it is enough to work out the seconds of each anew.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlplan.planner.budget import Budget, GpuSetting
from rlplan.planner.gpu_candidates import GpuCandidate
from rlplan.planner.gpu_search import GpuSearch
from rlplan.planner.plan_results import differences
from rlplan.spec.base import Spec
from rlplan.vocabulary import Provenance

FACTORS = (0.7, 1.3)
"""Most rates that were fitted to published points lie within these of the points that were left out of the fit."""
UNCERTAIN = (Provenance.DERIVED, Provenance.ASSUMED)
BLOCKS = ("efficiencies", "serving")
SAME_SECONDS = 1e-6
"""Relative difference below which two layouts are equally fast, and the chosen one stays."""


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


Layout = tuple[GpuCandidate, int]
"""A candidate and the bytes of its KV cache."""


def list_sensitivities(budget: Budget, others: Sequence[Layout]) -> tuple[Sensitivity, ...]:
    """Of every uncertain constant, the one that moves the step most first. others: layouts that fit too."""
    chosen = budget.candidate, budget.kv.kv_cache_memory_bytes if budget.kv else 0
    layouts = [chosen, *(layout for layout in others if layout[0] != chosen[0])]
    rows = []
    for name, value, provenance in constants(budget.setting):
        found = [_seconds(budget, with_constant(budget.setting, name, value * factor), layouts) for factor in FACTORS]
        best = [min(range(len(one)), key=one.__getitem__) for one in found]
        gain = [1 - one[index] / one[0] for one, index in zip(found, best, strict=True)]
        better = [
            differences(layouts[index][0], chosen[0]) if share > SAME_SECONDS else ""
            for index, share in zip(best, gain, strict=True)
        ]
        low, high = found
        rows.append(Sensitivity(name, value, provenance, (low[0], high[0]), (better[0], better[1]), (gain[0], gain[1])))
    return tuple(sorted(rows, key=lambda row: -row.span))


def constants(setting: GpuSetting) -> Iterator[tuple[str, float, str]]:
    """(name, value, provenance) of every constant of time that nobody measured on such a machine."""
    for block_name in BLOCKS:
        block = getattr(setting.gpu, block_name)
        for name in type(block).model_fields if block is not None else ():
            one = getattr(block, name)
            if one is not None and one.provenance in UNCERTAIN and one.value:
                yield f"{block_name}.{name}", float(one.value), one.provenance.value


def with_constant(setting: GpuSetting, name: str, value: float) -> GpuSetting:
    """The same hardware with another constant; a share of a peak stays at most 1."""
    block_name, key = name.split(".")
    block: Spec = getattr(setting.gpu, block_name)
    one = getattr(block, key)
    is_share = type(one).__name__ == "SourcedShare"
    other = one.model_copy(update={"value": min(1.0, value) if is_share else value})
    gpu = setting.gpu.model_copy(update={block_name: block.model_copy(update={key: other})})
    return setting.with_gpu(gpu)


def _seconds(budget: Budget, setting: GpuSetting, layouts: Sequence[Layout]) -> list[float]:
    times = GpuSearch(budget.spec, setting).times
    return [times.timing(candidate, kv_cache).seconds for candidate, kv_cache in layouts]
