"""Model FLOPs of a step: what the model needs for its tokens, without recomputation.

In: a Plan whose rollouts all have the maximum length. Out: FLOPs, and the GPUs' peak rate. Left out: recomputation,
scoring and generation.
"""

from rlplan.planner.plan import Plan
from rlplan.spec.hardware.profile import ComputeDtype
from rlplan.timing.training.flops import Lengths, attention_flops, head_flops, linear_flops


def count_model_flops(plan: Plan) -> float:
    """Count the model FLOPs of a step as three forward passes.

    Counts: 6 P a token and causal attention. Source: Kaplan et al. 2020; Narayanan et al. 2021, appendix.
    Differs: llm-foundry and PaLM count attention twice.
    """
    model, workload = plan.job.load_model(), plan.job.workload
    length = workload.max_seq_len
    a_token = linear_flops(model) + head_flops(model)
    lengths = Lengths(length, length**2)
    return 3 * workload.num_rollouts_per_step * (a_token * length + attention_flops(model, lengths))


def read_peak_flops_per_s(plan: Plan) -> float:
    """Read the dense bf16 peak of one GPU, in FLOP/s."""
    return plan.job.load_gpu().flops_per_s(ComputeDtype.BFLOAT16)
