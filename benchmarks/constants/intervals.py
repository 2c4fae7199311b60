"""Prediction intervals: the factor around a prediction that contains measurements of a new source.

Every source is judged by intervals that are made from all other sources.

In: points, their comparison, and predictions with constants refitted without the point's source, where a constant was
fitted to it. Out: a MeasuredError for each stratum, stored in rlplan/planner/measured_errors.json for plans.
Left out: the use in a plan.

A residual is the logarithm of measured over predicted. Only the formulas of serving and two of trainers have a constant
that was fitted to these points; all other residuals are held out as they are. The bias of other sources is not
corrected, because that makes the error of a held-out source larger (RL steps: 35 % inside instead of 88 %).
"""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

from rlplan.accuracy.compare import Comparison
from rlplan.accuracy.points import MeasuredPoint
from rlplan.planner.measured_errors import (
    FILE,
    LEAST_POINTS,
    NOMINAL,
    UNKNOWN_FACTOR,
    MeasuredError,
    Stratum,
    forget_errors,
)

QUANTILE = 0.95
"""Share of the weighted residuals within the factor: more than NOMINAL, because a new source is not among them.

One value serves all strata. Chosen without a kind, it leaves 85 to 96 % inside in all strata of that kind but one.
"""
BORROWED = 0.5
"""Weight, in sources, of all points of other strata of the kind together.

It keeps a stratum of two sources from judging each by the other alone.
"""
LEAST_SOURCES = 2
"""Fewest sources of a stratum with its own interval: a single source could only be judged by itself."""
LEAST_OTHERS = 10
"""Fewest points of a kind without its largest source: with fewer, that source would be judged by itself."""
RELATED = (r"weight_sync_time|phase_(refit|sync)", r"rl_step_time|phase_(generate|score|train|switch)")
"""Kinds that share causes: a kind with few points borrows from its row. First: what prepares the engines."""
BORROWED_QUANTILES = (QUANTILE, 0.97, 0.98, 0.99, 1.0)
"""Quantiles for a kind that borrows, from the usual one to the largest residual."""
LEAST_BORROWERS = 3
"""Fewest sources of a kind that borrows for a factor below UNKNOWN_FACTOR: constants were fitted to one of two."""
LARGEST_SHARE = 0.9
"""Largest share of one source in a kind that borrows for a factor below UNKNOWN_FACTOR: the others hardly judge it."""
TABLES = ("AgileRL/AgileRL", "ai-dynamo/aiconfigurator")
"""Repositories with tables of many models on many GPUs; each model on a GPU is a source."""
GUESSED = "C"
"""The reliability of points that are left out of intervals."""


@dataclass(frozen=True)
class Residual:
    """The error of one point."""

    kind: str
    stratum: Stratum
    source: str
    log_ratio: float
    """The logarithm of measured over predicted; for a throughput, of the corresponding seconds."""


def list_residuals(
    points: Sequence[MeasuredPoint], comparisons: Sequence[Comparison], left_out: Mapping[str, float]
) -> tuple[Residual, ...]:
    """The residual of every point with a number. left_out: predictions without the point's source, by id.

    Points of reliability C or with assumed lengths have none: the error may be that of the guess.
    """
    residuals = []
    for point, compared in zip(points, comparisons, strict=True):
        ratio = _compute_log_ratio(point, compared, left_out.get(point.id))
        if ratio is not None and point.reliability != GUESSED and compared.spread == 1.0:
            residuals.append(Residual(point.quantity, compared.stratum, find_source(point, compared), ratio))
    return tuple(residuals)


def _compute_log_ratio(point: MeasuredPoint, compared: Comparison, left_out: float | None) -> float | None:
    """The residual of a point; None for verdicts and refusals."""
    error = compared.relative_error
    if error is None or isinstance(compared.measured, str | bool) or isinstance(compared.predicted, str):
        return None
    if left_out is not None and isinstance(compared.measured, float):
        error = left_out / compared.measured - 1
    if error <= -1:
        return None
    return math.log1p(error) if point.is_rate else -math.log1p(error)


def find_source(point: MeasuredPoint, compared: Comparison) -> str:
    """The source that is held out as a whole: a repository, or a model on a GPU in a table of many machines."""
    repository = re.match(r"https://github\.com/([^/]+/[^/]+)", point.source)
    if repository is None:
        return compared.pair or point.source.partition("#")[0]
    if repository.group(1) in TABLES:
        return compared.pair or f"{point.model} on {point.gpu}"
    return compared.pair or repository.group(1)


def find_factor(residuals: Iterable[Residual], stratum: str, kind: str = "", quantile: float = QUANTILE) -> float:
    """The factor of a stratum, from residuals of its kind, or of a kind among residuals of related kinds.

    Counts: the quantile of the sizes of residuals. A source weighs as the root of its points. All points outside the
    stratum weigh as BORROWED of its sources, or less where they are fewer than LEAST_POINTS.
    Source: Lee, Barber and Willett 2023 (conformal prediction with hierarchical data), whose sources weigh alike.

    >>> alike = [Residual("k", Stratum(False), str(n % 5), math.log(1.1)) for n in range(50)]
    >>> round(find_factor(alike, ""), 2)
    1.1
    """
    groups: dict[bool, list[Residual]] = defaultdict(list)
    for residual in residuals:
        groups[belongs(residual, stratum) and kind in ("", residual.kind)].append(residual)
    sizes: list[tuple[float, float]] = []
    for is_own, group in groups.items():
        counts = Counter(residual.source for residual in group)
        total = len(counts) if is_own else BORROWED * min(1.0, len(group) / LEAST_POINTS)
        roots = sum(math.sqrt(count) for count in counts.values())
        sizes += [(abs(residual.log_ratio), total / roots / math.sqrt(counts[residual.source])) for residual in group]
    sizes.sort()
    needed = quantile * sum(weight for _, weight in sizes) * (1 - 1e-12)  # rounding must not skip the last residual
    for size, weight in sizes:
        needed -= weight
        if needed <= 0:
            return math.exp(size)
    return UNKNOWN_FACTOR


