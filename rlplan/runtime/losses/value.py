"""The value loss of one micro-batch.

In: predicted values and returns of response tokens, shape [tokens], fp32. Out: the summed loss and sums for the log.
"""

import torch

from rlplan.spec.parts.algorithm import AlgorithmSpec


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, weights: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over tokens of weight * max((V - R)^2, (V_clipped - R)^2) / 2, V_clipped within `clip` of the old value.

    clip: 0 disables clipping. Source: code of Schulman et al. 2017 (openai/baselines, ppo2/model.py); Ouyang et al.
    2022.
    Returns: the loss (a scalar), and for each token whether clipping changed its loss.
    """
    loss = (values - returns) ** 2
    if not clip:
        return (weights * loss).sum() / 2, torch.zeros_like(values, dtype=torch.bool)
    clipped = old_values + torch.clamp(values - old_values, -clip, clip)
    clipped_loss = (clipped - returns) ** 2
    return (weights * torch.maximum(loss, clipped_loss)).sum() / 2, (clipped_loss > loss).detach()


def value_loss_and_sums(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    weights: torch.Tensor,
    algorithm: AlgorithmSpec,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The clipped value loss of a micro-batch, and sums over the learned tokens for the log."""
    loss, is_clipped = clipped_value_loss(values, old_values, returns, weights, algorithm.value_clip)
    learned = weights > 0
    known, seen = returns[learned].double(), values.detach()[learned].double()
    return loss, {
        "num_tokens": float(learned.sum()),
        "loss": float(loss.detach()),
        "is_clipped_sum": float(is_clipped[learned].double().sum()),
        "value_sum": float(seen.sum()),
        "squared_error_sum": float(((known - seen) ** 2).sum()),
        "return_sum": float(known.sum()),
        "squared_return_sum": float((known**2).sum()),
    }
