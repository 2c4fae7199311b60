"""Comparison of plans, simulations and runs, or of one job planned on several clusters: time, cost and energy.

In: results, or a job and cluster descriptions; prices. Out: a CompareResult. Left out: rendering it.
"""

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlplan.errors import RlplanError
from rlplan.planner.answers.changes import Listener, describe_bottleneck
from rlplan.planner.answers.clusters import (
    Bill,
    compute_bill,
    explain_empty_selection,
    format_hardware,
    mark_pareto_front,
    read_clusters,
)
from rlplan.planner.machine import open_search
from rlplan.planner.memo import Memo
from rlplan.results import PlannedResult, PlanResult, Result
from rlplan.spec.hardware.prices import Prices, read_prices
from rlplan.spec.job import JobSpec

COMPARE_SCHEMA_VERSION = 2
RANGED = (("run", "_s"), ("dollars_per_run", ""), ("kwh_per_run", ""))
"""Quantities with a range: name and unit."""
PriceSource = Mapping[str, float] | str | Path
"""Dollars per GPU-hour by GPU, or a file with them."""
PriceSources = PriceSource | Sequence[PriceSource]


@dataclass(frozen=True)
class Clusters:
    """The clusters to compare, with prices."""

    typed: tuple[str, ...]
    """Descriptions of clusters with their number of GPUs; empty if each job has its own hardware."""
    left_out: Mapping[str, str]
    """Clusters that exceed the budget, with the reason."""
    prices: Prices
    """Known prices of GPUs."""
    is_asked: bool
    """Whether clusters or a budget were named."""

    @staticmethod
    def parse(hardware: str | Sequence[str], prices: PriceSources, budget: float | None) -> "Clusters":
        """Parse clusters, prices and a budget. Raises: SpecError where one is invalid, or the budget rents no
        cluster.
        """
        words = [hardware] if isinstance(hardware, str) else list(hardware)
        sources = [prices] if isinstance(prices, str | Path | Mapping) else prices
        typed_prices = [
            f"{gpu}={usd}" for source in sources if isinstance(source, Mapping) for gpu, usd in source.items()
        ]
        files = [Path(source) for source in sources if not isinstance(source, Mapping)]
        known = read_prices(typed_prices, files, today=dt.datetime.now(dt.UTC).date())
        is_asked = bool(words) or budget is not None
        typed, left_out = read_clusters(words, known, budget) if is_asked else ((), {})
        if is_asked and not typed:
            raise explain_empty_selection(words, left_out)
        return Clusters(typed, left_out, known, is_asked)


@dataclass(frozen=True)
class NotBuilt:
    """A cluster on which the job cannot be planned."""

    cluster: str
    """Description of the cluster."""
    error: RlplanError
    """Reason."""


