"""Kinds that no job says: refused by name with the reason, so that coverage is honest. They stand in no headline."""

from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.registry import Refusal, predicts

REASONS = {
    "rl_colocated_residual": "what stays is the trainer's states and NCCL groups, which the point does not state",
    "trtllm_kv_capacity": "TensorRT-LLM is no framework of a job",
    "inference_peak": "eager generation without an engine and without a trainer: no job says that",
    "zero_model_states": "the ZeRO paper's arithmetic on a parameter count, which is no model that a job names",
}
"""Why nothing is predicted, by kind."""


@predicts(*REASONS)
def refuse(point: MeasuredPoint) -> Refusal:
    """Shown, not predicted."""
    return Refusal(REASONS[point.kind])
