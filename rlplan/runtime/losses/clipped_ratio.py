"""The clipped-ratio loss with a KL penalty, on one micro-batch.

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


def clipped_ratio_with_kl(inputs: LossInputs, spec: AlgorithmSpec) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sum over tokens of weight * (-min(r A, clip(r) A) + kl_coef * k3), r = exp(logprob - behaviour logprob).

    Source: DeepSeekMath, arXiv:2402.03300, equations 3 and 4 (k3: exp(ref - pol) - (ref - pol) - 1).
    Returns: the loss (a scalar) and per-token tensors: `kl`, `ratio`, `is_clipped`.
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
        difference = inputs.reference_logprobs - inputs.logprobs
        kl = torch.exp(difference) - difference - 1
        loss = loss + spec.kl_coef * (inputs.weights * kl).sum()
        details["kl"] = kl.detach()
    return loss, details
