"""The comparison of all bundled points, made once for the files that look at it (tests/repository/side_by_side.py)."""

from functools import cache

from rlplan.accuracy.compare import AccuracyReport, compare
from rlplan.accuracy.files.reading import bundled_points


@cache
def bundled_report() -> AccuracyReport:
    """Every bundled point, predicted."""
    return compare(bundled_points())
