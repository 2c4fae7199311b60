"""Sensitivity: what the step would take, and which layout would be best, if an uncertain constant were another.

In: a Plan, its search, and the layouts that stand against each other. Out: a Sensitivity for each constant that is not
measured. Left out: constants of memory, whose intervals the ledger carries; layouts that were not named.

Which layouts fit does not depend on these constants, so that it is enough to compute the seconds of each again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rlplan.dataflow.choice import Choice
from rlplan.planner.answers.plan_results import differences
from rlplan.planner.machine import Search
from rlplan.planner.margins import SAME_SPEED
from rlplan.planner.plan import Plan
from rlplan.records import dataclass
from rlplan.spec.base import Spec
from rlplan.spec.hardware.profile import Profile, Sourced, SourcedShare
from rlplan.vocabulary import Provenance

FACTORS = (0.7, 1.3)
"""Most rates that were fitted to published points lie within these of the points that were left out of the fit."""
UNCERTAIN = (Provenance.DERIVED, Provenance.ASSUMED)
BLOCKS = ("efficiencies", "serving", "rates", "latencies")
"""Parts of a profile in which constants of time stand: the first two of GPUs, the others of a CPU host."""


@dataclass(frozen=True)
class Constant:
    """One value of a profile."""

    profile: Profile
    block: str
    key: str
    value: float
    provenance: Provenance

    @property
    def name(self) -> str:
        """Where it stands: `h100-sxm: efficiencies.matmul`."""
        return f"{self.profile.name}: {self.block}.{self.key}"

    def times(self, factor: float) -> Profile:
        """The profile with another value in its place; a share of a peak stays at most 1."""
        block: Spec = getattr(self.profile, self.block)
        one = getattr(block, self.key)
        value = self.value * factor
        new = min(1.0, value) if isinstance(one, SourcedShare) else type(one.value)(value)
        block = block.model_copy(update={self.key: one.model_copy(update={"value": new})})
        return self.profile.model_copy(update={self.block: block})


@dataclass(frozen=True)
class Sensitivity:
    """How the plan depends on one constant of a profile."""

    constant: str
    value: float
    provenance: str
    seconds: tuple[float, float]
    """Of a step of the chosen layout, with each factor."""
    better: tuple[str, str]
    """With each factor the overrides of the layout that would be best; empty where none is faster by SAME_SPEED."""
    gain: tuple[float, float]
    """With each factor by what share of the chosen layout's step the fastest is faster."""

    @property
    def span(self) -> float:
        """How far apart the two are."""
        return abs(self.seconds[1] - self.seconds[0])

    def as_json(self) -> dict[str, Any]:
        """Everything."""
        return asdict(self) | {"factors": FACTORS}


Layout = tuple[Choice, int]
"""A candidate and the bytes of its KV cache."""


def list_sensitivities(plan: Plan, search: Search, others: Sequence[Layout]) -> tuple[Sensitivity, ...]:
    """Of every uncertain constant, the one that moves the step most first. others: layouts that fit too."""
    chosen = plan.choice, plan.kv.kv_cache_memory_bytes if plan.kv else 0
    layouts = list(dict.fromkeys((chosen, *(layout for layout in others if layout[0] != chosen[0]))))
    rows = []
    for one in constants(search.profiles):
        searches = [search.with_profile(one.times(factor)) for factor in FACTORS]
        found = [[other.step_s(*layout) for layout in layouts] for other in searches]
        best = [min(range(len(seconds)), key=seconds.__getitem__) for seconds in found]
        gain = [1 - seconds[index] / seconds[0] for seconds, index in zip(found, best, strict=True)]
        better = [
            differences(layouts[index][0], chosen[0], plan.job) if share > SAME_SPEED else ""
            for index, share in zip(best, gain, strict=True)
        ]
        low, high = found
        seconds, better_two = (low[0], high[0]), (better[0], better[1])
        rows.append(Sensitivity(one.name, one.value, one.provenance.value, seconds, better_two, (gain[0], gain[1])))
    return tuple(sorted(rows, key=lambda row: -row.span))


def constants(profiles: Sequence[Profile]) -> Iterator[Constant]:
    """Every constant of time that was not measured on such a machine."""
    for profile in profiles:
        for block_name in BLOCKS:
            block = getattr(profile, block_name, None)
            for key in type(block).model_fields if block is not None else ():
                one = getattr(block, key)
                if isinstance(one, Sourced) and one.provenance in UNCERTAIN and (value := getattr(one, "value", 0)):
                    yield Constant(profile, block_name, key, float(value), one.provenance)
