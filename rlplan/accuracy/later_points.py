"""Kinds whose model is not there yet: refused by name, so that coverage is honest."""

from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.registry import Refusal, predicts

TIME_KINDS = (
    "throughput_train",
    "throughput_infer",
    "rl_step_time",
    "weight_sync_time",
    "serving_ttft",
    "serving_tpot",
)


@predicts(*TIME_KINDS)
def refuse_time(point: MeasuredPoint) -> Refusal:
    """Seconds, and tokens in a second."""
    return Refusal("the timing model is not there yet")
