"""Plans, simulations and runs beside each other, and one job planned on several clusters: in seconds, dollars, energy.

In: results, or a job and clusters as they are typed; prices. Out: a CompareResult. Left out: drawing it.
"""

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlplan.errors import RlplanError
from rlplan.planner.answers.changes import Listener, bottleneck_of
from rlplan.planner.answers.clusters import Bill, bill_of, hardware_words, nothing_to_rent, pareto_front, read_clusters
from rlplan.planner.machine import search_of
from rlplan.planner.memo import Memo
from rlplan.results import OfPlan, PlanResult, Result
from rlplan.spec.hardware.prices import Prices, read_prices
from rlplan.spec.job import JobSpec

COMPARE_SCHEMA_VERSION = 2
PriceSource = Mapping[str, float] | str | Path
"""Dollars of a GPU-hour by GPU, or a file of them."""
PriceSources = PriceSource | Sequence[PriceSource]


@dataclass(frozen=True)
class Clusters:
    """What is asked: clusters and what they cost."""

    typed: tuple[str, ...]
    """Each with its number of GPUs; empty where each job has its own hardware."""
    left_out: Mapping[str, str]
    """Those that the budget does not buy, with the reason."""
    prices: Prices
    is_asked: bool
    """Whether clusters or a budget were named."""

    @staticmethod
    def of(hardware: str | Sequence[str], prices: PriceSources, budget: float | None) -> "Clusters":
        """From words. Raises: SpecError where a cluster, a price or the budget is wrong, or none can be had."""
        words = [hardware] if isinstance(hardware, str) else list(hardware)
        sources = [prices] if isinstance(prices, str | Path | Mapping) else prices
        typed_prices = [f"{gpu}={usd}" for one in sources if isinstance(one, Mapping) for gpu, usd in one.items()]
        files = [Path(one) for one in sources if not isinstance(one, Mapping)]
        known = read_prices(typed_prices, files, today=dt.datetime.now(dt.UTC).date())
        is_asked = bool(words) or budget is not None
        typed, left_out = read_clusters(words, known, budget) if is_asked else ((), {})
        if is_asked and not typed:
            raise nothing_to_rent(words, left_out)
        return Clusters(typed, left_out, known, is_asked)


@dataclass(frozen=True)
class NotBuilt:
    """A cluster for which there is no plan."""

    cluster: str
    """As it is typed."""
    error: RlplanError
    """Why."""


@dataclass(frozen=True, repr=False)
class CompareResult(Result):
    """Plans, simulations and runs beside each other. A row: one of them."""

    results: tuple[OfPlan, ...]
    """What is compared, in the order in which it was given."""
    clusters: Clusters
    """What was asked, and the prices."""
    not_built: tuple[NotBuilt, ...] = ()
    """Clusters for which the job contradicts itself."""
    bills: tuple[Bill, ...] = field(init=False)
    """What each of `results` costs."""

    def __post_init__(self) -> None:
        bills = tuple(bill_of(one.plan, self.clusters.prices, one.step_s) for one in self.results)
        object.__setattr__(self, "bills", bills)

    @property
    def front(self) -> tuple[bool, ...]:
        """Of each of `results` whether it is on the front of time against money: planned, it fits, and it has both."""
        points = [
            (1 / one.plan.tokens_per_s, 1 / bill.tokens_per_dollar)
            if isinstance(one, PlanResult) and one.fits and one.plan.tokens_per_s and bill.tokens_per_dollar
            else None
            for one, bill in zip(self.results, self.bills, strict=True)
        ]
        return pareto_front(points)

    def rows(self) -> list[dict[str, Any]]:
        """name, kind (planned, simulated, measured), devices, verdict, step_s, tokens_per_s, peak_bytes (always the
        plan's) and capacity_bytes, step_interval_s and peak_interval_bytes of the plan; step_s and tokens_per_s are of
        that kind, tokens_per_s of a simulation counts responses alone. Then what it costs (answers/clusters.py: Bill),
        hardware as it is typed, is_on_front, why it does not fit, overrides.
        """
        return [
            one.compared()
            | bill.as_json()
            | {
                "hardware": hardware_words(one.plan),
                "is_on_front": is_on_front,
                "why": next(iter(one.plan.refusals), "") or bottleneck_of(one.plan),
                "overrides": " ".join(f"{key}={value}" for key, value in one.overrides.items()),
            }
            for one, bill, is_on_front in zip(self.results, self.bills, self.front, strict=True)
        ]

    def facts(self) -> dict[str, str]:
        """The fastest that fits, and the one that trains the most tokens for a dollar."""
        timed = [row for row, one in zip(self.rows(), self.results, strict=True) if one.fits and row["step_s"]]
        priced = [row for row in timed if row["tokens_per_dollar"]]
        best = min(timed, key=lambda row: row["step_s"], default=None)
        cheapest = max(priced, key=lambda row: row["tokens_per_dollar"], default=None)
        said = {"fastest that fits": f"{best['name']} ({best['kind']}, {best['devices']})" if best else "none"}
        return said | ({"most tokens for a dollar": f"{cheapest['name']} ({cheapest['devices']})"} if cheapest else {})

    def as_json(self) -> dict[str, Any]:
        """The rows, and what has none, with a version: as `rlplan compare --json`."""
        return {
            "schema_version": COMPARE_SCHEMA_VERSION,
            "rows": self.rows(),
            "left_out": dict(self.clusters.left_out),
            "not_built": [{"cluster": one.cluster, "why": one.error.what} for one in self.not_built],
        }


def plan_on(
    clusters: Clusters, jobs: Sequence[Callable[[str], JobSpec]], listen: Listener | None = None
) -> CompareResult:
    """The best plan of each job on each cluster. jobs: from a cluster to the job on it.

    A job that contradicts itself on a cluster (more ranks than GPUs) has no plan there. Raises: RlplanError where it
    has none on any.
    """
    found: list[OfPlan] = []
    not_built: list[NotBuilt] = []
    memo = Memo()
    questions = [(job, cluster) for job in jobs for cluster in clusters.typed]
    for done, (job, cluster) in enumerate(questions):
        if listen is not None:
            listen(done, len(questions), cluster)
        try:
            found.append(PlanResult(search_of(job(cluster), memo).run(with_others=False)))
        except RlplanError as error:
            not_built.append(NotBuilt(cluster, error))
    if not found:
        raise not_built[0].error
    return CompareResult(tuple(found), clusters, tuple(not_built))
