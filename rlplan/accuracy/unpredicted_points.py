"""Kinds that nothing predicts: refused by name with the reason, so that coverage is honest."""

from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.registry import Refusal, predicts


@predicts("memory_snapshot")
def refuse_snapshot(point: MeasuredPoint) -> Refusal:
    """Peaks read from a snapshot: shown, not predicted."""
    return Refusal("a snapshot does not say under which settings it was made")
