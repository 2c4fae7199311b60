"""The clipped-ratio losses, with and without a KL penalty, on one micro-batch.

In: log-probs of sampled tokens, shape [tokens], fp32. Out: the summed loss and what is worth logging.
"""

from dataclasses import dataclass

import torch

from rlplan.spec.algorithm import AlgorithmSpec


@dataclass(frozen=True)
class LossInputs:
    """Tensors of one micro-batch, each of shape [tokens]: every response token of every sequence in a row.

    weights: what a token counts, so that the weights of a whole mini-batch add up to 1.
    """

    logprobs: torch.Tensor
    behaviour_logprobs: torch.Tensor
    reference_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    weights: torch.Tensor
    teacher_logprobs: torch.Tensor | None = None


def clipped_ratio(inputs: LossInputs, spec: AlgorithmSpec) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sum over tokens of weight * -min(r A, clip(r) A), r = exp(logprob - behaviour logprob); a teacher's KL beside it.

    Source: Schulman et al. 2017, arXiv:1707.06347, equation 7.
    Returns: the loss (a scalar) and per-token tensors: `ratio`, `is_clipped`, `kl` with a reference (the estimate
    alone), `teacher_kl` with a teacher.
    """
    ratio = torch.exp(inputs.logprobs - inputs.behaviour_logprobs)
    clipped = torch.clamp(ratio, 1 - spec.clip_low, 1 + spec.clip_high)
    surrogate = torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)
    loss = -(inputs.weights * surrogate).sum()
    details = {
        "ratio": ratio.detach(),
        "is_clipped": (ratio * inputs.advantages > clipped * inputs.advantages).detach(),
    }
    if inputs.reference_logprobs is not None:
        details["kl"] = _k3(inputs.logprobs.detach(), inputs.reference_logprobs)
    if inputs.teacher_logprobs is not None:
        kl = _k3(inputs.logprobs, inputs.teacher_logprobs)
        loss = loss + spec.teacher_coef * (inputs.weights * kl).sum()
        details["teacher_kl"] = kl.detach()
    return loss, details


def clipped_ratio_with_kl(inputs: LossInputs, spec: AlgorithmSpec) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """`clipped_ratio` with weight * kl_coef * k3 of every token added.

    Source: DeepSeekMath, arXiv:2402.03300, equations 3 and 4.
    Returns: the loss (a scalar) and per-token tensors, as `clipped_ratio`.
    """
    loss, details = clipped_ratio(inputs, spec)
    if inputs.reference_logprobs is not None:
        loss = loss + spec.kl_coef * (inputs.weights * _k3(inputs.logprobs, inputs.reference_logprobs)).sum()
    return loss, details


def _k3(logprobs: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """An unbiased estimate of KL(policy || other), never negative: exp(d) - d - 1, d = other - policy log-prob."""
    difference = others - logprobs
    return torch.exp(difference) - difference - 1
