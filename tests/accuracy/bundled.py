"""The comparison of all published points, made once for the files that look at it (repository/side_by_side.py)."""

from functools import cache

from rlplan.accuracy.compare import AccuracyReport, compare
from rlplan.accuracy.files.reading import bundled_points, published_points


@cache
def published_report() -> AccuracyReport:
    """Every point that comes with rlplan, predicted."""
    return compare(published_points())


@cache
def bundled_report() -> AccuracyReport:
    """The points that formulas were written with."""
    ids = {point.id for point in bundled_points()}
    return AccuracyReport(tuple(point for point in published_report().points if point.id in ids))