def belongs(residual: Residual, stratum: str) -> bool:
    """Whether a point belongs to a stratum by its words: all models, dense models, or dense models of a framework."""
    return stratum in ("", Stratum(residual.stratum.is_moe).words, residual.stratum.words)


def share_inside(
    residuals: Sequence[Residual],
    stratum: str,
    chosen: Sequence[Residual],
    kind: str = "",
    quantile: float = QUANTILE,
) -> float:
    """Share of the chosen points inside the interval without their source. Arguments as those of `find_factor`."""
    inside = 0
    for source in {residual.source for residual in chosen}:
        others = [residual for residual in residuals if residual.source != source]
        factor = find_factor(others, stratum, kind, quantile) if others else UNKNOWN_FACTOR
        # the tolerance covers rounding of a factor that is itself one of the residuals
        inside += sum(
            abs(residual.log_ratio) <= math.log(factor) + 1e-9 for residual in chosen if residual.source == source
        )
    return inside / len(chosen)


def assign_strata(residuals: Sequence[Residual]) -> dict[str, list[Residual]]:
    """The points of one kind by the stratum of their interval: their own, else that of their models, else all."""
    strata: dict[str, list[Residual]] = defaultdict(list)
    enough = {
        stratum
        for stratum in _list_strata(residuals)
        if is_enough([residual for residual in residuals if belongs(residual, stratum)])
    }
    for residual in residuals:
        names = (residual.stratum.words, Stratum(residual.stratum.is_moe).words)
        strata[next((name for name in names if name in enough), "")].append(residual)
    return dict(strata)


def is_enough(residuals: Sequence[Residual]) -> bool:
    """Whether points are enough for an interval of their own."""
    return len(residuals) >= LEAST_POINTS and len({residual.source for residual in residuals}) >= LEAST_SOURCES


def _list_strata(residuals: Iterable[Residual]) -> list[str]:
    words = {(residual.stratum.words, Stratum(residual.stratum.is_moe).words) for residual in residuals}
    return sorted({"", *(name for names in words for name in names)})


def compute_errors(residuals: Iterable[Residual]) -> tuple[MeasuredError, ...]:
    """A row for each stratum with enough points, and for all points of each kind."""
    by_kind: dict[str, list[Residual]] = defaultdict(list)
    for residual in residuals:
        by_kind[residual.kind].append(residual)
    errors: list[MeasuredError] = []
    for kind in sorted(by_kind):
        related = next((words for words in RELATED if re.fullmatch(words, kind)), kind)
        pool = [residual for other in by_kind if re.fullmatch(related, other) for residual in by_kind[other]]
        errors += _compute_kind_errors(kind, by_kind[kind], pool)
    return tuple(errors)


def _compute_kind_errors(kind: str, residuals: list[Residual], pool: list[Residual]) -> Iterable[MeasuredError]:
    """The rows of a kind. pool: its residuals, and those of related kinds."""
    sources = Counter(residual.source for residual in residuals)
    if len(residuals) < LEAST_POINTS or len(residuals) - max(sources.values()) < LEAST_OTHERS:
        if len(pool) > len(residuals) and is_enough(pool):
            yield _borrow_error(kind, residuals, pool)
            return
        yield MeasuredError(kind, "", UNKNOWN_FACTOR, len(residuals), len(sources))
        return
    judged = assign_strata(residuals)
    for stratum in _list_strata(residuals):
        points = [residual for residual in residuals if belongs(residual, stratum)]
        num_sources = len({residual.source for residual in points})
        if is_enough(points):
            inside = round(share_inside(residuals, stratum, judged.get(stratum) or points), 4)
            yield MeasuredError(
                kind, stratum, round(find_factor(residuals, stratum), 4), len(points), num_sources, inside
            )


def _borrow_error(kind: str, residuals: list[Residual], pool: list[Residual]) -> MeasuredError:
    """The interval of a kind with few points, which borrows from related kinds.

    The quantile is the least of BORROWED_QUANTILES that holds NOMINAL of the points without their source.
    """
    for quantile in BORROWED_QUANTILES:
        inside = share_inside(pool, "", residuals, kind, quantile)
        if inside >= NOMINAL:
            break
    factor, sources = find_factor(pool, "", kind, quantile), Counter(point.source for point in residuals)
    if len(sources) < LEAST_BORROWERS or max(sources.values()) > LARGEST_SHARE * len(residuals):
        factor = max(factor, UNKNOWN_FACTOR)
    return MeasuredError(kind, "", round(factor, 4), len(residuals), len(sources), round(inside, 4))


def write_errors(residuals: Iterable[Residual]) -> Path:
    """Write the file that `find_error` reads."""
    path = Path(str(resources.files("rlplan.planner"))) / FILE
    rows = [asdict(error) for error in compute_errors(residuals)]
    path.write_text(json.dumps({"nominal": NOMINAL, "strata": rows}, indent=1) + "\n")
    forget_errors()
    return path
