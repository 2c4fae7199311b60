"""Losses that weigh a token's log-prob: REINFORCE, and CISPO's clipped weights.

In: log-probs of sampled tokens, shape [tokens], fp32. Out: the summed loss and what is worth logging.
"""

import torch

from rlplan.runtime.losses.inputs import Details, LossInputs, total
from rlplan.spec.parts.algorithm import AlgorithmSpec


def log_prob(inputs: LossInputs, spec: AlgorithmSpec) -> tuple[torch.Tensor, Details]:
    """Sum over tokens of weight * -A log p.

    Source: Williams 1992, REINFORCE. After the first optimizer step of a batch it no longer is the policy gradient.
    """
    details = {"ratio": torch.exp(inputs.log_ratio(spec).detach())}
    details["is_clipped"] = torch.zeros_like(details["ratio"], dtype=torch.bool)
    return total(inputs, spec, -inputs.advantages * inputs.logprobs, details)


def clipped_weight(inputs: LossInputs, spec: AlgorithmSpec) -> tuple[torch.Tensor, Details]:
    """Sum over tokens of weight * -min(r, 1 + clip_high) A log p, without gradient through r. clip_low is not used.

    Source: MiniMax-M1, arXiv:2506.13585, equations 4 and 5, without a lower bound as in the paper's runs.
    """
    ratio = torch.exp(inputs.log_ratio(spec).detach())
    highest = 1 + spec.clip_high
    details = {"ratio": ratio, "is_clipped": (ratio > highest) & (inputs.advantages > 0)}
    return total(inputs, spec, -ratio.clamp(max=highest) * inputs.advantages * inputs.logprobs, details)