@dataclass(frozen=True, repr=False)
class CompareResult(Result):
    """Plans, simulations and runs side by side, one per row."""

    results: tuple[PlannedResult, ...]
    """Compared results, in the order of the arguments."""
    clusters: Clusters
    """Clusters of the comparison, and prices."""
    not_built: tuple[NotBuilt, ...] = ()
    """Clusters for which the job is invalid."""
    bills: tuple[Bill, ...] = field(init=False)
    """Costs of each result."""

    def __post_init__(self) -> None:
        bills = tuple(compute_bill(result.plan, self.clusters.prices, result.step_s) for result in self.results)
        object.__setattr__(self, "bills", bills)

    @property
    def front(self) -> tuple[bool, ...]:
        """Whether each result is on the Pareto front of time and cost: a plan that fits, with both figures known."""
        # reciprocals, because the front minimizes both numbers
        points = [
            (1 / result.plan.tokens_per_s, 1 / bill.tokens_per_dollar)
            if isinstance(result, PlanResult) and result.fits and result.plan.tokens_per_s and bill.tokens_per_dollar
            else None
            for result, bill in zip(self.results, self.bills, strict=True)
        ]
        return mark_pareto_front(points)

    def rows(self) -> list[dict[str, Any]]:
        """Rows with: name, kind (planned, simulated, measured), devices, verdict, step_s, tokens_per_s, peak_bytes and
        capacity_bytes, step_interval_s and peak_interval_bytes, the fields of a Bill (answers/clusters.py), hardware,
        is_on_front, why (the reason why it does not fit), overrides.

        run_interval_s, dollars_per_run_interval and kwh_per_run_interval follow the range of the step. Rows with the
        same time_group or cost_group cannot be told apart: their ranges overlap that of the group's best row.

        Memory and intervals are always the plan's. step_s and tokens_per_s are of the row's kind; tokens_per_s of a
        simulation only counts responses.
        """
        rows = [
            result.build_comparison_row()
            | bill.as_json()
            | {
                "hardware": format_hardware(result.plan),
                "is_on_front": is_on_front,
                "why": next(iter(result.plan.refusals), "") or describe_bottleneck(result.plan),
                "overrides": " ".join(f"{key}={value}" for key, value in result.overrides.items()),
            }
            for result, bill, is_on_front in zip(self.results, self.bills, self.front, strict=True)
        ]
        for row in rows:
            row |= {f"{name}_interval{unit}": _scale(row, name + unit) for name, unit in RANGED}
        for group, key in (("time_group", "run_s"), ("cost_group", "dollars_per_run")):
            groups = group_overlapping(
                [
                    (row[key], row[f"{key.removesuffix('_s')}_interval{'_s' * key.endswith('_s')}"])
                    if result.fits
                    else (None, None)
                    for row, result in zip(rows, self.results, strict=True)
                ]
            )
            for row, number in zip(rows, groups, strict=True):
                row[group] = number
        return rows

    def facts(self) -> dict[str, str]:
        """The fastest result that fits, and the one that trains the most tokens per dollar."""
        timed = [row for row, result in zip(self.rows(), self.results, strict=True) if result.fits and row["step_s"]]
        priced = [row for row in timed if row["tokens_per_dollar"]]
        best = min(timed, key=lambda row: row["step_s"], default=None)
        cheapest = max(priced, key=lambda row: row["tokens_per_dollar"], default=None)
        facts = {"fastest that fits": f"{best['name']} ({best['kind']}, {best['devices']})" if best else "none"}
        return facts | ({"most tokens for a dollar": f"{cheapest['name']} ({cheapest['devices']})"} if cheapest else {})

    def as_json(self) -> dict[str, Any]:
        """The rows, and clusters without one, as in `rlplan compare --json`."""
        return {
            "schema_version": COMPARE_SCHEMA_VERSION,
            "rows": self.rows(),
            "left_out": dict(self.clusters.left_out),
            "not_built": [{"cluster": failed.cluster, "why": failed.error.what} for failed in self.not_built],
        }


def _scale(row: Mapping[str, Any], key: str) -> tuple[float, float] | None:
    """The range of a quantity that grows with the seconds of a step; None if either is unknown or measured."""
    interval, step_s, value = row["step_interval_s"], row["step_s"], row[key]
    if interval is None or not step_s or value is None or row["kind"] == "measured":
        return None
    return value * interval[0] / step_s, value * interval[1] / step_s


def group_overlapping(values: Sequence[tuple[float | None, tuple[float, float] | None]]) -> list[int | None]:
    """Number groups of values whose ranges overlap the range of the group's smallest value, from 1; None: unknown.

    >>> group_overlapping([(9, (5, 14)), (4, (3, 6)), (20, (15, 25)), (None, None)])
    [1, 1, 2, None]
    """
    ranges = {place: interval or (value, value) for place, (value, interval) in enumerate(values) if value is not None}
    numbers: list[int | None] = [None] * len(values)
    end, number = -1.0, 0
    for place in sorted(ranges, key=lambda place: values[place][0] or 0.0):
        low, high = ranges[place]
        if low > end:
            number, end = number + 1, high
        numbers[place] = number
    return numbers


def plan_clusters(
    clusters: Clusters, jobs: Sequence[Callable[[str], JobSpec]], listen: Listener | None = None
) -> CompareResult:
    """The best plan of each job on each cluster. jobs: functions from a cluster to the job on it.

    A job that is invalid on a cluster (such as more ranks than GPUs) has no plan there. Raises: RlplanError if it has
    none on any cluster.
    """
    results: list[PlannedResult] = []
    not_built: list[NotBuilt] = []
    memo = Memo()
    questions = [(job, cluster) for job in jobs for cluster in clusters.typed]
    for done, (job, cluster) in enumerate(questions):
        if listen is not None:
            listen(done, len(questions), cluster)
        try:
            results.append(PlanResult(open_search(job(cluster), memo).run(with_others=False)))
        except RlplanError as error:
            not_built.append(NotBuilt(cluster, error))
    if not results:
        raise not_built[0].error
    return CompareResult(tuple(results), clusters, tuple(not_built))
