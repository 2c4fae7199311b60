"""Kinds of points that no job can express. They are refused with a reason, so that the coverage includes them."""

from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.registry import Refusal, predicts

REASONS = {
    "rl_colocated_residual": "what stays is the trainer's states and NCCL groups, which the point does not state",
    "trtllm_kv_capacity": "TensorRT-LLM is no framework of a job",
    "inference_peak": "eager generation without an engine and without a trainer: a job cannot express that",
    "zero_model_states": "the ZeRO paper's arithmetic on a parameter count, which is no model that a job names",
}
"""The reason for a missing prediction, by kind."""


@predicts(*REASONS)
def refuse(point: MeasuredPoint) -> Refusal:
    """Refuse a point of these kinds."""
    return Refusal(REASONS[point.kind])
