"""Losses of a clipped ratio: by token, by sequence (its mean), and by whole answer (its product).

In: log-probs of sampled tokens, shape [tokens], fp32. Out: the summed loss and what is worth logging.
"""

import torch

from rlplan.runtime.losses.inputs import Details, LossInputs, total, total_of_answers
from rlplan.spec.parts.algorithm import AlgorithmSpec


def clipped_ratio(inputs: LossInputs, spec: AlgorithmSpec) -> tuple[torch.Tensor, Details]:
    """Sum over tokens of weight * -min(r A, clip(r) A), r = exp(logprob - behaviour logprob).

    Source: Schulman et al. 2017, arXiv:1707.06347, equation 7.
    """
    loss, details = _surrogate(torch.exp(inputs.log_ratio(spec)), inputs.advantages, spec)
    return total(inputs, spec, loss, details)


def sequence_ratio(inputs: LossInputs, spec: AlgorithmSpec) -> tuple[torch.Tensor, Details]:
    """The same with one ratio a sequence: the geometric mean of its tokens'.

    Source: GSPO, Zheng et al. 2025, arXiv:2507.18071, equations 5 and 7.
    """
    lengths = torch.tensor(inputs.num_learned or inputs.lengths, device=inputs.logprobs.device).clamp(min=1)
    mean = inputs.per_sequence(inputs.log_ratio(spec)) / lengths
    loss, details = _surrogate(inputs.spread(torch.exp(mean)), inputs.advantages, spec)
    return total(inputs, spec, loss, details)


def answer_ratio(inputs: LossInputs, spec: AlgorithmSpec) -> tuple[torch.Tensor, Details]:
    """Sum over sequences of weight * -min(r A, clip(r) A), r being the product of the tokens' ratios.

    Source: Ahmadian et al. 2024, arXiv:2402.14740, section 3.2 (an answer is one action); clipped as in TRL 1.16.
    """
    assert inputs.sequence_advantages is not None
    ratio = torch.exp(inputs.per_sequence(inputs.log_ratio(spec)))
    loss, details = _surrogate(ratio, inputs.sequence_advantages, spec)
    return total_of_answers(inputs, spec, loss, {name: inputs.spread(value) for name, value in details.items()})


def _surrogate(ratio: torch.Tensor, advantages: torch.Tensor, spec: AlgorithmSpec) -> tuple[torch.Tensor, Details]:
    clipped = torch.clamp(ratio, 1 - spec.clip_low, 1 + spec.clip_high)
    is_clipped = (ratio * advantages > clipped * advantages).detach()
    return -torch.minimum(ratio * advantages, clipped * advantages), {"ratio": ratio.detach(), "is_clipped": is_clipped}
